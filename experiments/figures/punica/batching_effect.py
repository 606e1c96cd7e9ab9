"""What batching costs the two stages of generation: prefill and decode steps (Punica §2.1, Fig. 1).

python -m experiments.figures.punica.batching_effect

An engine generates from equally long prompts, all of a batch at once; the times are those of its
prefill step and of its decode steps, for short and for long sequences.

Claims: prefill takes as long as there are tokens, so its latency is proportional to the batch. A
decode step is bound by reading weights, so 32 sequences take little longer than one: 13 ms instead
of 11 on an A100, or, where sequences are long, 34 instead of 17. The batches take turns, and
medians count. Writes to --output_dir: latency.csv, latency.png, report.json and summary.json.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench.vs_transformers import (
    MODELS,
    decode_times,
    integers,
    model_config,
    model_folder,
)
from experiments.lib import run_record
from experiments.lib.program import Options, Program, refusals
from models import checkpoint
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.simulator import roofline
from pallas_kernels.specs import Rates

STAGES = ("prefill", "decode")
PAPER = "decode step from batch 1 to 32: 11 to 13 ms (short), 17 to 34 ms (long); an A100, 7B"


@dataclass(frozen=True)
class Row:
    """The median of a stage's steps. floor_ms: at the machine's measured rates."""

    stage: str
    length: int
    batch: int
    ms: float
    floor_ms: float


def config_of(batches: Sequence[int], length: int, output_tokens: int) -> EngineConfig:
    """Of an engine for all batches of one length, each prefilled in one step."""
    most, longest = max(batches), length + output_tokens
    return EngineConfig(
        max_num_seqs=most, max_prefills_per_step=most, max_num_batched_tokens=most * length,
        max_model_len=longest, kv_cache_tokens=most * (longest + EngineConfig.page_size),
        watermark=0.0,
    )  # fmt: skip


def measure(
    params, model: ModelConfig, batches: Sequence[int], lengths: Sequence[int], output_tokens: int,
    rounds: int, seed: int, rates: Rates, progress: bool = True,
) -> list[Row]:  # fmt: skip
    """Rows of all stages, lengths and batches."""
    how = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    rng, rows = np.random.default_rng(seed), []
    total = len(lengths) * len(batches) * (rounds + 1)
    bar = tqdm(total=total, desc="measuring", unit=" runs", disable=not progress)
    for length in lengths:
        engine = Engine.from_model(params, model, config_of(batches, length, output_tokens))
        times: dict[tuple[str, int], list[float]] = {}
        # In the first round programs are compiled as they are met.
        for round_ in range(rounds + 1):
            for batch in batches:
                first = len(engine.metrics.steps)
                engine.generate(rng.integers(0, model.vocab_size, (batch, length)).tolist(), how)
                steps = engine.metrics.steps[first:]
                if round_:
                    prefill = [s.device_s for s in steps if s.prefill_tokens == batch * length]
                    times.setdefault(("prefill", batch), []).extend(prefill)
                    decode = decode_times(steps, batch)[0]
                    times.setdefault(("decode", batch), []).extend(decode)
                bar.update()
        for (stage, batch), seconds in times.items():
            new = [length if stage == "prefill" else 1] * batch
            middle = length if stage == "prefill" else length + output_tokens // 2
            floor = rates.floor_s(roofline.step_cost(model, [middle] * batch, new))
            rows.append(Row(stage, length, batch, 1e3 * float(np.median(seconds)), 1e3 * floor))
    bar.close()
    return rows


def of(rows: Sequence[Row], stage: str, length: int) -> list[Row]:
    """By batch size."""
    mine = [row for row in rows if (row.stage, row.length) == (stage, length)]
    return sorted(mine, key=lambda row: row.batch)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """<stage>_ms_<length>_b<batch>, and <stage>_growth_<length>: of the largest batch over the
    smallest."""
    numbers = {f"{r.stage}_ms_{r.length}_b{r.batch}": r.ms for r in rows}
    for stage in STAGES:
        for length in sorted({row.length for row in rows}):
            mine = of(rows, stage, length)
            numbers[f"{stage}_growth_{length}"] = mine[-1].ms / mine[0].ms
    return numbers


def table(rows: Sequence[Row]) -> str:
    """A line for each stage and length, a column for each batch, and what the paper has."""
    batches, lengths = (sorted({getattr(r, name) for r in rows}) for name in ("batch", "length"))
    lines = [f"{'ms (floor)':24}" + "".join(f"{f'batch {b}':>17}" for b in batches)]
    for stage in STAGES:
        for length in lengths:
            cells = [f"{r.ms:,.1f} ({r.floor_ms:,.1f})" for r in of(rows, stage, length)]
            head = f"{stage}, {length:,} tokens"
            lines.append(f"{head:24}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join([*lines, f"Punica Fig. 1, {PAPER}; prefill in proportion to the batch"])


def plot(rows: Sequence[Row], path: Path, footer: str) -> None:
    """Latency over the batch, a panel for each stage."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for axes, stage in zip(figure.subplots(1, 2), STAGES):
        for length in sorted({row.length for row in rows}):
            mine = of(rows, stage, length)
            (line,) = axes.plot(
                [r.batch for r in mine], [r.ms for r in mine], "o-", label=f"{length:,} tokens"
            )
            floors = [r.floor_ms for r in mine]
            axes.plot([r.batch for r in mine], floors, ":", c=line.get_color())
        axes.set_title(f"{stage} (dotted: floor)", loc="left", fontsize="medium")
        axes.set(xlabel="batch size", ylabel="ms of a step", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def prepare(options: Options) -> tuple[list[int], list[int]]:
    """Batches and lengths. ValueError for what cannot be."""
    found = {}
    for name in ("batches", "lengths"):
        found[name] = sorted(set(integers(name, getattr(options, name))))
        if not found[name] or found[name][0] < 1:
            raise ValueError(f"--{name} must be whole numbers from 1, not {found[name]}")
    model = model_config(options.model)
    for length in found["lengths"]:
        config = config_of(found["batches"], length, options.output_tokens)
        if config.max_model_len > model.max_position_embeddings:
            raise ValueError(f"--lengths exceed the {model.max_position_embeddings} tokens")
    return found["batches"], found["lengths"]


def main(options: Options) -> None:
    with refusals():
        batches, lengths = prepare(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(options.model, Path(scratch), options.seed)
        model, params = checkpoint.load(folder)
    measured = roofline.measure(model, max(batches))
    rows = measure(
        params, model, batches, lengths, options.output_tokens, options.rounds, options.seed,
        Rates.best(measured),
    )  # fmt: skip
    output_dir, environment = Path(options.output_dir), run_record.describe_environment()
    footer = f"{options.model}, float32; {run_record.hardware_line(environment)}"
    facts = {
        "experiment": "batching_effect",
        "flags": vars(options),
        "rows": rows,
        "rates": measured,
        "paper": PAPER,
    }
    run_record.write_csv(output_dir, "latency.csv", rows)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, summary(rows))
    plot(rows, output_dir / "latency.png", footer)
    print(f"{table(rows)}\n({footer})")


def define_flags() -> None:
    flags.DEFINE_enum("model", "100m", MODELS, "'100m' is a random Llama")
    flags.DEFINE_list("batches", ["1", "2", "4", "8", "16", "32"], "sequences of a step")
    flags.DEFINE_list("lengths", ["64", "256"], "tokens of the prompts")
    flags.DEFINE_integer("output_tokens", 8, "of each sequence", lower_bound=4)
    flags.DEFINE_integer("rounds", 2, "of all batches, in turn", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of prompts and random weights", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/batching_effect", ("latency.csv", "latency.png"))

if __name__ == "__main__":
    PROGRAM.run()
