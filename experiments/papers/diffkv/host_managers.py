"""Page managers on the host, beside which the one on the device is judged (DiffKV §7.3, Fig. 13).

`Twin` goes page by page through lists, and is what the others must equal. `ThreadedManager` is fast
host code: sequences are spread over threads, each of which works on whole arrays, and only the
prefix sums over sequences are done by one.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class Twin:
    """All in lists. Slots are the sequences 0, 1, …"""

    def __init__(self, num_pages: int, num_slots: int, num_heads: int):
        self.free = deque(range(num_pages))
        slots, heads = range(num_slots), range(num_heads)
        self.high: list[list[list[int]]] = [[[] for _ in heads] for _ in slots]
        self.low: list[list[list[int]]] = [[[] for _ in heads] for _ in slots]

    def prompts(self, allocated: int, high_SxH, low_SxH) -> None:
        for of_slot in self.high:
            for head in range(len(of_slot)):
                of_slot[head] = [self.free.popleft() for _ in range(allocated)]
        for slot, of_slot in enumerate(self.high):
            for head, held in enumerate(of_slot):
                kept, first_low = int(high_SxH[slot, head]), allocated - int(low_SxH[slot, head])
                self.free.extend(held[kept:first_low])
                of_slot[head], self.low[slot][head] = held[:kept], held[first_low:][::-1]

    def grow(self, high_SxH, low_SxH) -> None:
        for slot, head in np.argwhere(high_SxH | low_SxH).tolist():
            kind = self.high if high_SxH[slot, head] else self.low
            kind[slot][head].append(self.free.popleft())

    def equals(self, free_list, start, free, tables, high, low) -> bool:
        """Whether a manager's arrays say the same."""
        listed = free_list[(start + np.arange(free)) % len(free_list)]
        return listed.tolist() == list(self.free) and all(
            tables[slot, head, : high[slot, head]].tolist() == self.high[slot][head]
            and tables[slot, head, ::-1][: low[slot, head]].tolist() == self.low[slot][head]
            for slot in range(len(tables))
            for head in range(tables.shape[1])
        )


class ThreadedManager:
    """Arrays as `page_manager.Pages` has them, with counts of pages by precision apart."""

    def __init__(self, num_pages: int, num_slots: int, num_heads: int, width: int, threads: int):
        self.free_list = np.arange(num_pages, dtype=np.int32)
        self.start, self.free = 0, num_pages
        self.tables = np.zeros((num_slots, num_heads, width), np.int32)
        self.high, self.low = np.zeros((2, num_slots, num_heads), np.int32)
        self._threads = ThreadPoolExecutor(threads)

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        return list(self._threads.map(work, range(len(self.tables))))

    def _take(self, counts) -> np.ndarray:
        """Where in the list each sequence's run of so many pages begins."""
        ends = np.cumsum(counts)
        first = self.start + ends - counts
        self.start = int(self.start + ends[-1]) % len(self.free_list)
        self.free -= int(ends[-1])
        return first

    def _run(self, first: int, count: int) -> np.ndarray:
        return self.free_list[(first + np.arange(count)) % len(self.free_list)]

    def prompts(self, allocated: int, high_SxH, low_SxH) -> np.ndarray:
        """The tables of all sequences."""
        S, H, M = self.tables.shape
        first, column = self._take(np.full(S, H * allocated)), np.arange(allocated)

        def plan(slot: int) -> np.ndarray:
            pages = self._run(first[slot], H * allocated).reshape(H, allocated)
            high, low = high_SxH[slot, :, None], low_SxH[slot, :, None]
            table = self.tables[slot]
            table[:, :allocated] = pages
            # The last page is the first of low precision, at the right end of the table.
            mirrored = M - allocated + column
            table[:, mirrored] = np.where(column >= allocated - low, pages, table[:, mirrored])
            self.high[slot], self.low[slot] = high_SxH[slot], low_SxH[slot]
            return pages[(column >= high) & (column < allocated - low)]

        surplus = self._each(plan)
        ends = np.cumsum([len(each) for each in surplus])
        end, N = self.start + self.free, len(self.free_list)

        def recycle(slot: int) -> None:
            each = surplus[slot]
            self.free_list[(end + ends[slot] - len(each) + np.arange(len(each))) % N] = each

        self._each(recycle)
        self.free += int(ends[-1])
        return self.tables

    def grow(self, high_SxH, low_SxH) -> np.ndarray:
        """The new pages of all heads [S, H]; of those that get none anything."""
        either, M = high_SxH | low_SxH, self.tables.shape[2]
        counts = either.sum(1)
        first, pages = self._take(counts), np.zeros(either.shape, np.int32)

        def plan(slot: int) -> None:
            (heads,) = np.nonzero(either[slot])
            pages[slot, heads] = self._run(first[slot], counts[slot])
            column = np.where(
                high_SxH[slot, heads], self.high[slot, heads], M - 1 - self.low[slot, heads]
            )
            self.tables[slot, heads, column] = pages[slot, heads]
            self.high[slot] += high_SxH[slot]
            self.low[slot] += low_SxH[slot]

        self._each(plan)
        return pages
