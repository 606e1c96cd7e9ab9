"""Streaming heads over DiffKV's pages: accuracy and memory by the share of heads that stream.

python -m experiments.papers.diffkv.streaming_shares

Streaming heads (LServe §3.3) keep a sink and a window in the high precision, and drop all other
tokens. Other heads keep all tokens in DiffKV's two precisions (`alpha_l=0`). So tokens are dropped
by position alone, in heads chosen by DuoAttention's gates. Controls drop as many tokens in heads
chosen at random. Memory and dropped tokens, not accuracy, select the share that decides the claim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
from experiments.papers.diffkv.comparison import by_system, draw_families, dropped
from experiments.papers.diffkv.systems import key_of
from experiments.papers.lserve.gates import BUNDLED_GATES, JUDGE_GATES, gates_of
from experiments.study import Values

TASKS = ("multikey", "chain", "values", "cot")
DROPPED, MEMORY, POINTS = 20.0, 0.30, 1.0  # percent of the tokens, of 16 bits, points


@dataclass(frozen=True)
class ShareFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((2048,), "prompt and answer, in tokens")
    gates: str = flag(BUNDLED_GATES, "as --diffkv_gates", path=True)
    shares: tuple[float, ...] = flag((0.3, 0.5), "of the KV heads that stream", above=0, most=1)
    alpha_h: float = flag(1.0, "of high precision, in the other heads", least=0)
    sink: int = flag(128, "first tokens that streaming heads keep", least=0)
    local: int = flag(256, "last tokens that streaming heads keep", least=1)
    control: bool = flag(True, "whether shares of random heads are asked, too")


def label(share: float) -> str:
    return f"{100 * share:.15g}% streaming"


def control(share: float) -> str:
    return f"{100 * share:.15g}% random heads"


def make_systems(flags: ShareFlags) -> accuracy.Systems:
    gates = gates_of(flags.model, flags.gates)

    def streaming(share: float, gates: Any):
        return systems.policy(
            flags, alpha_h=flags.alpha_h, alpha_l=0.0, gates=gates, streaming_share=share,
            sink=flags.sink, local=flags.local,
        )  # fmt: skip

    found = {systems.REFERENCE: systems.reference(flags)}
    found |= {label(share): streaming(share, gates) for share in flags.shares}
    if flags.control:
        at_random = np.random.default_rng(flags.seed).random(np.shape(gates)).tolist()
        found |= {control(share): streaming(share, at_random) for share in flags.shares}
    return found


def values(flags: ShareFlags, rows: Sequence[Row]) -> Values:
    """Numbers of `by_system`, and:

    dropped_SYSTEM: percent of the tokens.
    lost_most_SYSTEM: upper bound of the 95 % interval of lost_SYSTEM.
    share: the least share of heads that drops enough tokens and holds little enough; None if no
        share does.
    lost, lost_most: points lost at this share, and the upper bound.
    """
    whole = accuracy.pooled(rows)
    numbers = dict(by_system(whole))
    for name, row in whole.items():
        if row.high is not None:
            numbers[f"dropped_{key_of(name)}"] = dropped(row)
            numbers[f"lost_most_{key_of(name)}"] = -row.difference_low
    numbers |= dict.fromkeys(("share", "lost", "lost_most"))
    for share in sorted(flags.shares, reverse=True):
        key = key_of(label(share))
        drops, held = numbers.get(f"dropped_{key}") or 0.0, numbers.get(f"memory_{key}") or 1.0
        if drops >= DROPPED and held <= MEMORY:
            numbers |= {"share": share}
            numbers |= {name: numbers[f"{name}_{key}"] for name in ("lost", "lost_most")}
    return numbers


def draw(flags: ShareFlags, figure: Figure, rows: Sequence[Row]) -> None:
    points, divergence = figure.subplots(1, 2)
    families = {"heads by gates": [label(share) for share in flags.shares]}
    families["random heads"] = [control(share) for share in flags.shares]
    draw_families(points, divergence, accuracy.pooled(rows), families)
    points.axhline(-POINTS, color="#999999", linewidth=0.8, linestyle="--")
    points.axvline(MEMORY, color="#999999", linewidth=0.8, linestyle="--")


STUDY = accuracy.study(
    __file__,
    make_systems,
    title="Streaming heads over DiffKV's pages",
    claim="a fifth of the tokens can be dropped at 0.30 of the memory of 16 bits and one point",
    rule=f"at most {POINTS:g} point lost at the least of the shares with at least {DROPPED:g} % of "
    f"the tokens dropped and at most {MEMORY:g} of the memory",
    holds=lambda v: v.get("lost", 100.0) <= POINTS,
    here="the judge model, four tasks at 2,048 tokens",
    differs="no paper combines these policies",
    flags=ShareFlags,
    values=values,
    draw=draw,
    quick=accuracy.QUICK | {"sink": 64, "local": 64, "shares": (0.3,), "control": False},
    full=accuracy.JUDGE | {"gates": JUDGE_GATES},
    minutes=(1, 45),
)

if __name__ == "__main__":
    STUDY.run()
