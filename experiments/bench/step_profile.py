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
measured rates (paged/simulator/roofline.py); the rest's is one dispatch. Writes to --output_dir:
parts.csv, report.json, summary.json and parts.png.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.bench.decode_inputs import fill_decodes
from experiments.bench.vs_transformers import MODELS, MODELS_HELP, RANDOM_100M, integers
from experiments.lib import run_record
from experiments.lib.program import Options, Program, refusals
from experiments.timing import medians_ms
from models import checkpoint, llama
from models import params as parameters
from models.config import ModelConfig
from models.families import family
from models.sampling import SamplingArrays, SamplingState, sample
from paged.device.executor import DeviceExecutor
from paged.device.step_inputs import empty_step_inputs
from paged.engine import Engine, EngineConfig
from paged.kv_cache import dense
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.work import kv_bytes_of_token
from paged.simulator import roofline
from paged.simulator.roofline import step_cost
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.specs import Cost, Rates

PARTS = ("products", "gather", "attend", "kv write", "sampling", "rest")


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
    policy = dense.device(config, ShardedModel.split(model))
    host_inputs = empty_step_inputs(
        0, S, config.max_prefills_per_step, config.max_num_seqs, engine.host_policy.table_width
    )
    fill_decodes(host_inputs, contexts, P)
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


def summary(parts: Sequence[Part]) -> dict[str, float]:
    """<part>_ms_<model> and step_ms_<model>, and the same with floor_ms."""
    numbers: dict[str, float] = {}
    for model in dict.fromkeys(part.model for part in parts):
        mine = [part for part in parts if part.model == model]
        for part in mine:
            key = part.part.replace(" ", "_")
            numbers |= {f"{key}_ms_{model}": part.ms, f"{key}_floor_ms_{model}": part.floor_ms}
        numbers[f"step_ms_{model}"] = sum(part.ms for part in mine)
        numbers[f"step_floor_ms_{model}"] = sum(part.floor_ms for part in mine)
    return numbers


def table(parts: Sequence[Part], batch: int) -> str:
    """A line a part."""
    numbers = summary(parts)
    lines = [f"{f'a decode step of {batch}':24}{'ms':>9}{'share':>8}{'floor ms':>10}"]
    for model in dict.fromkeys(part.model for part in parts):
        mine = [part for part in parts if part.model == model]
        step, floor = numbers[f"step_ms_{model}"], numbers[f"step_floor_ms_{model}"]
        for p in (*mine, Part(model, "step", step, floor)):
            lines.append(f"{model:12}{p.part:12}{p.ms:9.2f}{p.ms / step:8.0%}{p.floor_ms:10.2f}")
    return "\n".join(lines)


def plot(parts: Sequence[Part], path: Path, footer: str) -> None:
    """Two stacked bars a model: the step and its floor."""
    models = list(dict.fromkeys(part.model for part in parts))
    figure = Figure(figsize=(4.5 * len(models), 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        bottom = np.zeros(2)
        for part in (part for part in parts if part.model == model):
            heights = np.maximum([part.ms, part.floor_ms], 0)
            axes.bar(["step", "floor"], heights, bottom=bottom, label=part.part)
            bottom += heights
        axes.set_title(model, loc="left", fontsize="medium")
        axes.set(ylabel="ms")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=150)


def profile(
    name: str, batch: int, span: tuple[int, ...], rounds: int, seed: int, progress: bool = True
) -> tuple[list[Part], dict[str, float]]:
    """One model's parts at contexts uniform in span, both ends included, and the measured rates."""
    if name == "100m":
        model, params = RANDOM_100M, parameters.init(llama.declare(RANDOM_100M), jax.random.key(0))
    else:
        model, params = checkpoint.load(name)
    config = EngineConfig(
        max_num_seqs=batch, max_num_batched_tokens=max(batch, 512), max_model_len=span[1] + 1,
        kv_cache_tokens=max(32_768, 2 * batch * span[1]),
    )  # fmt: skip
    contexts = np.random.default_rng(seed).integers(span[0], span[1] + 1, batch).tolist()
    cases = programs(params, model, config, contexts, seed)
    ms = medians_ms(cases, rounds, name if progress else "")
    measured = roofline.measure(model, batch)
    floor_ms = floors_ms(model, contexts, Rates.best(measured))
    return parts_of(name, ms, floor_ms), measured


def checked(models: Sequence[str], contexts: Sequence[str]) -> tuple[int, ...]:
    """The shortest and the longest context. ValueError for what cannot be."""
    unknown = [name for name in models if name not in MODELS]
    if unknown or not models:
        raise ValueError(f"--models are some of {', '.join(MODELS)}, not {models}")
    span = integers("context_tokens", contexts)
    if len(span) != 2 or not 2 <= span[0] <= span[1] < RANDOM_100M.max_position_embeddings:
        raise ValueError(
            "--context_tokens are the shortest and the longest context, from 2 to "
            f"{RANDOM_100M.max_position_embeddings - 1}, not {contexts}"
        )
    return span


def main(options: Options) -> None:
    with refusals():
        span = checked(options.models, options.context_tokens)
    parts: list[Part] = []
    rates = {}
    for name in options.models:
        more, rates[name] = profile(name, options.batch, span, options.rounds, options.seed)
        parts += more
    output_dir, environment = Path(options.output_dir), run_record.describe_environment()
    facts = {
        "experiment": "step_profile",
        "flags": vars(options),
        "parts": parts,
        "rates": rates,
    }
    footer = run_record.hardware_line(environment)
    run_record.write_csv(output_dir, "parts.csv", parts)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, summary(parts))
    plot(parts, output_dir / "parts.png", footer)
    print(f"{table(parts, options.batch)}\n({footer})")


def define_flags() -> None:
    flags.DEFINE_list("models", list(MODELS), MODELS_HELP)
    flags.DEFINE_integer("batch", 32, "sequences of the step", lower_bound=1)
    flags.DEFINE_list("context_tokens", ["64", "160"], "shortest and longest context")
    flags.DEFINE_integer("rounds", 30, "timed runs of the step and of each part", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the contexts and stand-in values", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/step_profile", ("parts.csv", "parts.png"))

if __name__ == "__main__":
    PROGRAM.run()
