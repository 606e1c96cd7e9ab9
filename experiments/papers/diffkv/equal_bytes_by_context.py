"""Accuracy, bytes held and bytes read of equal_bytes's compositions, by length of the prompts.

    python -m experiments.papers.diffkv.equal_bytes_by_context

Systems, bytes and the claim are those of equal_bytes.py. The claim is decided over the prompts of
all lengths; values and the figure also show each length.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import Row
from experiments.lib.answers import ALL
from experiments.papers.diffkv import equal_bytes
from experiments.papers.diffkv.equal_bytes import BytesFlags, bytes_of
from experiments.study import Values

SYSTEMS = (
    "lserve", "diffkv", "diffkv_streaming", "diffkv_selected", "diffkv_streaming_selected",
    "kv_int4",
)  # fmt: skip


def contexts_of(rows: Sequence[Row]) -> list[int]:
    return sorted({row.context for row in rows if row.task != ALL})


def at(rows: Sequence[Row], system: str, context: int) -> tuple[float, float, float]:
    """(percent of right answers, bytes held, bytes read), means over a context's tasks."""
    mine = [
        row
        for row in rows
        if (row.system, row.reference, row.context) == (system, rows[0].system, context)
        and row.task != ALL
    ]
    score, held, read = np.mean([(row.score, *bytes_of(row)) for row in mine], axis=0)
    return float(score), float(held), float(read)


def values(flags: BytesFlags, rows: Sequence[Row]) -> Values:
    """The values of equal_bytes.py over all prompts, and right_*, held_* and read_* by context."""
    numbers = dict(equal_bytes.values(flags, rows))
    for system in accuracy.pooled(rows):
        for context in contexts_of(rows):
            found = zip(("right", "held", "read"), at(rows, system, context), strict=True)
            numbers |= {f"{name}_{system}_{context}": value for name, value in found}
    return numbers


def draw(_: BytesFlags, figure: Figure, rows: Sequence[Row]) -> None:
    panels, contexts = figure.subplots(1, 2, sharey=True), contexts_of(rows)
    for system in accuracy.pooled(rows):
        points = np.array([at(rows, system, context) for context in contexts])
        sizes = [3 + 3 * i for i in range(len(points))]
        for axes, shares in zip(panels, (points[:, 1], points[:, 2])):
            (line,) = axes.plot(shares, points[:, 0], linewidth=0.8, label=system)
            axes.scatter(shares, points[:, 0], np.square(sizes), color=line.get_color())
    for axes, word in zip(panels, ("held", "read")):
        axes.set(xlabel=f"bytes {word}, of 16-bit dense pages", ylabel="right answers (%)")
    lengths = ", ".join(f"{context:,}" for context in contexts)
    panels[1].legend(frameon=False, fontsize="small", title=f"{lengths} tokens: larger points")


STUDY = replace(
    equal_bytes.STUDY,
    file=__file__,
    title="Accuracy over bytes held and read, by length of the prompts",
    setting=replace(
        equal_bytes.STUDY.setting,
        here="the judge model, four tasks at 1,024, 2,048 and 4,096 tokens",
    ),
    values=values,
    draw=draw,
    quick=accuracy.QUICK
    | {"tasks": ("multikey", "chain"), "systems": ("lserve", "diffkv", "diffkv_selected")},
    full=accuracy.JUDGE | {"contexts": (1024, 2048, 4096), "num_prompts": 42, "systems": SYSTEMS},
    minutes=(1, 150),
)

if __name__ == "__main__":
    STUDY.run()
