"""The LoRA operator x·A·B alone, on this machine: SGMV and what Punica compares it with (§7.1).

python -m experiments.papers.punica.lora_operator_cpu

Over popularities, batch sizes and ranks, as in Figs. 7 to 9: SGMV, as this machine runs it, beside
a loop over adapters, gathering the weights of every token for one batched product,
`jax.lax.ragged_dot`, and the projection that LoRA adds to. A CPU has neither the paper's launches
nor its tensor cores, so the shape is to be compared, not microseconds. All of a batch size and a
rank run on the same weights, an adapter for each token; popularity says which of them the tokens
use. The peers have their weights in the layout that suits them. FLOPs and I/O are counted by the
paper's formulas; floors rest on the machine's measured rates, caches warm or not.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.lib.typed_flags import Flags, flag
from experiments.study import Setting, Study, Values
from experiments.timing import LEAST_S, medians_s
from models.config import ModelConfig
from paged.simulator import roofline
from pallas_kernels.lora import PAGE_RANKS, Segments, sgmv, sgmv_expand
from pallas_kernels.lora.specs import POPULARITIES, segment_lengths
from pallas_kernels.specs import Cost, Rates

# In the order in which they are timed and drawn. `base` is the projection that LoRA adds to.
IMPLEMENTATIONS = ("sgmv", "loop", "gather_bmm", "ragged_dot", "base")


EXPAND = "expand"  # an SGMV alone, of the paper's roofline


@dataclass(frozen=True)
class OperatorFlags(Flags):
    popularities: tuple[str, ...] = flag(
        tuple(POPULARITIES), "of adapters (§7)", choices=tuple(POPULARITIES)
    )
    batches: tuple[int, ...] = flag((1, 4, 16, 32, 64), "tokens of a call", least=1)
    ranks: tuple[int, ...] = flag((8, 16, 32, 64), "of all adapters of a call", least=1)
    inputs: int = flag(4096, "width of the input", least=1)
    outputs: int = flag(4096, "width of the output", least=1)
    dtype: str = flag(
        "", "of all arrays; empty for float32 on a CPU, where no other is fast, and else bfloat16",
        choices=("", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    rounds: int = flag(5, "of all implementations, in turn", least=1)
    seed: int = flag(0, "of the weights", least=0)

    def __post_init__(self):
        super().__post_init__()
        self.require_some("popularities", "batches", "ranks")


@dataclass(frozen=True)
class Row:
    """One call. us: median. flops, io_bytes: by the paper's formulas, of the rank itself; `base`
    has those of the LoRA that would be added to it. floor_us: of these at the measured rates."""

    implementation: str
    popularity: str
    batch: int
    rank: int
    adapters: int
    us: float
    flops: int
    io_bytes: int
    floor_us: float


@dataclass(frozen=True)
class Case:
    """One call. rank: of all adapters. Widths are those of the projection."""

    popularity: str
    batch: int
    rank: int
    inputs: int
    outputs: int
    dtype: str = "float32"

    @property
    def lengths(self) -> list[int]:
        return segment_lengths(self.popularity, self.batch)

    def sgmv_cost(self, inputs: int, outputs: int) -> Cost:
        """Of one SGMV, by the paper's formulas (§7.1); 16 bits there, this case's dtype here."""
        moved = self.batch * (inputs + outputs) + len(self.lengths) * inputs * outputs
        return Cost(
            bytes=moved * jnp.dtype(self.dtype).itemsize,
            flops=2 * self.batch * inputs * outputs,
        )

    @property
    def expand_cost(self) -> Cost:
        return self.sgmv_cost(self.rank, self.outputs)

    @property
    def cost(self) -> Cost:
        """Of the operator, which is two SGMVs."""
        shrink, expand = self.sgmv_cost(self.inputs, self.rank), self.expand_cost
        return Cost(shrink.bytes + expand.bytes, shrink.flops + expand.flops)


@dataclass(frozen=True)
class Weights:
    """Of `batch` adapters of one rank, and x. Pages are as `sgmv` has them; the peers' weights are
    a [batch, I, rank] and b [batch, rank, O]."""

    x: jax.Array
    base: jax.Array
    a_pages: jax.Array
    b_pages: jax.Array
    rank_pages: jax.Array
    num_rank_pages: jax.Array
    a: jax.Array
    b: jax.Array

    @classmethod
    def draw(cls, case: Case, seed: int) -> "Weights":
        n, Q = case.batch, -(-case.rank // PAGE_RANKS)
        keys = jax.random.split(jax.random.key(seed), 5)
        a = jax.random.normal(keys[0], (n, case.inputs, case.rank)) * case.inputs**-0.5
        b = jax.random.normal(keys[1], (n, case.rank, case.outputs)) * case.rank**-0.5
        missing = ((0, 0), (0, Q * PAGE_RANKS - case.rank), (0, 0))
        order = np.asarray(jax.random.permutation(keys[2], n * Q))

        def paged(rows):
            pages = jnp.pad(rows, missing).reshape(n * Q, PAGE_RANKS, -1)
            return jnp.zeros_like(pages).at[order].set(pages)[None]

        base = jax.random.normal(keys[3], (case.inputs, case.outputs)) * case.inputs**-0.5
        x = jax.random.normal(keys[4], (case.batch, case.inputs))
        x, base, a_pages, b_pages, a, b = (
            z.astype(case.dtype) for z in (x, base, paged(a.swapaxes(1, 2)), paged(b), a, b)
        )
        return cls(
            x, base, a_pages, b_pages, jnp.asarray(order.reshape(n, Q), jnp.int32),
            jnp.full(n, Q, jnp.int32), a, b,
        )  # fmt: skip


def segments_of(case: Case) -> Segments:
    """The adapters' tokens lie side by side; one program serves all popularities."""
    lengths = np.array(case.lengths)
    ends = np.cumsum(lengths)

    def padded(numbers):
        return jnp.asarray(np.pad(numbers, (0, case.batch - len(lengths))), jnp.int32)

    count = jnp.array([len(lengths)], jnp.int32)
    return Segments(padded(np.arange(len(lengths))), padded(ends - lengths), padded(ends), count)


