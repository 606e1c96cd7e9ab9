"""Where a decode step's time goes, part by part, beside what each part cannot do without.

python -m experiments.bench.step_profile

The engine's own compiled step is timed on a full batch, and each of its parts alone, on the same
shapes, tables and lengths, all layers in one program:

    products   the model without attention: matrix products, norms, rotations, activations, logits
    gather     copying the pages that the block tables list, keys and values, once
    attend     decode attention less the gather: scores, softmax, weighted sums
    kv write   the new keys and values written to their pages
    sampling   tokens from logits
    rest       the step less all of these: dispatch, transfers, and what parts cost each other

The programs take turns, and medians count. A gather is the plainest way to read pages, not the only
one: attention that reads pages where they lie has a negative `attend`. Floors rest on the machine's
measured rates (paged/simulator/roofline.py); the rest's is one dispatch.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.bench.race import MODELS, RANDOM_100M
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Setting, Study, Values
from experiments.timing import medians_ms
from models import checkpoint, llama
from models import params as parameters
from models.config import ModelConfig
from models.families import family
from models.sampling import SamplingArrays, SamplingState, sample
from paged.device.executor import DeviceExecutor
from paged.engine import Engine, EngineConfig
from paged.kv_cache import dense
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.work import kv_bytes_of_token
from paged.policy_driver import decode_inputs
from paged.simulator import roofline
from paged.simulator.roofline import step_cost
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.specs import Cost, Rates

PARTS = ("products", "gather", "attend", "kv write", "sampling", "rest")


@dataclass(frozen=True)
class ProfileFlags(Flags):
    models: tuple[str, ...] = flag(MODELS, "'100m' is a random Llama", choices=MODELS)
    batch: int = flag(32, "sequences of the step", least=1)
    context_tokens: tuple[int, ...] = flag((64, 160), "shortest and longest context", least=2)
    rounds: int = flag(30, "timed runs of the step and of each part", least=1)
    seed: int = flag(0, "of the contexts and stand-in values", least=0)

    def __post_init__(self):
        super().__post_init__()
        self.require_some("models")
        span, most = self.context_tokens, RANDOM_100M.max_position_embeddings - 1
        if len(span) != 2 or not span[0] <= span[1] <= most:
            raise ValueError(
                f"--context_tokens are the shortest and the longest context, from 2 to {most}, not "
                f"{span}"
            )


@dataclass(frozen=True)
class Part:
    """ms: median, or a difference of medians. floor_ms: what the machine cannot go below."""

    model: str
    part: str
    ms: float
    floor_ms: float


def programs(
    params, model: ModelConfig, config: EngineConfig, contexts: Sequence[int], seed: int
) -> dict[str, Callable[[], object]]:
    """What is timed, by name: the step, its parts, and 'attention' for gather and attend."""
    engine = Engine.from_model(params, model, config)
    executor = engine.executor
    assert isinstance(executor, DeviceExecutor)
    params = executor._params  # laid out as the step has them
    S, L, K, D = len(contexts), model.num_layers, model.num_kv_heads, model.head_dim
    P, pages_per_layer = config.page_size, model.num_kv_heads * config.num_blocks
    sharded = ShardedModel.split(model)
    policy = dense.device(config, sharded)
    host_inputs = decode_inputs(config, sharded, contexts)
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
                x, cache.k_pages, cache.v_pages, tables, lengths,
                page_offset=i * pages_per_layer, sliding_window=model.sliding_window,
            )  # fmt: skip

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

        pages = jax.lax.fori_loop(0, L, layer, (cache.k_pages, cache.v_pages))
        return dense.DenseCache(*pages)

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
    """The floor of each part; attention's arithmetic and its reading overlap at best."""
    whole, new = (step_cost(model, c) for c in (contexts, [1] * len(contexts)))
    read, flops = whole.bytes - new.bytes, whole.flops - new.flops
    written = model.num_layers * kv_bytes_of_token(model, "float32") * len(contexts)
    logits = 4 * len(contexts) * model.vocab_size
    gather = read / rates.bytes_per_s
    seconds = {
        "products": rates.floor_s(Cost(new.bytes - written, new.flops), dispatches=0),
        "gather": gather,
        "attend": max(0.0, flops / rates.flops_per_s - gather),
        "kv write": written / rates.bytes_per_s,
        "sampling": logits / rates.bytes_per_s,
        "rest": rates.dispatch_s,
    }
    return {part: 1e3 * value for part, value in seconds.items()}


