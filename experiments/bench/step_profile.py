"""Time of each part of a decode step, beside its floor.

python -m experiments.bench.step_profile

The engine's compiled step is timed with a full batch. Each part is timed alone, with the same
shapes, tables and lengths, over all layers:

    products   the model without attention: matrix products, norms, rotations, activations, logits
    gather     copies of the pages in the block tables, keys and values
    attend     decode attention without the gather: scores, softmax, weighted sums. Negative if
               attention reads pages in place faster than a gather copies them
    kv write   new keys and values, written to their pages
    sampling   tokens from logits
    rest       the step without these: dispatch, transfers, and what parts cost each other

Floors rest on rates measured on this machine (paged/simulator/roofline.py). The floor of `rest` is
one dispatch.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.bench.race import MODELS, RANDOM_100M, model_config
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Run, Setting, Study, Values
from experiments.timing import medians_ms
from models import checkpoint, llama
from models import params as parameters
from models.config import ModelConfig
from models.families import family
from models.sampling import SamplingArrays, SamplingState, sample
from paged.config import EngineConfig
from paged.device.executor import DeviceExecutor
from paged.engine import Engine
from paged.kv_cache import vllm
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.work import kv_bytes_of_token
from paged.policy_driver import decode_inputs
from paged.simulator import roofline
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.specs import Cost, Rates

PARTS = ("products", "gather", "attend", "kv write", "sampling", "rest")


@dataclass(frozen=True)
class ProfileFlags(Flags):
    models: tuple[str, ...] = flag(MODELS, "bundled; 100m: a random Llama", choices=MODELS)
    batch: int = flag(32, "sequences of the step", least=1)
    contexts: tuple[int, ...] = flag((64, 160), "shortest and longest context", least=2)
    rounds: int = flag(30, "timed runs of the step and of each part", least=1)
    seed: int = flag(0, "of contexts and values", least=0)

    def __post_init__(self):
        super().__post_init__()
        longest = RANDOM_100M.max_position_embeddings - 1
        if len(self.contexts) != 2 or not self.contexts[0] <= self.contexts[1] <= longest:
            raise ValueError(
                f"--contexts must be the shortest and the longest, up to {longest}, not "
                f"{self.contexts}"
            )

    @property
    def config(self) -> EngineConfig:
        longest = self.contexts[1]
        return EngineConfig(
            max_num_seqs=self.batch, max_num_batched_tokens=max(self.batch, 512),
            max_model_len=longest + 1, kv_cache_tokens=max(32_768, 2 * self.batch * longest),
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """ms: median, or a difference of medians."""

    model: str
    part: str
    ms: float
    floor_ms: float


def programs(
    params, model: ModelConfig, config: EngineConfig, contexts: Sequence[int], seed: int
) -> dict[str, Callable[[], object]]:
    """The timed functions: the step, its parts, and 'attention' for gather and attend."""
    executor = Engine.from_model(params, model, config).executor
    assert isinstance(executor, DeviceExecutor)
    params = executor.params  # with the step's layout
    S, L, K, D = len(contexts), model.num_layers, model.num_kv_heads, model.head_dim
    P, pages_per_layer = config.page_size, model.num_kv_heads * config.num_blocks
    sharded = ShardedModel.split(model)
    policy, host_inputs = vllm.device(config, sharded), decode_inputs(config, sharded, contexts)
    inputs = jax.tree.map(jnp.asarray, replace(host_inputs, packed=None))
    cache, written = (jax.jit(policy.init)() for _ in range(2))
    plan = jax.jit(policy.begin_step)(cache, inputs)[1]
    lengths = jnp.broadcast_to(plan.lengths[:, None], (S, K))
    listed = plan.tables[plan.tables % config.num_blocks > 0]
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (S, model.num_heads, D))
    k_new = jax.random.normal(keys[1], (S, K, D))
    logits = jax.random.normal(keys[2], (S, model.vocab_size))
    state = SamplingState.empty(config.max_num_seqs, config.max_model_len)

    def no_attention(layer, q, k, v, cache):
        return q + jnp.repeat(k + v, model.num_heads // K, axis=1), cache  # no product is dead

    @jax.jit
    def products(params, inputs):
        hidden, _ = family(model).forward(
            params, model, inputs.tokens, inputs.positions, no_attention, None
        )
        return family(model).logits(params, model, hidden)

    @jax.jit
    def attention(q, cache, tables, lengths):
        def layer(i, x):
            return q + paged_attention(
                x, cache.k_pages, cache.v_pages, tables, lengths, page_offset=i * pages_per_layer
            )

        return jax.lax.fori_loop(0, L, layer, q)

    @jax.jit
    def gather(cache, ids):
        def layer(i, _):
            rows = ids + i * pages_per_layer
            return jax.tree.map(lambda x: x.reshape(-1, P * D)[rows], cache)

        return jax.lax.fori_loop(1, L, layer, layer(0, None))

    @functools.partial(jax.jit, donate_argnums=0)
    def write(cache, k, slots):
        def layer(i, pages):
            return write_kv(pages[0], pages[1], k, k, slots + i * pages_per_layer * P)

        return vllm.VLLMCache(*jax.lax.fori_loop(0, L, layer, (cache.k_pages, cache.v_pages)))

    @jax.jit
    def tokens(logits, state, inputs):
        how = SamplingArrays.of_rows(inputs.sampling)
        return sample(logits, how, inputs.lengths, state, inputs.slots)

    def write_in_place():
        nonlocal written
        written = write(written, k_new, plan.slot_mapping)
        return written

    return {
        "step": lambda: executor.execute(host_inputs).wait(),
        "products": lambda: products(params, inputs),
        "attention": lambda: attention(q, cache, plan.tables, lengths),
        "gather": lambda: gather(cache, listed),
        "kv write": write_in_place,
        "sampling": lambda: tokens(logits, state, inputs),
    }


def floors_ms(model: ModelConfig, contexts: Sequence[int], rates: Rates) -> dict[str, float]:
    """The floor of each part. Attention's operations may overlap its reads."""
    whole, new = (roofline.step_cost(model, c) for c in (contexts, [1] * len(contexts)))
    read, flops = whole.bytes - new.bytes, whole.flops - new.flops
    written = model.num_layers * kv_bytes_of_token(model, "float32") * len(contexts)
    gather = read / rates.bytes_per_s
    seconds = {
        "products": rates.floor_s(Cost(new.bytes - written, new.flops), dispatches=0),
        "gather": gather,
        "attend": max(0.0, flops / rates.flops_per_s - gather),
        "kv write": written / rates.bytes_per_s,
        "sampling": 4 * len(contexts) * model.vocab_size / rates.bytes_per_s,
        "rest": rates.dispatch_s,
    }
    return {part: 1e3 * value for part, value in seconds.items()}