@jax.jit
def _sgmv(w: dict[str, Any], segments):
    return sgmv(
        w["x"], w["a_pages"], w["b_pages"], jnp.int32(0), segments, w["rank_pages"],
        w["num_rank_pages"],
    )  # fmt: skip


@jax.jit
def _expand(v, w: dict[str, Any], segments):
    return sgmv_expand(
        v, w["b_pages"], jnp.int32(0), segments, w["rank_pages"], w["num_rank_pages"]
    )


@functools.partial(jax.jit, static_argnames="length")
def _one_adapter(x, a, b, start, length):
    return jax.lax.dynamic_slice_in_dim(x, start, length) @ a @ b


@jax.jit
def _gather_bmm(x, a, b, adapter_of_token):
    v = jnp.einsum("ti,tir->tr", x, a[adapter_of_token])
    return jnp.einsum("tr,tro->to", v, b[adapter_of_token])


@jax.jit
def _ragged_dot(x, a, b, sizes):
    return jax.lax.ragged_dot(jax.lax.ragged_dot(x, a, sizes), b, sizes)


def programs(case: Case, weights: Weights) -> dict[str, Callable[[], jax.Array]]:
    """What gives x·A·B, by the names of `IMPLEMENTATIONS`, and x·W as 'base'.

    sgmv: as this machine has it. loop: a program for each adapter, one dispatched after the other.
    gather_bmm: the weights of each token are gathered and multiplied in one batch. ragged_dot:
    JAX's own product of segments.
    """
    w, segments = vars(weights), segments_of(case)
    x, a, b = weights.x, weights.a, weights.b
    lengths = case.lengths
    adapter_of_token = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths), jnp.int32)
    sizes = jnp.asarray(np.pad(lengths, (0, case.batch - len(lengths))), jnp.int32)
    starts = np.cumsum(lengths) - lengths
    # Views of the stacks, which other frameworks have for nothing.
    parts = [
        (jnp.int32(start), length, a[i], b[i])
        for i, (start, length) in enumerate(zip(starts, lengths))
    ]

    def loop():
        rows = [_one_adapter(x, a, b, start, length) for start, length, a, b in parts]
        return jnp.concatenate(rows) if len(rows) > 1 else rows[0]

    product = jax.jit(jnp.matmul)
    return {
        "sgmv": lambda: _sgmv(w, segments),
        "loop": loop,
        "gather_bmm": lambda: _gather_bmm(x, a, b, adapter_of_token),
        "ragged_dot": lambda: _ragged_dot(x, a, b, sizes),
        "base": lambda: product(x, weights.base),
    }


