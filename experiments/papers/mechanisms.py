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
from matplotlib.patches import FancyBboxPatch

from experiments.lib import run_record
from experiments.lib.typed_flags import Flags
from experiments.study import Run, Setting, Study, Values

COLOURS = ("#2f6b9a", "#c8553d", "#e0a030", "#7d4f9e", "#4f9e6a", "#8c6d4f")
GREY, FREE = "#9a9a9a", "#e6e6e6"


@dataclass(frozen=True)
class Mechanism:
    """facts: pairs of counts by name. The first is measured in the run; the second is shown in the
    paper's figure or required by the rule."""

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


def study(
    file: str, paper: str, mechanisms: Mapping[str, Callable[[], Mechanism]],
    titles: Mapping[str, str], *, claim: str, here: str, size: tuple[float, float],
    columns: int = 2, minutes: tuple[float, float] = (0.5, 0.5),
) -> Study[Flags, Row]:  # fmt: skip
    """The study of a paper's mechanisms.

    mechanisms: mechanisms by figure, such as fig05.
    titles: titles by figure, with the name of a notebook that explains the figure, if any.
    """
    made = functools.cache(lambda name: mechanisms[name]())

    def measure(_: Flags, run: Run) -> Iterator[Row]:
        for name in mechanisms:
            picture = run_record.new_figure(8, 3.6)
            made(name).draw(picture)
            picture.suptitle(titles[name], fontsize="medium")
            run_record.save_figure(picture, run.folder / f"{name}.png", dpi=130)
            for fact, (value, shows) in made(name).facts.items():
                yield Row(name, fact, float(value), float(shows))

    def values(_: Flags, rows: Sequence[Row]) -> Values:
        wrong = sum(row.here != row.figure_shows for row in rows)
        counted = {f"{row.figure}_{row.fact}": row.here for row in rows}
        return {"figures": len({row.figure for row in rows}), "facts_wrong": wrong, **counted}

    def draw(_: Flags, figure: Figure, rows: Sequence[Row]) -> None:
        shape = -(-len(mechanisms) // columns), columns
        panels = figure.subfigures(*shape, squeeze=False).flat
        for panel, name in zip(panels, mechanisms, strict=False):
            made(name).draw(panel)
            panel.suptitle(titles[name], fontsize="medium", x=0.02, ha="left")

    return Study(
        file, title=f"How it works, from runs ({paper})", kind="counted", claim=claim,
        rule="every count is that of the figure", holds=lambda v: v["facts_wrong"] == 0,
        setting=Setting(here, "the paper's figures are drawings", "paper"), flags=Flags,
        measure=measure, values=values, draw=draw, minutes=minutes, size=size,
    )  # fmt: skip
