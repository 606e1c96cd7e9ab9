"""The columns of each precision's pages in page tables (DiffKV §5.2, §5.3).

Two precisions share a bidirectional table: pages of the higher precision begin at its left end, and
pages of the lower precision at its right end. Entries between these pages may be anything. With
three precisions the highest has a unidirectional table of its own, the first columns of the row.
"""

from typing import NamedTuple


class Run(NamedTuple):
    """The columns of one precision in a table.

    first: the column of the precision's first page.
    step: 1 or -1, from the column of a page to the column of the next page.
    width: the columns of the precision's table, which is also its largest number of pages.
    """

    first: int
    step: int
    width: int

    def column(self, number):
        """The columns of pages `number`, an array. Numbers are clipped to the table's pages."""
        return self.first + self.step * number.clip(0, self.width - 1)

    def number(self, column):
        """The number of a column's page. For a column of another table, the number is below 0 or
        at least `width`."""
        return (column - self.first) * self.step


def runs(levels: int, width: int, single: int = 0) -> tuple[Run, ...]:
    """The run of each of `levels` precisions, the highest precision first.

    width: the columns of a row.
    single: the columns of the unidirectional table; 0 with two precisions.

    Raises ValueError if `single` does not fit `levels` and `width`.
    """
    if (levels, single > 0) not in ((2, False), (3, True)) or single >= width:
        raise ValueError(
            f"{levels} precisions have no tables of {width} columns with {single} for one alone: "
            "two precisions share all columns; the highest of three has columns of its own"
        )
    both = width - single
    shared = Run(single, 1, both), Run(width - 1, -1, both)
    return shared if levels == 2 else (Run(0, 1, single), *shared)
