"""Where page tables have the pages of each precision (DiffKV §5.2, §5.3).

Two precisions share a bidirectional table: the pages of the higher one lie from its left end on,
and those of the lower one from its right end on; what is between may be anything. Of three, the
highest has a unidirectional table of its own, the first columns of the row.
"""

from typing import NamedTuple


class Run(NamedTuple):
    """first: the column of a precision's first page. step: to that of the next one, 1 or -1.
    width: columns of its table, the most pages that it can have."""

    first: int
    step: int
    width: int

    def column(self, number):
        """Of the page `number`, an array; of one beyond the table, any column of it."""
        return self.first + self.step * number.clip(0, self.width - 1)

    def number(self, column):
        """Which page a column holds, below 0 or not below `width` if it belongs to others."""
        return (column - self.first) * self.step


def runs(levels: int, width: int, single: int = 0) -> tuple[Run, ...]:
    """Of each precision, the highest first, in rows of `width` columns, of which the first `single`
    are the unidirectional table. Raises ValueError for widths that these levels do not have."""
    if (levels, single > 0) not in ((2, False), (3, True)) or single >= width:
        raise ValueError(
            f"{levels} precisions have no tables of {width} columns with {single} for one alone: "
            "two share all, and of three the highest has some for itself"
        )
    both = width - single
    shared = Run(single, 1, both), Run(width - 1, -1, both)
    return shared if levels == 2 else (Run(0, 1, single), *shared)