def expand_program(case: Case, weights: Weights) -> Callable[[], jax.Array]:
    """One SGMV alone, rank to outputs: what the paper's roofline shows (Fig. 7)."""
    width = weights.rank_pages.shape[1] * PAGE_RANKS
    v = weights.x[:, :width] if case.inputs >= width else jnp.ones((case.batch, width), case.dtype)
    segments = segments_of(case)
    w = vars(weights)
    return lambda: _expand(v, w, segments)


def rows_of(case: Case, weights: Weights, rounds: int, rates: Rates) -> Iterator[Row]:
    """All implementations of a case, and its `expand`."""
    runs = programs(case, weights) | {EXPAND: expand_program(case, weights)}
    for name, seconds in medians_s(runs, rounds, least_s=LEAST_S).items():
        cost = case.expand_cost if name == EXPAND else case.cost
        yield Row(
            name, case.popularity, case.batch, case.rank, len(case.lengths), 1e6 * seconds,
            cost.flops, cost.bytes, 1e6 * rates.floor_s(cost),
        )  # fmt: skip


def measure(flags: OperatorFlags, _) -> Iterator[Row]:
    dtype = flags.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    shape = ModelConfig(
        vocab_size=1, hidden_size=flags.inputs, intermediate_size=flags.outputs, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=2,
    )  # fmt: skip
    rates = Rates.best(roofline.measure(shape, max(flags.batches)))
    for batch, rank in itertools.product(sorted(set(flags.batches)), sorted(set(flags.ranks))):
        cases = [
            Case(p, batch, rank, flags.inputs, flags.outputs, dtype) for p in flags.popularities
        ]
        weights = Weights.draw(cases[0], flags.seed)
        for case in cases:
            yield from rows_of(case, weights, flags.rounds, rates)


def find(rows: Sequence[Row], implementation: str, popularity: str, rank: int) -> list[Row]:
    """By batch size."""
    key = implementation, popularity, rank
    mine = [r for r in rows if (r.implementation, r.popularity, r.rank) == key]
    return sorted(mine, key=lambda row: row.batch)


def values(_: OperatorFlags, rows: Sequence[Row]) -> Values:
    """At the largest batch: how many times SGMV's time each other takes, by popularity and rank;
    SGMV over the projection; and how SGMV's time grows from the smallest batch to the largest."""
    numbers: dict[str, float] = {}
    for popularity in dict.fromkeys(row.popularity for row in rows):
        for rank in sorted({row.rank for row in rows}):
            us = {name: find(rows, name, popularity, rank)[-1].us for name in IMPLEMENTATIONS}
            mine = find(rows, "sgmv", popularity, rank)
            at = f"{popularity}_r{rank}_b{mine[-1].batch}"
            for name in IMPLEMENTATIONS[1:-1]:
                numbers[f"{name}_over_sgmv_{at}"] = us[name] / us["sgmv"]
            numbers[f"sgmv_over_base_{at}"] = us["sgmv"] / us["base"]
            numbers[f"sgmv_growth_{at}"] = mine[-1].us / mine[0].us
            numbers[f"sgmv_share_of_floor_{at}"] = mine[-1].floor_us / mine[-1].us
    return numbers


