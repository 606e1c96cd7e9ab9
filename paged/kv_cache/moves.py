"""Moves before and after a step: units of the policy's pools, and the state of slots.

Exports and imports are a part of swapping (vLLM §4.5). Its other parts are elsewhere in paged/:

    decision    scheduling/scheduler.py
    tables      blocks/block_table.py, `SwappedTables`
    transfer    device/mover.py
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Pool:
    """Memory of one kind, in `num_units` units. Copies and swaps move whole units.

    num_host_units: units of the host's memory. Unit 0 is padding.
    null_unit: unit of padding; no sequence owns or reads it.
    units_per_call: units that one call of a swap program moves. A call of a copy program moves
        as many as one of the `copy_sizes`.
    max_copies: most units that are copied before a step.
    unit_bytes: bytes of one unit, on all shards together.
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
        """Sizes to which copies are padded. Each size compiles its own program."""
        few, most = self.units_per_call, self.max_copies
        return (few,) if most <= few else (few, most)


@dataclass
class Moves:
    """The executor performs the moves in the order of these fields: `after` after the step, all
    other moves before it.

    exports: (unit, host unit) by pool, swapped out to the host's memory.
    slot_exports: (slot, key), slot states swapped out.
    released: slots whose sequences have ended or been preempted.
    slot_imports: (key, slot), slot states swapped in.
    dropped: keys of slot states that will not be imported.
    imports: (host unit, unit) by pool, swapped in from the host's memory.
    copies: (source, destination) units by pool.
    slot_copies: (parent, child) slots.
    after: (parent, child) slots, copied after the step, which computes the shared tokens.
    """

    exports: dict[str, Pairs] = field(default_factory=partial(defaultdict, list))
    slot_exports: Pairs = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    slot_imports: Pairs = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    imports: dict[str, Pairs] = field(default_factory=partial(defaultdict, list))
    copies: dict[str, Pairs] = field(default_factory=partial(defaultdict, list))
    slot_copies: Pairs = field(default_factory=list)
    after: Pairs = field(default_factory=list)

    def export_slot(self, slot: int, key: int) -> None:
        """Export a slot's state. If a copy into the slot is pending, export the copy's source."""
        assert slot not in dict(self.slot_imports).values(), f"slot {slot} is yet to be swapped in"
        self.slot_exports.append((self.source_of(slot), key))

    def copy_slot(self, parent: int, child: int) -> None:
        """Copy the state that `parent` has before these moves to `child`."""
        self.slot_copies.append((self.source_of(parent), child))

    def source_of(self, slot: int) -> int:
        """The slot that has the state of `slot` before these moves. One lookup suffices:
        `copy_slot` records, instead of a parent, the slot that has the parent's state."""
        return {child: parent for parent, child in self.slot_copies}.get(slot, slot)

    def release(self, slot: int) -> None:
        """Cancel copies into a slot whose sequence has left, and release the slot. A slot is
        released once, even if several sequences used it before the next step."""
        self.slot_copies = [pair for pair in self.slot_copies if pair[1] != slot]
        if slot not in self.released:
            self.released.append(slot)

    def facts(self) -> dict:
        """The non-empty fields, for the event log."""
        found = {name: value for name, value in vars(self).items() if value}
        return {n: dict(v) if isinstance(v, dict) else v for n, v in found.items()}


def count_units(moved: dict[str, Pairs]) -> int:
    """Number of moved units, over all pools."""
    return sum(map(len, moved.values()))
