"""Attention's share of a step over the length, in simulated time (LServe §2.2, Fig. 2).

python -m experiments.papers.lserve.fig02_attention_share

One sequence of Llama-3-8B on an A100 runs the prefill of its prompt and one decode step. Weights
have 16, 8 or 4 bits, keys and values 16. A share is attention's time over the device's time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib.typed_flags import flag
from experiments.papers.lserve import gpu
from experiments.papers.lserve.gpu import DECODE, PREFILL, Row, SimulatedFlags, thousands
from experiments.study import Setting, Study, Values

SYSTEMS = ("dense", "w8a8", "w4a8")
CONTEXTS = (8192, 16384, 32768, 65536, 131072, 262144)


@dataclass(frozen=True)
class ShareFlags(SimulatedFlags):
    contexts: tuple[int, ...] = flag(CONTEXTS, "tokens", least=64, most=gpu.LONGEST)
    host_knob: float = flag(0.0, "times the time of the host", least=0)


def measure(flags: ShareFlags, _) -> Iterator[Row]:
    for stage in (PREFILL, DECODE):
        yield from gpu.rows(flags, "llama-3-8b", stage, SYSTEMS, flags.ascending)


PAPER = {
    f"{stage}_share_{system}_{at}": (least, 1.0)
    for stage in (PREFILL, DECODE)
    for system in SYSTEMS
    for at, least in (("64k", 0.5), ("128k", 0.75))
}


@gpu.with_knobs(*(name for name in PAPER if "dense" in name))
def values(rows: Sequence[Row]) -> Values:
    """STAGE_share_SYSTEM_LENGTH: attention's share of the device's time."""
    return {
        f"{row.stage}_share_{row.system}_{thousands(row.context)}": row.attention_ms / row.ms
        for row in rows
    }


def draw(_: ShareFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, stage in zip(figure.subplots(1, 2, sharey=True), (PREFILL, DECODE)):
        for system in SYSTEMS:
            mine = [r for r in rows if (r.stage, r.system, r.knob) == (stage, system, "")]
            shares = [row.attention_ms / row.ms for row in mine]
            axes.plot([row.context for row in mine], shares, "o-", label=system)
        axes.set(xscale="log", ylim=(0, 1), xlabel="tokens", title=stage)
    figure.axes[0].set(ylabel="attention's share of the step")
    figure.axes[0].legend(frameon=False)


STUDY = Study(
    __file__,
    title="Attention's share of a step (LServe Fig. 2)",
    kind="simulated",
    claim="in both stages attention takes at least half of the time from 64k on, 75 % at 128k",
    rule="so with 16 bits everywhere, in prefill and in decode",
    holds=lambda v: all(v[name] >= PAPER[name][0] for name in PAPER if "dense" in name),
    setting=Setting(
        "Llama-3-8B, one sequence, an A100-80; " + gpu.SETTING + ", left out here",
        "the paper does not say how many bits weights have",
        "paper",
    ),
    flags=ShareFlags,
    measure=measure,
    values=values,
    paper=PAPER,
    draw=draw,
    tolerance=0.0,
)

if __name__ == "__main__":
    STUDY.run()
