"""What is moved around a step: units of the policy's pools, and the state of slots."""

from collections.abc import Iterable
from dataclasses import dataclass, field

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Pool:
    """Memory of one kind, in `num_units` units that copies and swaps move whole.

    num_host_units: units of the host's memory, of which unit 0 is for padding.
    null_unit: names padding; no sequence owns it and nobody reads it.
    units_per_call: units that one compiled program moves.
    max_copies: units that are copied before a step at most.
    unit_bytes: of one unit, on all shards together.
    """

    name: str
    num_units: int
    num_host_units: int
    null_unit: int
    units_per_call: int
    max_copies: int
    unit_bytes: int

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        """Sizes to which copies are padded, each a program of its own."""
        few, most = self.units_per_call, self.max_copies
        return (few,) if most <= few else (few, most)


@dataclass
class Moves:
    """The executor does them in the order of these fields, all but `after` before the step.

    exports: (unit, host unit) of each pool, to the host's memory.
    slot_exports: (slot, key).
    released: slots whose owners have left.
    slot_imports: (key, slot).
    imports: (host unit, unit) of each pool, from the host's memory.
    copies: (source, destination) of each pool.
    slot_copies: (parent, child) slots.
    after: (parent, child) slots copied after the step, which computes what the child shares.
    dropped: keys of slot states that nobody will import.
    """

    exports: dict[str, Pairs] = field(default_factory=dict)
    slot_exports: Pairs = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    slot_imports: Pairs = field(default_factory=list)
    imports: dict[str, Pairs] = field(default_factory=dict)
    copies: dict[str, Pairs] = field(default_factory=dict)
    slot_copies: Pairs = field(default_factory=list)
    after: Pairs = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def export(self, pool: str, pairs: Iterable[tuple[int, int]]) -> None:
        self.exports.setdefault(pool, []).extend(pairs)

    def bring(self, pool: str, pairs: Iterable[tuple[int, int]]) -> None:
        """Import."""
        self.imports.setdefault(pool, []).extend(pairs)

    def copy(self, pool: str, pairs: Iterable[tuple[int, int]]) -> None:
        self.copies.setdefault(pool, []).extend(pairs)

    def export_slot(self, slot: int, key: int) -> None:
        """Export a slot's state. If its copy is still to be done, its parent has that state."""
        assert slot not in dict(self.slot_imports).values(), f"slot {slot} is not back yet"
        self.slot_exports.append((self.source_of(slot), key))

    def copy_slot(self, parent: int, child: int) -> None:
        """Copy a slot's state, from where it lies before these moves."""
        self.slot_copies.append((self.source_of(parent), child))

    def source_of(self, slot: int) -> int:
        """Where the slot's state lies before these moves. One look is enough: each pair's parent
        has its own state there, even if it is the child of a later pair."""
        return {child: parent for parent, child in self.slot_copies}.get(slot, slot)

    def release(self, slot: int) -> None:
        """The slot's owner has left: nothing needs to be copied into it. It is released once,
        however many owners it had before the next step."""
        self.slot_copies = [pair for pair in self.slot_copies if pair[1] != slot]
        if slot not in self.released:
            self.released.append(slot)

    def facts(self) -> dict:
        """What the event log says of them: the fields that are not empty."""
        return {name: value for name, value in vars(self).items() if value}


def count_units(moved: dict[str, Pairs]) -> int:
    """Units of all pools."""
    return sum(map(len, moved.values()))
