"""Bars of several groups side by side, as in many of the papers' figures."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes


def grouped_bars(
    axes: Axes, names: Sequence[str], groups: Mapping[str, Sequence[float]], ylabel: str,
    heights: str = "", rotation: float = 0.0,
) -> None:  # fmt: skip
    """Draws a bar of each group at each name; nan for no bar.

    heights: format of the text above a bar; empty for no text.
    rotation: of the names, in degrees.
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
