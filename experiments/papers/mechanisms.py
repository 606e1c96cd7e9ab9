"""Figures of how a system works, each drawn from a run of the system.

A mechanism runs a small example, reports its counts beside the counts in the paper's figure, and
draws the example. The mechanisms of a paper are one study. It writes a picture of each mechanism
(figNN.png) and a picture of all mechanisms (figure.png).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import FancyBboxPatch, Rectangle

from experiments.lib import run_record
from experiments.lib.typed_flags import Flags
from experiments.study import Run, Setting, Study, Values

COLOURS = ("#2f6b9a", "#c8553d", "#e0a030", "#7d4f9e", "#4f9e6a", "#8c6d4f")
GREY, FREE = "#9a9a9a", "#e6e6e6"


@dataclass(frozen=True)
class Mechanism:
    """facts: pairs of counts by name: the count in the run, and the count that the paper's figure
    shows or the rule requires."""

    title: str
    facts: Mapping[str, tuple[float, float]]
    draw: Callable[[FigureBase], None]


@dataclass(frozen=True)
class Row:
    figure: str
    fact: str
    here: float
    figure_shows: float


def box(axes: Axes, x: float, y: float, text: str, shade: str, width: float) -> None:
    """Draws a part of a system as a box with its name."""
    axes.add_patch(FancyBboxPatch((x, y), width, 1.0, "round,pad=0.1", facecolor=shade, alpha=0.25,
                                  edgecolor=shade))  # fmt: skip
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize="small")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], style="->") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": style})


def tile(
    axes: Axes, x: float, y: float, shade: str, text: str = "", *, width: float = 0.9,
    height: float = 0.8, size: str = "x-small",
) -> None:  # fmt: skip
    """Draws a page, block or token as a rectangle, with its number."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=shade))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white",
              fontsize=size)  # fmt: skip


def study(
    file: str, paper: str, *mechanisms: Callable[[], Mechanism], claim: str, here: str,
    size: tuple[float, float],
) -> Study[Flags, Row]:  # fmt: skip
    """The study of a paper's mechanisms. mechanisms: functions named after figures, as fig05."""
    made = functools.cache(lambda: {make.__name__: make() for make in mechanisms})

    def measure(_: Flags, run: Run) -> Iterator[Row]:
        for name, mechanism in made().items():
            picture = run_record.new_figure(8, 3.6)
            mechanism.draw(picture)
            picture.suptitle(mechanism.title, fontsize="medium")
            run_record.save_figure(picture, run.folder / f"{name}.png", dpi=130)
            for fact, (value, shows) in mechanism.facts.items():
                yield Row(name, fact, float(value), float(shows))

    def values(_: Flags, rows: Sequence[Row]) -> Values:
        wrong = sum(row.here != row.figure_shows for row in rows)
        counted = {f"{row.figure}_{row.fact}": row.here for row in rows}
        return {"figures": len({row.figure for row in rows}), "facts_wrong": wrong, **counted}

    def draw(_: Flags, figure: Figure, rows: Sequence[Row]) -> None:
        panels = figure.subfigures(-(-len(mechanisms) // 2), 2, squeeze=False).flat
        for panel, mechanism in zip(panels, made().values(), strict=False):
            mechanism.draw(panel)
            panel.suptitle(mechanism.title, fontsize="medium", x=0.02, ha="left")

    return Study(
        file, title=f"How it works, from runs ({paper})", kind="counted", claim=claim,
        rule="every count is that of the figure", holds=lambda v: v["facts_wrong"] == 0,
        setting=Setting(here, "the paper's figures are drawings", "paper"), flags=Flags,
        measure=measure, values=values, draw=draw, minutes=(0.5, 0.5), size=size,
    )  # fmt: skip