def parts_of(name: str, ms: dict[str, float], floor_ms: dict[str, float]) -> list[Part]:
    """The parts, which sum to the step."""
    values = {part: ms[part] for part in ("products", "gather", "kv write", "sampling")}
    values["attend"] = ms["attention"] - ms["gather"]
    values["rest"] = ms["step"] - sum(values.values())
    return [Part(name, part, values[part], floor_ms[part]) for part in PARTS]


def values(_: ProfileFlags, parts: Sequence[Part]) -> Values:
    """PART_ms_MODEL, PART_floor_ms_MODEL and PART_share_MODEL, and the same of the step."""
    numbers: dict[str, float] = {}
    for model in dict.fromkeys(part.model for part in parts):
        mine = [part for part in parts if part.model == model]
        step = Part(model, "step", sum(p.ms for p in mine), sum(p.floor_ms for p in mine))
        for part in (*mine, step):
            key = part.part.replace(" ", "_")
            numbers |= {
                f"{key}_ms_{model}": part.ms, f"{key}_floor_ms_{model}": part.floor_ms,
                f"{key}_share_{model}": part.ms / step.ms,
            }  # fmt: skip
    return numbers


def draw(_: ProfileFlags, figure: Figure, parts: Sequence[Part]) -> None:
    """Two stacked bars a model: the step and its floor."""
    models = list(dict.fromkeys(part.model for part in parts))
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        bottom = np.zeros(2)
        for part in (part for part in parts if part.model == model):
            heights = np.maximum([part.ms, part.floor_ms], 0)
            axes.bar(["step", "floor"], heights, bottom=bottom, label=part.part)
            bottom += heights
        axes.set(title=model, ylabel="ms")
        axes.legend(frameon=False, fontsize="small")


def measure(flags: ProfileFlags, _) -> Iterator[Part]:
    """Each model's parts at contexts uniform in their span, both ends included."""
    low, high = flags.context_tokens
    for name in flags.models:
        if name == "100m":
            params = parameters.init(llama.declare(RANDOM_100M), jax.random.key(0))
            model = RANDOM_100M
        else:
            model, params = checkpoint.load(name)
        config = EngineConfig(
            max_num_seqs=flags.batch, max_num_batched_tokens=max(flags.batch, 512),
            max_model_len=high + 1, kv_cache_tokens=max(32_768, 2 * flags.batch * high),
        )  # fmt: skip
        rng = np.random.default_rng(flags.seed)
        contexts = rng.integers(low, high + 1, flags.batch).tolist()
        cases = programs(params, model, config, contexts, flags.seed)
        ms = medians_ms(cases, flags.rounds, name)
        rates = Rates.best(roofline.measure(model, flags.batch))
        yield from parts_of(name, ms, floors_ms(model, contexts, rates))


STUDY = Study(
    __file__,
    title="A decode step's parts and their floors",
    kind="measured",
    claim="a decode step takes little more than its products and its pages' reading",
    rule="what is none of the parts takes less than a third of the step, of every model",
    holds=lambda v: all(x < 1 / 3 for name, x in v.items() if name.startswith("rest_share")),
    setting=Setting(
        "the bundled model (1.5M) and a random Llama of 110M, batch 32, float32", "", "paper"
    ),
    flags=ProfileFlags,
    row=Part,
    measure=measure,
    values=values,
    draw=draw,
    quick={"models": ("bundled",), "rounds": 3},
    minutes=(0.3, 2),
    size=(9, 4),
)

if __name__ == "__main__":
    STUDY.run()
