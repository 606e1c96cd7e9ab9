"""Panels and bars side by side, as in many of the papers' figures."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def panels[R](figure: Figure, rows: Sequence[R], *fields: str) -> Iterator[tuple[Axes, list[R]]]:
    """Yields a panel for each combination of values of `fields`, and the rows with these values.
    The title has the values; the field's name precedes a number."""
    keys = [tuple(getattr(row, field) for field in fields) for row in rows]
    places = dict.fromkeys(keys)
    for axes, place in zip(figure.subplots(1, len(places), squeeze=False)[0], places):
        named = zip(fields, place)
        title = ", ".join(v if isinstance(v, str) else f"{field} {v:,g}" for field, v in named)
        axes.set_title(title, loc="left", fontsize="medium")
        yield axes, [row for row, key in zip(rows, keys) if key == place]


def grouped_bars(
    axes: Axes, names: Sequence[str], groups: Mapping[str, Sequence[float]], ylabel: str,
    heights: str = "", rotation: float = 0.0,
) -> None:  # fmt: skip
    """Draws a bar of each group at each name; no bar for nan.

    heights: format of the text above a bar; empty for no text.
    rotation: rotation of the names, in degrees.
    """
    width = 0.8 / len(groups)
    for i, (label, values) in enumerate(groups.items()):
        at = np.arange(len(names)) + (i + 0.5) * width - 0.4
        bars = axes.bar(at, np.array(values, float), 0.95 * width, label=label)
        if heights:
            axes.bar_label(bars, fmt=heights, fontsize="x-small")
    axes.set_xticks(range(len(names)), names, rotation=rotation)
    axes.set(ylabel=ylabel)
    axes.legend(frameon=False, fontsize="small")