def profile(flags: ProfileFlags, name: str) -> list[Row]:
    """The parts of one model's step."""
    if name == "100m":
        model, params = RANDOM_100M, parameters.init(llama.declare(RANDOM_100M), jax.random.key(0))
    else:
        model, params = checkpoint.load(name)
    shortest, longest = flags.contexts
    rng = np.random.default_rng(flags.seed)
    contexts = rng.integers(shortest, longest + 1, flags.batch).tolist()
    ms = medians_ms(programs(params, model, flags.config, contexts, flags.seed), flags.rounds, name)
    floors = floors_ms(model, contexts, Rates.best(roofline.measure(model, flags.batch)))
    parts = {part: ms[part] for part in ("products", "gather", "kv write", "sampling")}
    parts["attend"] = ms["attention"] - ms["gather"]
    parts["rest"] = ms["step"] - sum(parts.values())
    return [Row(name, part, parts[part], floors[part]) for part in PARTS]


def check(flags: ProfileFlags) -> None:
    for name in flags.models:
        assert model_config(name)
    assert flags.config  # raises ValueError for flags that do not fit


def measure(flags: ProfileFlags, _: Run) -> Iterator[Row]:
    for name in flags.models:
        yield from profile(flags, name)


def values(_: ProfileFlags, rows: Sequence[Row]) -> Values:
    """Times of the step and of its parts, and the step's time over its floor, by model."""
    numbers: dict[str, float | None] = {
        f"{row.part.replace(' ', '_')}_ms_{row.model}": row.ms for row in rows
    }
    for model in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == model]
        step = sum(row.ms for row in of_model)
        numbers[f"step_ms_{model}"] = step
        numbers[f"step_over_floor_{model}"] = step / sum(row.floor_ms for row in of_model)
    return numbers


def draw(_: ProfileFlags, figure: Figure, rows: Sequence[Row]) -> None:
    models = list(dict.fromkeys(row.model for row in rows))
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        bottom = np.zeros(2)
        for row in (row for row in rows if row.model == model):
            heights = np.maximum([row.ms, row.floor_ms], 0)
            axes.bar(["step", "floor"], heights, bottom=bottom, label=row.part)
            bottom += heights
        axes.set_title(model, loc="left", fontsize="medium")
        axes.set(ylabel="ms")
        axes.legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="Parts of a decode step on this machine",
    kind="measured",
    claim="matrix products take most of a decode step, and a step at most four times its floor",
    rule="on the model of 110M: products at least half of the step; step at most 4 times its floor",
    holds=lambda v: (
        v["products_ms_100m"] >= 0.5 * v["step_ms_100m"] and v["step_over_floor_100m"] <= 4
    ),
    setting=Setting(
        "the bundled model (1.5M) and a random Llama of 110M, batch 32, contexts of 64 to 160",
        "the claim is ours",
        "reduced",
    ),
    flags=ProfileFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"models": ("bundled",), "rounds": 5},
    minutes=(1, 3),
    size=(8, 4),
)

if __name__ == "__main__":
    STUDY.run()
