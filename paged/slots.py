"""Host state of running sequences, as arrays over slots.

A slot is a small integer that a sequence keeps from admission to its end or preemption; on the
device the sequence's state lives under the same number. Arrays keep the per-step cost of hundreds
of running sequences to a few vector operations.
"""

import numpy as np

from paged.sequence import Sequence, Status


class Slots:
    """tokens: [num_slots, max_tokens] int32 prompt and output as far as `known`.

    length:   tokens that exist once all dispatched steps have run (sampled ones included).
    known:    tokens that the host has read; length - known are in flight.
    computed: tokens whose keys and values are written once all dispatched steps have run.
    limit:    length at which generation ends.
    generation: counts the slot's owners, so that results of an earlier owner can be told apart.
    watched:  whether each new token must be looked at for stop strings or streaming.
    """

    def __init__(self, num_slots: int, max_tokens: int):
        self.num_slots = num_slots
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        self.length = np.zeros(num_slots, np.int64)
        self.known = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.generation = np.zeros(num_slots, np.int64)
        self.active = np.zeros(num_slots, bool)
        self.watched = np.zeros(num_slots, bool)
        self.ignore_eos = np.zeros(num_slots, bool)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint32)
        self.owner: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, sequence: Sequence) -> int:
        """Give `sequence` a slot, with nothing computed yet."""
        slot, group = self._free[-1], sequence.group
        n = len(sequence.tokens)
        self.tokens[slot, :n] = sequence.tokens
        self.length[slot] = self.known[slot] = n
        self.computed[slot] = 0
        self.prompt_length[slot] = group.num_prompt_tokens
        self.limit[slot] = group.limit
        self.active[slot] = True
        self.watched[slot] = bool(group.sampling.stop) or group.stream
        self.ignore_eos[slot] = group.sampling.ignore_eos
        self.temperature[slot] = group.sampling.temperature
        self.top_k[slot] = group.sampling.top_k
        self.top_p[slot] = group.sampling.top_p
        self.seed[slot] = sequence.seed
        self.owner[slot] = sequence
        self._free.pop()
        sequence.slot, sequence.status = slot, Status.RUNNING
        return slot

    def release(self, sequence: Sequence, status: Status) -> None:
        """Take the slot back; the sequence keeps its known tokens, those in flight are dropped."""
        slot = sequence.slot
        assert self.owner[slot] is sequence, f"slot {slot} belongs to another sequence"
        sequence.tokens = self.known_tokens(slot)
        sequence.slot, sequence.status = -1, status
        self.owner[slot] = None
        self.active[slot] = False
        self.generation[slot] += 1
        self._free.append(slot)

    def known_tokens(self, slot: int) -> np.ndarray:
        return self.tokens[slot, : self.known[slot]].copy()
