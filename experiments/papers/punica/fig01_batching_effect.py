"""The effect of batching on the latency of prefill and of decode steps (Punica §2.1, Fig. 1), in
simulated time.

python -m experiments.papers.punica.fig01_batching_effect

Steps of Llama-2-7B on an A100-80; all sequences of a batch have the same length. Prefill computes
all tokens of the sequences, so its latency is proportional to the batch. A decode step reads the
weights once, whatever the batch, and the keys and values of each sequence.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from experiments.lib import knobs, plots, shipped
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.drawing import panels
from experiments.study import Setting, Study, Values
from models import checkpoint
from paged.config import EngineConfig
from paged.simulator.machines import MACHINES
from paged.simulator.step_cost import StepCost

MODEL = "llama-2-7b"
STAGES = ("prefill", "decode")
SHORT, LONG = 128, 2048


@dataclass(frozen=True)
class BatchFlags(Flags):
    batches: tuple[int, ...] = flag((1, 2, 4, 8, 16, 32), "sequences of a step", least=1)
    lengths: tuple[int, ...] = flag((SHORT, LONG), "tokens of each sequence", least=1, most=4096)
    gpu: str = flag("a100-80", "that is simulated", choices=tuple(MACHINES))


@dataclass(frozen=True)
class Row:
    """A step at one batch size and length.

    change: the changed constant of the clock, a name of `knobs.CHANGES`; empty for no change.
    attention_ms: attention's part of `ms`.
    """

    stage: str
    length: int
    batch: int
    change: str
    ms: float
    attention_ms: float


def measure(flags: BatchFlags, _) -> Iterator[Row]:
    model = checkpoint.load_config(shipped.MODELS / MODEL)
    batches, lengths = sorted(set(flags.batches)), sorted(set(flags.lengths))
    config = EngineConfig(max_model_len=max(lengths))
    for change, knob in knobs.OF_ATTENTION.items():
        cost = StepCost.declare(model, config, flags.gpu, attention_knob=knob)
        for stage, length, batch in itertools.product(STAGES, lengths, batches):
            contexts = np.full(batch, length)
            new = contexts if stage == "prefill" else np.ones_like(contexts)
            attention = float(cost.attention_s(contexts, new))
            seconds = cost.dense_s(int(new.sum()), batch) + attention
            yield Row(stage, length, batch, change, 1e3 * seconds, 1e3 * attention)


def _found(rows: Sequence[Row]) -> dict[str, float | None]:
    ms = {(row.stage, row.length, row.batch): row.ms for row in rows}
    least, most = min(row.batch for row in rows), max(row.batch for row in rows)
    found: dict[str, float | None] = {}
    for stage, length in dict.fromkeys((stage, length) for stage, length, _ in ms):
        ends = ms[stage, length, least], ms[stage, length, most]
        found[f"{stage}_ms_{length}_b{least}"], found[f"{stage}_ms_{length}_b{most}"] = ends
        found[f"{stage}_growth_{length}"] = ends[1] / ends[0]
    return found


def holds(v) -> bool:
    decode, prefill = (
        [value for name, value in v.items() if name.startswith(f"{stage}_growth")]
        for stage in ("decode", "prefill")
    )
    return max(decode) <= 2.2 and min(prefill) >= 16


def values(_: BatchFlags, rows: Sequence[Row]) -> Values:
    """STAGE_ms_LENGTH_bBATCH: milliseconds of a step with the smallest and with the largest batch.
    STAGE_growth_LENGTH: time with the largest batch over time with the smallest.
    """
    return knobs.values(rows, _found, holds)


def draw(_: BatchFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, mine in panels(figure, [row for row in rows if not row.change], "stage"):
        plots.lines(axes, mine, "batch", "ms", "length", "batch (sequences)", "ms of a step")
        axes.set_ylim(0)
        axes.legend(frameon=False, fontsize="small", title="tokens")


STUDY = Study(
    __file__,
    title="What batching costs prefill and decode (Punica §2.1, Fig. 1)",
    kind="simulated",
    claim="a decode step of 32 takes little longer than one of 1 (11 to 13 ms, long: 17 to 34), "
    "while prefill is proportional to the batch",
    rule="from batch 1 to 32 decode grows at most 2.2 times, and prefill at least 16 times",
    holds=holds,
    setting=Setting(
        "Llama-2-7B in 16 bits on an A100-80, 128 and 2,048 tokens; attention at 0.775 of the "
        "bandwidth, which no A100 has confirmed here; no host time",
        "the paper names neither its lengths nor the framework, whose step of one long sequence "
        "takes 6 ms more than one of a short one; the keys and values of 2,048 tokens are read in "
        "0.7 ms",
        "paper",
    ),
    flags=BatchFlags,
    measure=measure,
    values=values,
    paper={
        f"decode_ms_{SHORT}_b1": 11.0, f"decode_ms_{SHORT}_b32": 13.0,
        f"decode_ms_{LONG}_b1": 17.0, f"decode_ms_{LONG}_b32": 34.0,
        f"decode_growth_{SHORT}": 13 / 11, f"decode_growth_{LONG}": 2.0,
    },
    draw=draw,
    tolerance=0.15,
    minutes=(0.2, 0.2),
    size=(8, 3.6),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
