"""Sequences of a group that wait for another one of it to compute the tokens that they share."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from paged.requests.sequence import Sequence, SequenceGroup
from paged.scheduling.slots import Slots


@dataclass(frozen=True)
class Released:
    """Followers whose donors have computed what they share once a step has run.

    shares: (donor, follower, tokens that they share) by slot. forks: slots of those that sample in
    the step themselves, from what their donors compute in it; sources: the rows of these donors.
    """

    shares: list[tuple[int, int, int]] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)


class Followers:
    """The running sequences that are held until their donors are computed."""

    def __init__(self, slots: Slots):
        self._slots = slots
        self.held: list[Sequence] = []

    def add(self, sequences: list[Sequence]) -> None:
        self.held += sequences

    def leave(self, group: SequenceGroup) -> None:
        if self.held:
            self.held = [sequence for sequence in self.held if sequence.group is not group]

    def forks_of(self, slots: Iterable[int]) -> int:
        """How many followers sample where the sequences of `slots` sample first."""
        if not self.held:
            return 0
        donors = [self._slots.owner[slot] for slot in slots]
        return sum(f.donor in donors and f.shared == len(f.tokens) for f in self.held)

    def release(self, rows: list[tuple[int, int]]) -> Released:
        """Let those go on whose donors are computed after a step of `rows` (slot, tokens)."""
        released, waiting = Released(), []
        row_of = {slot: row for row, (slot, _) in enumerate(rows)}
        for follower in self.held:
            assert follower.donor is not None
            donor = follower.donor.slot
            row = row_of.get(donor, -1)
            count = rows[row][1] if row >= 0 else 0
            if self._slots.computed[donor] + count < follower.shared:
                waiting.append(follower)
                continue
            if follower.shared == self._slots.length[follower.slot]:
                assert row >= 0, "the donor has sampled without its follower"
                released.forks.append(follower.slot)
                released.sources.append(row)
            released.shares.append((donor, follower.slot, follower.shared))
            self.let_go(follower)
        self.held = waiting
        return released

    def __bool__(self) -> bool:
        return bool(self.held)

    def let_go(self, follower: Sequence) -> None:
        """What it shares with its donor is computed, or will be in the next step."""
        follower.donor, self._slots.held[follower.slot] = None, False
