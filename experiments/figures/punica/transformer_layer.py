"""The latency of a transformer layer with LoRA, over popularities and batches (Punica Fig. 10).

python -m experiments.figures.punica.transformer_layer

A decode step of one layer with random weights, projections, their adapters, norms and attention
through block tables, as an engine computes it; each sequence has --lengths tokens. The model's
shape is the paper's by default, Llama-2-7B; lengths are shorter than its 512 and 2,048 tokens, for
a CPU.

Claims (§7.1): the latency is about the same whatever the popularity, because what LoRA adds is
small; it grows little with the batch, by 72 % from 1 to 32 on an A100 at 512 tokens; and more where
sequences are longer. 'base' is the layer without adapters. All popularities of a batch take turns,
and medians count. Writes to --output_dir: layer.csv, layer.png, report.json and summary.json.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench.decode_inputs import fill_decodes, fill_segments
from experiments.bench.vs_transformers import integers
from experiments.lib import run_record
from experiments.lib.flags import define_path
from experiments.lib.program import Options, Program, refusals
from experiments.timing import LEAST_S, medians_s
from models import checkpoint, lora
from models import params as parameters
from models.config import ModelConfig
from models.families import family
from paged.adapters.pool import AdapterPool, ResidentAdapters
from paged.config import EngineConfig
from paged.device.step import StepProgram
from paged.device.step_inputs import StepInputs, empty_step_inputs
from paged.device.tensor_parallel import Shards
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.simulator import roofline
from pallas_kernels.lora.specs import POPULARITIES, segment_lengths
from pallas_kernels.specs import Cost, Rates

BASE = "base"
PAPER_GROWTH = 1.72  # from batch 1 to 32, at 512 tokens, of the 7B model


@dataclass(frozen=True)
class Row:
    """One case. adapters: different ones; 0 without LoRA. floor_ms: at the machine's measured
    rates."""

    length: int
    batch: int
    popularity: str
    adapters: int
    ms: float
    floor_ms: float


def one_layer(model: ModelConfig) -> ModelConfig:
    """The model with a single layer, and next to no vocabulary."""
    return replace(model, num_layers=1, vocab_size=8)


def config_of(batch: int, length: int, rank: int) -> EngineConfig:
    """Raises ValueError for what cannot work."""
    return EngineConfig(
        max_num_seqs=batch, max_num_batched_tokens=max(512, batch), max_model_len=length + 1,
        kv_cache_tokens=batch * (length + EngineConfig.page_size), adapter_slots=batch,
        max_adapter_rank=rank,
    )  # fmt: skip


def draw_adapters(model: ModelConfig, pool: AdapterPool, seed: int) -> ResidentAdapters:
    """An adapter of the highest rank in each slot."""
    declared, key = lora.declare(model, pool.num_pages), jax.random.key(seed)
    normal = {
        name: {which: replace(param, init="normal") for which, param in matrices.items()}
        for name, matrices in declared.items()
    }
    pages = np.arange(pool.num_slots * pool.max_pages, dtype=np.int32)
    counts = np.full((len(declared), pool.num_slots), pool.max_pages, np.int32)
    return ResidentAdapters(
        parameters.init(normal, key),
        jnp.asarray(pages.reshape(pool.num_slots, pool.max_pages)),
        jnp.asarray(counts),
    )


def programs(
    params, adapters: ResidentAdapters, model: ModelConfig, config: EngineConfig, length: int,
    popularities: Sequence[str],
) -> dict[str, Callable[[], jax.Array]]:  # fmt: skip
    """What is timed, by popularity, and 'base': each gives hidden states [batch, E]."""
    batch = config.max_num_seqs
    pool = AdapterPool.declare(config, None)
    assert pool is not None
    policy = policy_of(config.policy).device(config, ShardedModel.split(model), None)
    width = StepProgram.declare(config, Shards(model)).table_width

    @partial(jax.jit, static_argnames="with_lora", donate_argnums=2)
    def layer(params, adapters, cache, inputs: StepInputs, with_lora: bool):
        cache, plan = policy.begin_step(cache, inputs)

        def attend(number, q, k, v, cache):
            return policy.attend(number, q, k, v, cache, plan, inputs)

        hook = pool.hook(model, adapters, inputs) if with_lora else None
        return family(model).forward(
            params, model, inputs.tokens, inputs.positions, attend, cache, hook
        )

    held = [jax.jit(policy.init)()]  # one cache for all: each call gives it on

    def call(inputs: StepInputs, with_lora: bool) -> jax.Array:
        hidden, held[0] = layer(params, adapters, held[0], inputs, with_lora)
        return hidden

    runs: dict[str, Callable[[], jax.Array]] = {}
    for popularity in (BASE, *popularities):
        rows = empty_step_inputs(0, batch, batch, batch, width, adapters=True)
        fill_decodes(rows, [length] * batch, config.page_size)
        if popularity != BASE:
            fill_segments(rows, segment_lengths(popularity, batch))
        inputs = jax.tree.map(jnp.asarray, replace(rows, packed=None))
        runs[popularity] = partial(call, inputs, popularity != BASE)
    return runs


def run(
    model: ModelConfig, batches: Sequence[int], lengths: Sequence[int], rank: int,
    popularities: Sequence[str], rounds: int, seed: int, rates: Rates, progress: bool = True,
) -> list[Row]:  # fmt: skip
    """All cases of a model of one layer."""
    params = parameters.init(family(model).declare(model), jax.random.key(seed))
    pool = AdapterPool.declare(config_of(max(batches), max(lengths), rank), None)
    assert pool is not None
    adapters = draw_adapters(model, pool, seed + 1)
    rows = []
    listed = [(length, batch) for length in lengths for batch in batches]
    for length, batch in tqdm(listed, "measuring", unit=" cases", disable=not progress):
        config = config_of(batch, length, rank)
        runs = programs(params, adapters, model, config, length, popularities)
        step = roofline.step_cost(model, [length] * batch)
        for popularity, seconds in medians_s(runs, rounds, least_s=LEAST_S).items():
            lengths_of = () if popularity == BASE else segment_lengths(popularity, batch)
            added = roofline.lora_cost(model, rank, len(lengths_of), sum(lengths_of))
            floor = rates.floor_s(Cost(step.bytes + added.bytes, step.flops + added.flops))
            ms, floor_ms = 1e3 * seconds, 1e3 * floor
            rows.append(Row(length, batch, popularity, len(lengths_of), ms, floor_ms))
    return rows


def of(rows: Sequence[Row], length: int, popularity: str) -> list[Row]:
    """By batch size."""
    mine = [row for row in rows if (row.length, row.popularity) == (length, popularity)]
    return sorted(mine, key=lambda row: row.batch)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """For each length: how latency grows from the smallest batch to the largest, by popularity, and
    what it is there over the layer without adapters, and distinct over identical."""
    numbers = {}
    for length in sorted({row.length for row in rows}):
        last = {}
        for popularity in dict.fromkeys(row.popularity for row in rows):
            mine = of(rows, length, popularity)
            last[popularity] = mine[-1].ms
            numbers[f"growth_{popularity}_{length}"] = mine[-1].ms / mine[0].ms
        for popularity, ms in last.items():
            numbers[f"{popularity}_over_base_{length}"] = ms / last[BASE]
        numbers[f"slowest_over_fastest_{length}"] = max(last.values()) / min(
            ms for popularity, ms in last.items() if popularity != BASE
        )
    return numbers


def table(rows: Sequence[Row]) -> str:
    """A line for each length and batch, and what the paper has."""
    names = list(dict.fromkeys(row.popularity for row in rows))
    lines = ["ms of a layer" + f"{'tokens':>9}{'batch':>7}" + "".join(f"{n:>11}" for n in names)]
    for length in sorted({row.length for row in rows}):
        for batch in sorted({row.batch for row in rows}):
            cells = [next(r for r in of(rows, length, n) if r.batch == batch) for n in names]
            lines.append(
                f"{length:22,}{batch:7}" + "".join(f"{cell.ms:11.2f}" for cell in cells)
                + f"   floors {cells[0].floor_ms:.2f} to {max(c.floor_ms for c in cells):.2f}"
            )  # fmt: skip
    numbers = summary(rows)
    for length in sorted({row.length for row in rows}):
        grown = [numbers[f"growth_{name}_{length}"] for name in names]
        lines.append(
            f"{length:,} tokens: from the smallest to the largest batch × {min(grown):.2f} to "
            f"{max(grown):.2f}; at the largest × {numbers[f'slowest_over_fastest_{length}']:.2f} "
            "from the fastest popularity to the slowest"
        )
    lines.append(
        f"Punica on an A100, 7B, 512 tokens, batch 1 to 32: × {PAPER_GROWTH}, more at 2,048; "
        "roughly the same for all popularities"
    )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path, footer: str) -> None:
    """Latency over the batch, a panel for each length."""
    lengths = sorted({row.length for row in rows})
    figure = Figure(figsize=(4.2 * len(lengths), 3.6), layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axes, length in zip(panels, lengths):
        for popularity in dict.fromkeys(row.popularity for row in rows):
            mine = of(rows, length, popularity)
            style = "--" if popularity == BASE else "o-"
            axes.plot([r.batch for r in mine], [r.ms for r in mine], style, label=popularity)
        axes.set_title(f"{length:,} tokens", loc="left", fontsize="medium")
        axes.set(xlabel="batch size", ylabel="ms of a layer", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize="small")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def prepare(options: Options) -> tuple[ModelConfig, list[int], list[int]]:
    """The model of one layer, batches and lengths. ValueError for what cannot be."""
    model = checkpoint.load_config(options.model)
    found = {}
    for name in ("batches", "lengths"):
        found[name] = sorted(set(integers(name, getattr(options, name))))
        if not found[name] or found[name][0] < 1:
            raise ValueError(f"--{name} must be whole numbers from 1, not {found[name]}")
    if found["lengths"][-1] >= model.max_position_embeddings:
        raise ValueError(f"--lengths exceed the model's {model.max_position_embeddings} tokens")
    config_of(found["batches"][-1], found["lengths"][-1], options.rank)
    return one_layer(model), found["batches"], found["lengths"]


def main(options: Options) -> None:
    with refusals():
        model, batches, lengths = prepare(options)
    measured = roofline.measure(model, max(batches))
    rows = run(
        model, batches, lengths, options.rank, POPULARITIES, options.rounds, options.seed,
        Rates.best(measured),
    )  # fmt: skip
    output_dir, environment = Path(options.output_dir), run_record.describe_environment()
    footer = f"one layer of {options.model}, rank {options.rank}, float32; "
    footer += run_record.hardware_line(environment)
    facts = {
        "experiment": "transformer_layer",
        "flags": vars(options),
        "model": model,
        "rows": rows,
        "rates": measured,
        "paper": {"growth_512": PAPER_GROWTH},
    }
    run_record.write_csv(output_dir, "layer.csv", rows)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, summary(rows))
    plot(rows, output_dir / "layer.png", footer)
    print(f"{table(rows)}\n({footer})")


def define_flags() -> None:
    define_path(
        "model", "configs/models/llama-2-7b", "whose shape counts: a folder with a config.json"
    )
    flags.DEFINE_list("batches", ["1", "2", "4", "8", "16", "32"], "sequences of a step")
    flags.DEFINE_list("lengths", ["128", "512"], "tokens of each sequence")
    flags.DEFINE_integer("rank", 16, "of the adapters", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "of all popularities, in turn", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the weights", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/transformer_layer", ("layer.csv", "layer.png"))

if __name__ == "__main__":
    PROGRAM.run()
