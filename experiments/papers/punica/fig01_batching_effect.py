"""What batching costs the two stages of generation: prefill and decode steps (Punica §2.1, Fig. 1).

python -m experiments.papers.punica.fig01_batching_effect

An engine generates from equally long prompts, all of a batch at once; the times are those of its
prefill step and of its decode steps, for short and for long sequences.

Claims: prefill takes as long as there are tokens, so its latency is proportional to the batch. A
decode step is bound by reading weights, so 32 sequences take little longer than one: 13 ms instead
of 11 on an A100, or, where sequences are long, 34 instead of 17. The batches take turns, and
medians count.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.bench.race import MODELS, decode_times, model_config, model_folder
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Setting, Study, Values
from models import checkpoint
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.simulator import roofline
from pallas_kernels.specs import Rates

STAGES = ("prefill", "decode")


@dataclass(frozen=True)
class BatchFlags(Flags):
    model: str = flag("100m", "'100m' is a random Llama", choices=tuple(MODELS))
    batches: tuple[int, ...] = flag((1, 2, 4, 8, 16, 32), "sequences of a step", least=1)
    lengths: tuple[int, ...] = flag((64, 256), "tokens of the prompts", least=1)
    output_tokens: int = flag(8, "of each sequence", least=4)
    rounds: int = flag(2, "of all batches, in turn", least=1)
    seed: int = flag(0, "of prompts and random weights", least=0)

    def __post_init__(self):
        super().__post_init__()
        self.require_some("batches", "lengths")


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


def run(
    params, model: ModelConfig, batches: Sequence[int], lengths: Sequence[int], output_tokens: int,
    rounds: int, seed: int, rates: Rates,
) -> Iterator[Row]:  # fmt: skip
    """Rows of all stages, lengths and batches."""
    how = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    rng = np.random.default_rng(seed)
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
        for (stage, batch), seconds in times.items():
            new = [length if stage == "prefill" else 1] * batch
            middle = length if stage == "prefill" else length + output_tokens // 2
            floor = rates.floor_s(roofline.step_cost(model, [middle] * batch, new))
            yield Row(stage, length, batch, 1e3 * float(np.median(seconds)), 1e3 * floor)


def measure(flags: BatchFlags, _) -> Iterator[Row]:
    batches, lengths = sorted(set(flags.batches)), sorted(set(flags.lengths))
    with tempfile.TemporaryDirectory() as scratch:
        model, params = checkpoint.load(model_folder(flags.model, Path(scratch), flags.seed))
    rates = Rates.best(roofline.measure(model, max(batches)))
    yield from run(
        params, model, batches, lengths, flags.output_tokens, flags.rounds, flags.seed, rates
    )


def check(flags: BatchFlags) -> None:
    most = model_config(flags.model).max_position_embeddings
    if max(flags.lengths) + flags.output_tokens > most:
        raise ValueError(f"--lengths exceed the {most} tokens")
    config_of(flags.batches, max(flags.lengths), flags.output_tokens)


def of(rows: Sequence[Row], stage: str, length: int) -> list[Row]:
    """By batch size."""
    mine = [row for row in rows if (row.stage, row.length) == (stage, length)]
    return sorted(mine, key=lambda row: row.batch)


def values(_: BatchFlags, rows: Sequence[Row]) -> Values:
    """<stage>_ms_<length>_b<batch>, and <stage>_growth_<length>: of the largest batch over the
    smallest."""
    numbers = {f"{r.stage}_ms_{r.length}_b{r.batch}": r.ms for r in rows}
    for stage in STAGES:
        for length in sorted({row.length for row in rows}):
            mine = of(rows, stage, length)
            numbers[f"{stage}_growth_{length}"] = mine[-1].ms / mine[0].ms
    return numbers


def draw(_: BatchFlags, figure: Figure, rows: Sequence[Row]) -> None:
    """Latency over the batch, a panel for each stage."""
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
        axes.legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="What batching costs prefill and decode (Punica §2.1, Fig. 1)",
    kind="analogue",
    claim="a decode step of 32 takes little longer than one of 1 (11 to 13 ms, long: 17 to 34), "
    "while prefill is proportional to the batch",
    rule="from batch 1 to 32 decode grows at most 2.2 times, and prefill at least 16 times",
    holds=lambda v: all(
        value <= 2.2 if name.startswith("decode") else value >= 16
        for name, value in v.items()
        if "growth" in name
    ),
    setting=Setting(
        "a random Llama of 110M parameters, 64 and 256 tokens, float32 on this machine",
        "the paper has Llama-2-7B on an A100, whose decode is bound by reading weights",
        "wrong",
    ),
    flags=BatchFlags,
    row=Row,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"batches": (1, 8), "lengths": (64,), "rounds": 1},
    minutes=(1, 6),
    size=(8, 3.6),
)

if __name__ == "__main__":
    STUDY.run()
