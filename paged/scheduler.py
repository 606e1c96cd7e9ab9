"""Iteration-level scheduling: who runs next, and with how many tokens (vLLM §4.3, §4.5).

First come, first served. Each step takes all running sequences that generate, then chunks of
prompts under a token budget, then new requests while blocks and slots allow. When blocks run out
the latest arrivals are preempted; they keep their place in the order and are recomputed.
"""

import functools
from collections import deque
from dataclasses import dataclass

import numpy as np

from paged.config import EngineConfig
from paged.kv_cache.policy import HostPolicy
from paged.sequence import Sequence, SequenceGroup, Status
from paged.slots import Slots


@dataclass(frozen=True)
class ScheduledStep:
    """One step in numbers: rows of prefill chunks first, then decode rows.

    slots, starts, counts: [n] int64: row i computes tokens starts[i] .. starts[i] + counts[i] of
    the sequence in slots[i]; a decode row computes them in as many iterations. samples: [n] bool:
    whether it ends at the sequence's last token, and so yields the next one; yields: [n] how many
    tokens it yields. generations: [n] owners of the slots. copies: (source, destination) blocks to
    be copied first. iterations: of the whole step.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    yields: np.ndarray
    generations: np.ndarray
    num_prefills: int
    copies: list[tuple[int, int]]
    preempted: list[SequenceGroup]
    admitted: list[SequenceGroup]

    @functools.cached_property
    def num_prefill_tokens(self) -> int:
        return int(self.counts[: self.num_prefills].sum())

    @property
    def num_decodes(self) -> int:
        return len(self.slots) - self.num_prefills

    @functools.cached_property
    def num_decode_tokens(self) -> int:
        return int(self.counts[self.num_prefills :].sum())

    @functools.cached_property
    def iterations(self) -> int:
        return int(self.yields.max())


class _PrefillRoom:
    """The prefill rows of one step, under the limits of tokens and of rows."""

    def __init__(self, config: EngineConfig, budget: int):
        self._config, self.budget = config, budget
        self.rows: list[tuple[int, int]] = []

    @property
    def full(self) -> bool:
        return self.budget == 0 or len(self.rows) == self._config.max_prefills_per_step

    def takes(self, left: int) -> bool:
        return not self.full and (self._config.chunked_prefill or left <= self.budget)

    def add(self, slot: int, left: int) -> None:
        """As many of the `left` tokens as fit; none if the sequence must go whole and cannot."""
        if self.takes(left):
            count = min(left, self.budget)
            self.rows.append((slot, count))
            self.budget -= count


class Scheduler:
    """`schedule` decides a step and counts it as done; `update` brings its tokens, a step later."""

    def __init__(self, config: EngineConfig, policy: HostPolicy):
        self.config, self.policy = config, policy
        self.slots = Slots(config.max_num_seqs, config.max_model_len)
        self.waiting: deque[SequenceGroup] = deque()  # by arrival order
        self.running: list[SequenceGroup] = []  # by arrival order, all before those that wait
        self._running_slots: np.ndarray | None = None

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def running_slots(self) -> np.ndarray:
        """Slots of all running sequences in arrival order; cached until membership changes."""
        if self._running_slots is None:
            slots = [s.slot for g in self.running for s in g.sequences if s.slot >= 0]
            self._running_slots = np.array(slots, np.int64)
        return self._running_slots

    def add(self, group: SequenceGroup) -> None:
        self.waiting.append(group)

    def abort(self, group: SequenceGroup) -> None:
        """End a group that waits or runs."""
        if group in self.waiting:
            self.waiting.remove(group)
        for sequence in group.sequences:
            self.finish(sequence, "abort")

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End one sequence; its blocks are free at once. A step in flight may still write them,
        but steps run in order, so it does so before their next owner."""
        if sequence.status is Status.RUNNING:
            self._release(sequence, Status.FINISHED)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        group = sequence.group
        if group.finished and group in self.running:
            self.running.remove(group)

    def _release(self, sequence: Sequence, status: Status) -> None:
        self.policy.free(sequence.slot)
        self.slots.release(sequence, status)
        self._running_slots = None

    def _ready(self) -> np.ndarray:
        """Slots that compute one token in the next step: their newest, and then sample."""
        s, running = self.slots, self.running_slots()
        length = s.length[running]
        return running[(length - s.computed[running] == 1) & (length < s.limit[running])]

    def decodes(self) -> np.ndarray | None:
        """Slots that generate in the next step, or None if there are no blocks for all of them."""
        ready = self._ready()
        return ready if self.policy.can_append(ready, self.slots.length[ready]) else None

    def _iterations(self, decodes: np.ndarray) -> np.ndarray:
        """Tokens that each of `decodes` [n] computes in a step of decodes alone: `multi_step`, or
        what its limit leaves; one if there are no blocks for more."""
        s = self.slots
        counts = np.minimum(self.config.multi_step, s.limit[decodes] - s.length[decodes])
        if self.policy.can_append(decodes, s.length[decodes] + counts - 1):
            return counts
        return np.ones_like(counts)

    def _preempt_latest(self) -> SequenceGroup:
        """Take all sequences of the latest arrival off the device; they will be recomputed.

        This is where a group would be swapped out instead (vLLM §4.5).
        """
        assert len(self.running) > 1, "one group alone must fit: checked when it was added"
        group = self.running.pop()
        for sequence in group.sequences:
            if sequence.status is Status.RUNNING:
                self._release(sequence, Status.WAITING)
        self.waiting.appendleft(group)
        group.num_preemptions += 1
        return group

    def _admit(self, room: _PrefillRoom) -> SequenceGroup | None:
        """Move the head of the queue to the device if its blocks and slots are there."""
        group = self.waiting[0]
        sequences = [s for s in group.sequences if s.status is Status.WAITING]
        if self.slots.num_free < len(sequences) or not room.takes(len(sequences[0].tokens)):
            return None
        # With nothing else running there is no growth to keep blocks for.
        if not self.policy.can_admit(sequences, keep_watermark=bool(self.running)):
            return None
        for sequence in sequences:
            slot = self.slots.acquire(sequence)
            cached = self.policy.admit(slot, sequence)
            self.slots.computed[slot] = cached
            group.num_cached_tokens += cached
        self.running.append(self.waiting.popleft())
        self._running_slots = None
        return group

    def schedule(self, decodes: np.ndarray | None = None) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute now. decodes: what `decodes` has
        just said, if it was asked."""
        s = self.slots
        preempted = []
        while decodes is None and (decodes := self.decodes()) is None:
            preempted.append(self._preempt_latest())
        copies = self.policy.append(decodes, s.length[decodes])

        room = _PrefillRoom(self.config, self.config.max_num_batched_tokens - len(decodes))
        running = self.running_slots()
        left = s.length[running] - s.computed[running]
        for i in np.flatnonzero(left > 1):
            room.add(int(running[i]), int(left[i]))

        admitted: list[SequenceGroup] = []
        # Requests wait in a step that preempts, or they would take what was just set free.
        while self.waiting and not preempted and (group := self._admit(room)):
            admitted.append(group)
            for sequence in group.sequences:
                slot = sequence.slot
                if slot < 0:
                    continue
                tokens_left = int(s.length[slot] - s.computed[slot])
                if tokens_left > 1:
                    room.add(slot, tokens_left)
                elif room.budget > 0:
                    decodes = np.append(decodes, slot)
                    room.budget -= 1

        if not room.rows and not len(decodes):
            assert not preempted, "preempted everything"
            return None
        iterations = np.ones(len(decodes), np.int64)
        if self.config.multi_step > 1 and not room.rows:
            iterations = self._iterations(decodes)
            copies = copies + self.policy.append(decodes, s.length[decodes] + iterations - 1)
        return self._commit(room.rows, decodes, iterations, copies, preempted, admitted)

    def _commit(self, prefills, decodes, iterations, copies, preempted, admitted) -> ScheduledStep:
        s, slots, counts, most = self.slots, decodes, iterations, iterations
        if prefills:
            chunks = np.array(prefills, np.int64)
            slots = np.concatenate([chunks[:, 0], decodes])
            counts = np.concatenate([chunks[:, 1], iterations])
            most = np.concatenate([np.ones(len(chunks), np.int64), iterations])
        starts, length = s.computed[slots], s.length[slots]
        ends = starts + counts
        samples = ends >= length
        yields = samples * most
        s.computed[slots] = ends
        s.length[slots] = length + yields
        return ScheduledStep(
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            yields=yields,
            generations=s.generation[slots],
            num_prefills=len(prefills),
            copies=copies,
            preempted=preempted,
            admitted=admitted,
        )

    def update(
        self, step: ScheduledStep, iteration: int, sampled: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Record the tokens that an iteration of a step sampled, `sampled` [n] by row.

        Tokens of sequences that ended or were preempted since are dropped. Returns the rows that
        took part and their tokens; a negative one (`INVALID_TOKEN`) was not recorded.
        """
        s = self.slots
        took = (iteration < step.yields) & (s.generation[step.slots] == step.generations)
        rows = np.flatnonzero(took)
        slots, tokens = step.slots[rows], sampled[rows]
        good, new = slots, tokens
        if (tokens < 0).any():
            good, new = slots[tokens >= 0], tokens[tokens >= 0]
        known = s.known[good]
        s.tokens[good, known] = new
        s.known[good] = known + 1
        if self.config.prefix_caching:
            self.policy.confirm(good, np.minimum(known + 1, s.computed[good]), s.tokens)
        return rows, tokens
