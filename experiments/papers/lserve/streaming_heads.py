"""Accuracy lost by streaming heads, with all pages read (LServe §3.3).

python -m experiments.papers.lserve.streaming_heads

Heads stream by DuoAttention's gates, at each of --shares. In the controls half of the heads stream,
by gates turned around or at random. table3_streaming_and_selection.py adds page selection.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers import masked
from experiments.papers.diffkv.systems import key_of
from experiments.papers.lserve.gates import BUNDLED_GATES, JUDGE_GATES, gates_of
from experiments.study import Values
from paged.kv_cache.gates import Gates

DENSE = "dense"
HALF = 0.5  # share of the heads that stream in the claim and in the controls
MOST = 2.0  # points that they may lose


@dataclass(frozen=True)
class ShareFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(
        ("multikey", "chain", "values", "cot"), "tasks of experiments/tasks/tasks.py"
    )
    contexts: tuple[int, ...] = flag((2048,), "prompt and answer, in tokens")
    gates: str = flag(BUNDLED_GATES, "as --lserve_gates", path=True)
    shares: tuple[float, ...] = flag(
        (0.25, HALF, 0.75), f"of the KV heads that stream, {HALF:g} among them", above=0, most=1
    )
    random_splits: int = flag(2, "controls that choose at random", least=0)

    def __post_init__(self):
        super().__post_init__()
        masked.check_distinct(shares=self.shares)
        if HALF not in self.shares:
            raise ValueError(f"{HALF:g} must be among --shares, not only {self.shares}")


def label(share: float) -> str:
    return f"{100 * share:.15g}% streaming"


def controls(gates: Gates, seed: int, random_splits: int) -> dict[str, Gates]:
    """Other gates by the names of controls: turned around (1 minus the gate), and random ones."""
    trained, rng = np.array(gates), np.random.default_rng(seed)
    found = {"gates turned around": (1 - trained).tolist()}
    for split in range(random_splits):
        found[f"random heads {split + 1}"] = rng.random(trained.shape).tolist()
    return found


def systems(flags: ShareFlags) -> accuracy.Systems:
    gates = gates_of(flags.model, flags.gates)

    def streaming(share: float, gates: Gates):
        chosen = {"gates": gates, "streaming_share": share, "budget": flags.longest + 64}
        return accuracy.config_of(flags, policy="lserve", policy_options=chosen)

    found = {DENSE: accuracy.config_of(flags)}
    found |= {label(share): streaming(share, gates) for share in flags.shares}
    for name, other in controls(gates, flags.seed, flags.random_splits).items():
        found[name] = streaming(HALF, other)
    return found


def compare(flags: ShareFlags, _: Sequence[Row]) -> Iterator[tuple[str, str]]:
    gates = gates_of(flags.model, flags.gates)
    for name in controls(gates, flags.seed, flags.random_splits):
        yield label(HALF), name


def values(flags: ShareFlags, rows: Sequence[Row]) -> Values:
    """Points by system.

    lost_*, lost_most_*: lost to dense, and the worse bound of the 95 % interval.
    over_*, over_least_*: of the trained gates over a control, and the worse bound.
    """
    numbers: dict[str, float | None] = {}
    for name, row in accuracy.pooled(rows).items():
        if name != DENSE:
            numbers |= {
                f"lost_{key_of(name)}": 0.0 - row.difference,
                f"lost_most_{key_of(name)}": 0.0 - row.difference_low,
            }
    for row in accuracy.pairs(rows):
        numbers |= {
            f"over_{key_of(row.reference)}": row.difference,
            f"over_least_{key_of(row.reference)}": row.difference_low,
        }
    return numbers


def holds(found: Mapping[str, float]) -> bool:
    over = [least for name, least in found.items() if name.startswith("over_least_")]
    return found[f"lost_most_{key_of(label(HALF))}"] < MOST and min(over) > 0


def draw(flags: ShareFlags, figure: Figure, rows: Sequence[Row]) -> None:
    whole = accuracy.pooled(rows)
    shares = [100 * share for share in flags.shares]
    others = [row for name, row in whole.items() if name not in map(label, flags.shares)]
    for axes, measure in zip(figure.subplots(1, len(accuracy.MEASURES)), accuracy.MEASURES):
        line = [whole[label(share)] for share in flags.shares]
        accuracy.draw_line(axes, shares, line, measure, label="by gates")
        accuracy.draw_controls(axes, 100 * HALF, others[1:], measure)
        axes.set(xlabel="KV heads that stream (%)")
    figure.axes[0].axhline(-MOST, color="#999999", linewidth=0.8, linestyle="--")
    figure.axes[0].legend(fontsize="small")


STUDY = accuracy.study(
    __file__,
    systems,
    title="What streaming heads cost alone (LServe §3.3)",
    claim="half of the heads can stream, if DuoAttention's gates choose them",
    rule=f"half of the heads lose less than {MOST:g} points to dense, and each control loses more, "
    "both by the worse bound of the paired interval",
    holds=holds,
    here="the judge model, four tasks at 2,048 tokens",
    differs="the paper has no row of streaming heads alone",
    flags=ShareFlags,
    compare=compare,
    values=values,
    draw=draw,
    quick=accuracy.QUICK | {"tasks": ("multikey", "cot"), "shares": (HALF,), "random_splits": 1},
    full=accuracy.JUDGE | {"gates": JUDGE_GATES},
    minutes=(1, 75),
)

if __name__ == "__main__":
    STUDY.run()
