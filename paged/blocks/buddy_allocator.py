"""A buddy allocator: contiguous runs of 2^k blocks (vLLM §6.1, Baseline 2). Orca's policies, which
reserve such runs, are in `kv_cache/orca.py`."""


class BuddyAllocator:
    """Blocks 0 to `size` - 1. At first they form as few runs as possible, the largest run first.

    A run of 2^k blocks starts at a multiple of 2^k. Its two halves are buddies. A run that is too
    large is split into its buddies, which merge again when both are free. A request gets the
    smallest free run that is large enough; among runs of equal size, the run with the lowest start.
    """

    def __init__(self, size: int):
        """Raises ValueError if `size` is less than 1."""
        if size < 1:
            raise ValueError(f"a buddy allocator needs at least 1 block, not {size}")
        self.size = size
        # The order of a run of 2^k blocks is k. `_free` has the starts of free runs by order.
        # `_allocated` has the orders of allocated runs by start.
        self._free: list[set[int]] = [set() for _ in range(size.bit_length())]
        self._allocated: dict[int, int] = {}
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    @property
    def largest_run(self) -> int:
        """The number of blocks in the largest run of an empty allocator."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def num_free(self) -> int:
        return self.stranded(self.size + 1)

    @staticmethod
    def run_size(n: int) -> int:
        """The blocks of the run that a request for `n` gets: `n` rounded up to a power of two."""
        return 1 << (n - 1).bit_length()

    def stranded(self, n: int) -> int:
        """The free blocks in runs too small for `n`: the external fragmentation for a request of
        `n` blocks."""
        small = ((order, starts) for order, starts in enumerate(self._free) if 1 << order < n)
        return sum(len(starts) << order for order, starts in small)

    def allocate(self, n: int) -> int | None:
        """The first block of a run of `run_size(n)`, or None if no free run is large enough."""
        assert n > 0, n
        order = (n - 1).bit_length()
        found = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        for k in range(order, found):
            self._free[k].add(start + (1 << k))
        self._allocated[start] = order
        return start

    def free(self, start: int) -> None:
        """Give back the run that begins at `start`."""
        assert start in self._allocated, f"no run begins at block {start}"
        order = self._allocated.pop(start)
        # A run that was whole at first has no buddy, because its buddy would end beyond `size`.
        while (buddy := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)
