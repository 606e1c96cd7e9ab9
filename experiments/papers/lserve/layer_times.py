"""Times of one layer's attention under LServe and beside it, without an engine: what the paper's
figures of a layer share. All that is compared takes turns, and medians count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from experiments.lib.typed_flags import Flags, flag
from experiments.papers.lserve.layer import PAGE_SIZE, Layer, config_of
from experiments.timing import medians_ms
from models.config import ModelConfig
from paged.simulator import roofline
from pallas_kernels.specs import Cost, Rates

PRODUCTS = "products"  # of a layer's matrices
# A small random model of Llama-3-8B's head shapes, for whole engines.
MODEL = ModelConfig(
    vocab_size=512, hidden_size=1024, intermediate_size=2048, num_layers=2, num_heads=32,
    num_kv_heads=8, head_dim=128, max_position_embeddings=2**20,
)  # fmt: skip
LAYER_SETTING = (
    "a layer of Llama-3-8B's shape: 32 query heads, 8 KV heads of 128, of which half stream; a "
    "budget of 4,096 tokens in pages of 64, statistics of 16, reused by 4 tokens; sink 128, window "
    "256; float32, XLA on this machine"
)
DIFFERS = "the paper times CUDA kernels on an A100, with keys and values of 4 or 8 bits"


@dataclass(frozen=True)
class LayerFlags(Flags):
    """A study gives `contexts` defaults of its own."""

    contexts: tuple[int, ...] = flag((4096,), "tokens", least=PAGE_SIZE)
    rounds: int = flag(5, "timed runs of all that is compared", least=1)
    seed: int = flag(0, "of weights, caches and prompts", least=0, most=2**32 - 1)

    @property
    def step(self) -> int:
        """Tokens of which contexts are multiples."""
        return PAGE_SIZE

    def __post_init__(self):
        super().__post_init__()
        self.require_some("contexts")
        for context in self.contexts:
            if context % self.step or context > MODEL.max_position_embeddings:
                raise ValueError(
                    f"--contexts are multiples of {self.step}, up to "
                    f"{MODEL.max_position_embeddings}, not {context}"
                )

    @property
    def ascending(self) -> list[int]:
        return sorted(set(self.contexts))


@dataclass(frozen=True)
class ChunkFlags(LayerFlags):
    chunk: int = flag(1024, "tokens of a chunk of a prompt", least=64)

    @property
    def step(self) -> int:
        return self.chunk


@dataclass(frozen=True)
class Row:
    """ms: of a token in decode, of a whole prompt in prefill. floor_ms: of bytes and flops, which
    it cannot do without, at the machine's measured rates. kept: share of the tiles that are
    computed, 1 - r, in prefill."""

    system: str
    context: int
    ms: float
    floor_ms: float
    bytes: int
    flops: int
    kept: float = 1.0


@dataclass(frozen=True)
class Times:
    """How often is timed, and what the machine can do at best."""

    rounds: int
    rates: Rates
    progress: bool = True

    @classmethod
    def of(cls, flags: LayerFlags) -> "Times":
        return cls(flags.rounds, Rates.best(roofline.measure(MODEL, 32)))

    def medians_ms(self, name: str, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        return medians_ms(runs, self.rounds, name if self.progress else "")

    def floor_ms(self, cost: Cost) -> float:
        return 1e3 * self.rates.floor_s(cost, dispatches=0)

    def row(self, system: str, context: int, ms: float, cost: Cost, kept: float = 1.0) -> Row:
        return Row(system, context, ms, self.floor_ms(cost), cost.bytes, cost.flops, kept)


def products_of(model: ModelConfig, tokens: int, seed: int):
    """(what computes a layer's matrix products, their cost). They take what their predecessors
    give, so none is dead."""
    E, F = model.hidden_size, model.intermediate_size
    HD, KD = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    shapes = [(E, HD + 2 * KD), (HD, E), (E, 2 * F), (F, E)]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    weights = [jax.random.normal(key, s) * s[0] ** -0.5 for key, s in zip(keys, shapes)]

    @jax.jit
    def run(x, weights):
        qkv, o, gate_up, down = weights
        attended = (x @ qkv)[:, :HD] @ o
        return (attended @ gate_up)[:, :F] @ down

    x, numbers = jnp.ones((tokens, E)), sum(a * b for a, b in shapes)
    return lambda: run(x, weights), Cost(4 * numbers, 2 * tokens * numbers)


def prefill_rows(
    listed: Mapping[str, Mapping[str, Any]], contexts: Sequence[int], chunk: int, times: Times,
    model: ModelConfig, seed: int, more: Mapping[str, tuple[Callable[[], object], Cost]],
) -> list[Row]:  # fmt: skip
    """The prompts' attention, chunk by chunk, of which shorter prompts are the first ones. more:
    what each chunk costs besides, wherever it begins."""
    longest = max(contexts)
    layers = {
        name: Layer(config_of(system, longest, chunk=chunk), model, seed)
        for name, system in listed.items()
    }
    steps = {name: layer.chunks(longest) for name, layer in layers.items()}
    runs: dict[str, Callable[[], object]] = {
        f"{name} {i}": partial(layer.run, steps[name][i])
        for i in range(longest // chunk)
        for name, layer in layers.items()
    }
    ms = times.medians_ms(
        f"prefill {longest}", runs | {name: run for name, (run, _) in more.items()}
    )
    rows = []
    for context in contexts:
        chunks = range(-(-context // chunk))
        for name, layer in layers.items():
            costs = [layer.reads.prefill(i * chunk, (i + 1) * chunk) for i in chunks]
            cost = Cost(sum(c.bytes for c in costs), sum(c.flops for c in costs))
            total = sum(ms[f"{name} {i}"] for i in chunks)
            rows.append(times.row(name, context, total, cost, layer.reads.kept(context)))
        for name, (_, c) in more.items():
            cost = Cost(len(chunks) * c.bytes, len(chunks) * c.flops)
            rows.append(times.row(name, context, len(chunks) * ms[name], cost))
    return rows


def ms_of(rows: Sequence[Row], system: str, context: int) -> float | None:
    return next((r.ms for r in rows if (r.system, r.context) == (system, context)), None)


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def speedups(rows: Sequence[Row], system: str, name: str) -> dict[str, float | None]:
    """Over the dense policy, by context: NAME_4k."""
    contexts = dict.fromkeys(row.context for row in rows)
    return {
        f"{name}_{thousands(c)}": ratio(ms_of(rows, "dense", c), ms_of(rows, system, c))
        for c in contexts
    }


def attention_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Of the dense layer's attention and matrix products, the rest left out (Fig. 2)."""
    found = {}
    for context in dict.fromkeys(row.context for row in rows):
        attention, products = (ms_of(rows, name, context) for name in ("dense", PRODUCTS))
        if attention is not None and products is not None:
            found[f"attention_share_{thousands(context)}"] = attention / (attention + products)
    return found


def thousands(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)


def draw(_: LayerFlags, figure: Figure, rows: Sequence[Any]) -> None:
    """Over the context, a line for each system; dotted: floors."""
    axes = figure.subplots()
    for name in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == name]
        x = [row.context for row in mine]
        (line,) = axes.plot(x, [row.ms for row in mine], "o-", label=name)
        axes.plot(x, [row.floor_ms for row in mine], ":", c=line.get_color())
    axes.set(xlabel="context (dotted: floor)", ylabel="ms", xscale="log", yscale="log")
    axes.legend(frameon=False, fontsize="small")
