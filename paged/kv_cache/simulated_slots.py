"""Slot state of a simulated device: token counts of each slot."""

import numpy as np

from paged.kv_cache.moves import Moves, Pairs


class SimulatedSlots:
    """The part of `SimulatedDevice` that tracks the token counts of slots.

    prompts: [num_slots] computed prompt tokens of each slot.
    ends: [num_slots] computed tokens of each slot.
    """

    def __init__(self, num_slots: int):
        self._known = np.zeros((2, num_slots), np.int64)
        self.prompts, self.ends = self._known
        self._swapped: dict[int, np.ndarray] = {}

    def move(self, moves: Moves) -> None:
        for slot, key in moves.slot_exports:
            self._swapped[key] = self._known[:, slot].copy()
        self._known[:, moves.released] = 0
        for key, slot in moves.slot_imports:
            self._known[:, slot] = self._swapped.pop(key)
        self._copy(moves.slot_copies)
        for key in moves.dropped:
            self._swapped.pop(key, None)
        brought = [slot for _, slot in [*moves.slot_imports, *moves.slot_copies]]
        self._changed(np.array([*moves.released, *brought], np.int64))

    def move_after(self, moves: Moves) -> None:
        self._copy(moves.after)
        self._changed(np.array([child for _, child in moves.after], np.int64))

    def copied(self, pairs: Pairs) -> dict[str, int]:
        return {}

    def compute(self, slots: np.ndarray, ends: np.ndarray, are_prompts: np.ndarray) -> None:
        self.prompts[slots] = np.where(are_prompts, ends, self.prompts[slots])
        self.ends[slots] = ends
        self._changed(slots)

    def _copy(self, pairs) -> None:
        for parent, child in pairs:
            self._known[:, child] = self._known[:, parent]

    def _changed(self, slots: np.ndarray) -> None:
        """Hook for subclasses: the token counts of `slots` have changed."""
