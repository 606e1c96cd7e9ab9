"""Limits on admission: prefill room in a step, and adapters that are not on the device."""

from collections.abc import Collection, Iterable, Iterator

from paged.adapters.store import AdapterStore
from paged.config import EngineConfig
from paged.requests.sequence import SequenceGroup


class PrefillRoom:
    """The prefill rows of one step, limited in tokens and in rows.

    rows: (slot, tokens) of each prefill row.
    budget: tokens left in the step.
    refused: whether a sequence did not fit; then no new group is admitted.
    in_chunks: whether a prompt is partly prefilled; for policies with a `staged_tile`.
    goes_on: whether the step continues such a prompt, or a pinned prefix.
    """

    def __init__(self, config: EngineConfig, budget: int, in_chunks: bool = False):
        self._config, self.budget = config, budget
        self.rows: list[tuple[int, int]] = []
        self.refused, self.in_chunks, self.goes_on = False, in_chunks, in_chunks

    def takes(self, length: int, pinned: int = 0) -> bool:
        """Whether the first chunk of a sequence of `length` tokens, after `pinned` tokens, fits. If
        not, sets `refused`."""
        free = len(self.rows) < self._config.max_prefills_per_step
        free &= not (pinned and (self.in_chunks or self.goes_on))
        takes = free and self._chunk(pinned, length - pinned, self.budget) > 0
        self.refused |= not takes
        return takes

    def _chunk(self, start: int, left: int, most: int) -> int:
        """Tokens of the next chunk of a sequence with `left` tokens to prefill from `start`: at
        most `most`, 0 if no chunk is allowed."""
        if left <= most:
            return left
        if not self._config.chunked_prefill:
            return 0
        can, length, page = self._config.parts, start + left, self._config.page_size
        if tile := can.staged_tile:
            whole = most // tile * tile
            last = tile if left - whole == 1 else 0
            return 0 if self.in_chunks and not start else max(0, whole - last)
        if not can.prefill_tile or length < can.tiled_from:
            return most
        end = -(-length // page) * page
        tiles_left = -(-(end - start - most) // can.prefill_tile)
        return max(0, end - tiles_left * can.prefill_tile - start)

    def add(self, slot: int, left: int, forks: int = 0, start: int = 0, stop: int = 0) -> None:
        """Add a row with as many of the `left` tokens from `start` as fit.

        A chunk ends where the policy allows a cut, and not after `stop` if `stop` is beyond
        `start`. The last token needs room for `forks` further rows of one token each. Without this
        room the chunk ends earlier. If nothing fits, sets `refused`.
        """
        most = min(self.budget, stop - start) if start < stop else self.budget
        count = self._chunk(start, left, most)
        if count == left and left + forks > self.budget:
            count = self._chunk(start, left, left - 1)
            if not count and left + forks > self._config.max_num_batched_tokens:
                count = left - 1  # Chunk and forks exceed even an empty step.
        if not count or len(self.rows) == self._config.max_prefills_per_step:
            self.refused = True
            return
        self.rows.append((slot, count))
        self.in_chunks = count < left or (self.in_chunks and not start)
        self.goes_on |= start > 0
        self.budget -= count + (forks if count == left else 0)


def in_turn(
    waiting: Iterable[SequenceGroup], returning: Collection[SequenceGroup]
) -> Iterable[SequenceGroup]:
    """The queue in admission order: while swapped groups return (vLLM §4.5), preempted groups come
    before new ones."""
    if not returning:
        return waiting
    return sorted(waiting, key=lambda group: group.num_preemptions == 0)


def candidates(
    waiting: Iterable[SequenceGroup], gate: AdapterStore, returning: Collection[SequenceGroup],
    max_overtakes: int,
) -> Iterator[SequenceGroup]:  # fmt: skip
    """Yield the groups to admit, in order. The caller must admit each group before the next.

    Groups without their adapter are skipped, and each is overtaken at most `max_overtakes` times.
    While swapped groups return, new groups are skipped too. The search goes on, because a preempted
    group may be behind them in the queue.
    """
    passed: list[SequenceGroup] = []
    for group in waiting:
        if returning and group.num_preemptions == 0:
            continue
        if gate.admits(group):
            yield group
            for before in passed:
                before.overtaken += 1
        else:
            passed.append(group)
        if any(before.overtaken >= max_overtakes for before in passed):
            return
