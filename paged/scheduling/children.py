"""Child sequences of a group (`requests.sequence.SequenceGroup`), which wait until their parent has
computed the shared tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from paged.requests.sequence import Sequence, SequenceGroup
from paged.scheduling.slots import Slots


@dataclass(frozen=True)
class Released:
    """Children whose shared tokens are computed once a step has run.

    shares: (parent slot, child slot, number of shared tokens).
    forks: slots of children that sample in this step, from their parents' logits.
    sources: row in the step of each fork's parent.
    """

    shares: list[tuple[int, int, int]] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)


class Children:
    """The running sequences that are held until their parents have computed the shared tokens."""

    def __init__(self, slots: Slots):
        self._slots = slots
        self.held: list[Sequence] = []

    def add(self, sequences: list[Sequence]) -> None:
        self.held += sequences

    def leave(self, group: SequenceGroup) -> None:
        if self.held:
            self.held = [sequence for sequence in self.held if sequence.group is not group]

    def forks_of(self, slots: Iterable[int]) -> int:
        """Number of children that start sampling in the same step as their parents in `slots`."""
        if not self.held:
            return 0
        parents = [self._slots.owner[slot] for slot in slots]
        return sum(f.parent in parents and f.shared == len(f.tokens) for f in self.held)

    def release(self, rows: list[tuple[int, int]]) -> Released:
        """Release children whose shared tokens a step of `rows` (slot, tokens) completes."""
        released, waiting = Released(), []
        row_of = {slot: row for row, (slot, _) in enumerate(rows)}
        for child in self.held:
            assert child.parent is not None
            parent = child.parent.slot
            row = row_of.get(parent, -1)
            count = rows[row][1] if row >= 0 else 0
            if self._slots.computed[parent] + count < child.shared:
                waiting.append(child)
                continue
            if child.shared == self._slots.length[child.slot]:
                assert row >= 0, "the parent has sampled without its child"
                released.forks.append(child.slot)
                released.sources.append(row)
            released.shares.append((parent, child.slot, child.shared))
            self.let_go(child)
        self.held = waiting
        return released

    def __bool__(self) -> bool:
        return bool(self.held)

    def let_go(self, child: Sequence) -> None:
        """Release a child whose shared tokens are computed, or will be in the next step."""
        child.parent, self._slots.held[child.slot] = None, False