def table(_: OperatorFlags, rows: Sequence[Row]) -> str:
    """A line for each popularity, rank and batch size."""
    lines = [
        "µs of x·A·B:" + f"{'rank':>14}{'batch':>7}{'n':>4}"
        + "".join(f"{name:>12}" for name in IMPLEMENTATIONS) + f"{'floor':>10}"
    ]  # fmt: skip
    us = {(r.implementation, r.popularity, r.rank, r.batch): r.us for r in rows}
    for row in (row for row in rows if row.implementation == "sgmv"):
        at = row.popularity, row.rank, row.batch
        cells = "".join(f"{us[name, *at]:12,.0f}" for name in IMPLEMENTATIONS)
        lines.append(
            f"{row.popularity:12}{row.rank:14}{row.batch:7}{row.adapters:4}{cells}"
            f"{row.floor_us:10,.0f}"
        )
    return "\n".join(lines)


def draw(_: OperatorFlags, figure: Figure, rows: Sequence[Row]) -> None:
    """Fig. 8, a panel for each popularity; Fig. 9, a panel for each rank; Fig. 7, the roofline of
    one SGMV."""
    ranks = sorted({row.rank for row in rows})
    popularities = list(dict.fromkeys(row.popularity for row in rows))
    rank = min(ranks, key=lambda rank: abs(rank - 16))  # the paper's
    panels = figure.subplots(3, max(len(popularities), len(ranks)), squeeze=False)
    for axes, popularity in zip(panels[0], popularities):
        for name in IMPLEMENTATIONS:
            mine = find(rows, name, popularity, rank)
            style = "--" if name == "base" else "o-"
            axes.plot([r.batch for r in mine], [r.us for r in mine], style, label=name)
        mine = find(rows, "sgmv", popularity, rank)
        axes.plot([r.batch for r in mine], [r.floor_us for r in mine], ":", label="floor")
        axes.set(title=f"{popularity}, rank {rank}", yscale="log", xlabel="batch size", ylabel="µs")
    for axes, of_rank in zip(panels[1], ranks):
        for popularity in popularities:
            mine = find(rows, "sgmv", popularity, of_rank)
            axes.plot([r.batch for r in mine], [r.us for r in mine], "o-", label=popularity)
        axes.set(title=f"SGMV, rank {of_rank}", xlabel="batch size", ylabel="µs", ylim=(0, None))
    for popularity in popularities:
        mine = find(rows, EXPAND, popularity, rank)
        intensity = [r.flops / r.io_bytes for r in mine]
        panels[2, 0].plot(intensity, [r.flops / r.us / 1e3 for r in mine], "o-", label=popularity)
        panels[2, 0].plot(intensity, [r.flops / r.floor_us / 1e3 for r in mine], ":", c="#888888")
    panels[2, 0].set(
        xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="GFLOP/s",
        title=f"SGMV expand, rank {rank} (dotted: floor)",
    )  # fmt: skip
    for axes in panels.flat:
        if axes.has_data():
            axes.legend(frameon=False, fontsize="small")
        else:
            axes.set_axis_off()


STUDY = Study(
    __file__,
    title="The LoRA operator on this machine (the shapes of Punica Figs. 7 to 9)",
    kind="analogue",
    claim="SGMV is faster than a loop and than gathering weights, whatever the popularity",
    rule="at the largest batch loop and gather_bmm take longer at every popularity and rank",
    holds=lambda v: all(
        value > 1 for name, value in v.items() if name.startswith(("loop_", "gather_bmm_"))
    ),
    setting=Setting(
        "4096 × 4096, batches of 1 to 64, float32 on this machine",
        "the paper has 16 bits on an A100; a CPU has no launches and no tensor cores",
        "wrong",
    ),
    flags=OperatorFlags,
    row=Row,
    measure=measure,
    values=values,
    # Of microseconds at batch 64 over batch 1, §7.1.
    paper={
        "sgmv_growth_distinct_r16_b64": 116 / 37, "sgmv_growth_uniform_r16_b64": 46 / 37,
        "sgmv_growth_skewed_r16_b64": 46 / 37, "sgmv_growth_identical_r16_b64": 40 / 37,
    },
    draw=draw,
    table=table,
    quick={"batches": (1, 16), "ranks": (16,), "inputs": 512, "outputs": 512, "rounds": 2},
    minutes=(0.5, 8),
    size=(13, 10),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
