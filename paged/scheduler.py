"""Iteration-level scheduling: who runs next, and with how many tokens (vLLM §4.3, §4.5).

First come, first served. Each step takes all running sequences that generate, then chunks of
prompts under a token budget, then new requests while blocks and slots allow. When blocks run out
the latest arrivals are preempted; they keep their place in the order and are recomputed.
"""

import bisect
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from paged.kv_cache.policy import HostPolicy
from paged.sequence import SequenceGroup, Status
from paged.slots import Slots


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_seqs: running sequences. max_num_batched_tokens: tokens of one step.
    max_prefills_per_step: sequences that prefill in one step. chunked_prefill: whether a prompt may
    be spread over steps. Raises ValueError for limits that cannot work together.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefills_per_step: int = 8
    max_model_len: int = 2048
    chunked_prefill: bool = True

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_prefills_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence needs a token a step"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a whole sequence must fit a step: max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len})"
            )


@dataclass(frozen=True)
class ScheduledStep:
    """One step in numbers: rows of prefill chunks first, then rows that generate.

    slots, starts, counts: [n] int64: row i computes tokens starts[i] .. starts[i] + counts[i] of
    the sequence in slots[i]. samples: [n] bool: whether it ends at the sequence's last token, and
    so yields the next one. generations: [n] owners of the slots. copies: (source, destination)
    blocks to be copied first.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    generations: np.ndarray
    num_prefills: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    admitted: list[SequenceGroup] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        return int(self.counts[: self.num_prefills].sum())

    @property
    def num_decodes(self) -> int:
        return len(self.slots) - self.num_prefills


class Scheduler:
    """`schedule` decides a step and counts it as done; `update` brings its tokens, a step later."""

    def __init__(self, config: SchedulerConfig, policy: HostPolicy):
        self.config, self.policy = config, policy
        self.slots = Slots(config.max_num_seqs, config.max_model_len)
        self.waiting: deque[SequenceGroup] = deque()  # by arrival order
        self.running: list[SequenceGroup] = []  # by arrival order
        self.num_preemptions = 0
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

    def finish(self, sequence, reason: str) -> None:
        """End one sequence; its blocks are free at once. A step in flight may still write them,
        but steps run in order, so it does so before their next owner."""
        if sequence.status is Status.RUNNING:
            self._release(sequence, Status.FINISHED)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        group = sequence.group
        if group.finished and group in self.running:
            self.running.remove(group)

    def _release(self, sequence, status: Status) -> None:
        self.policy.free(sequence.slot)
        self.slots.release(sequence, status)
        self._running_slots = None

    def _preempt(self, group: SequenceGroup) -> None:
        """Take all sequences of the group off the device; they will be recomputed."""
        for sequence in group.sequences:
            if sequence.status is Status.RUNNING:
                self._release(sequence, Status.WAITING)
        self.running.remove(group)
        bisect.insort(self.waiting, group, key=lambda g: g.order)
        group.num_preemptions += 1
        self.num_preemptions += 1

    def _preempt_until_appendable(self, decodes: np.ndarray):
        """Preempt latest arrivals until each of `decodes` can take its next token."""
        s, preempted = self.slots, []
        while not self.policy.can_append(decodes, s.length[decodes]):
            assert len(self.running) > 1, "one sequence alone must fit: checked when it was added"
            preempted.append(self.running[-1])
            self._preempt(self.running[-1])
            decodes = decodes[s.active[decodes]]
        return decodes, preempted

    def _admit(self, group: SequenceGroup, budget: int) -> bool:
        """Move the head of the queue to the device if its blocks and a slot are there."""
        sequences = [s for s in group.sequences if s.status is Status.WAITING]
        tokens = sum(len(s.tokens) for s in sequences)
        if self.slots.num_free < len(sequences):
            return False
        if not self.config.chunked_prefill and tokens > budget:
            return False
        # With nothing else running there is no growth to keep blocks for.
        if not self.policy.can_admit(tokens, keep_watermark=bool(self.running)):
            return False
        for sequence in sequences:
            self.policy.admit(self.slots.acquire(sequence), len(sequence.tokens))
        self.waiting.popleft()
        bisect.insort(self.running, group, key=lambda g: g.order)
        self._running_slots = None
        return True

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute now."""
        s, config = self.slots, self.config
        running = self.running_slots()
        remaining = s.length[running] - s.computed[running]
        unfinished = s.length[running] < s.limit[running]
        decodes, preempted = self._preempt_until_appendable(running[(remaining == 1) & unfinished])
        copies = self.policy.append(decodes, s.length[decodes])

        budget = config.max_num_batched_tokens - len(decodes)
        prefills: list[tuple[int, int]] = []

        def prefill(slot: int, left: int) -> None:
            nonlocal budget
            count = min(left, budget)
            prefills.append((slot, count))
            budget -= count

        for slot in running[remaining > 1]:
            if budget == 0 or len(prefills) == config.max_prefills_per_step:
                break
            if s.active[slot]:
                prefill(slot, s.length[slot] - s.computed[slot])

        admitted: list[SequenceGroup] = []
        # Requests wait in a step that preempts, or they would take what was just set free.
        while (
            self.waiting and not preempted and budget > 0
            and len(prefills) < config.max_prefills_per_step
        ):  # fmt: skip
            group = self.waiting[0]
            if not self._admit(group, budget):
                break
            admitted.append(group)
            for sequence in group.sequences:
                left = len(sequence.tokens)
                if left > 1:
                    prefill(sequence.slot, left)
                else:
                    decodes = np.append(decodes, sequence.slot)
                    budget -= 1

        if not prefills and not len(decodes):
            return None
        return self._commit(prefills, decodes, copies, preempted, admitted)

    def _commit(self, prefills, decodes, copies, preempted, admitted) -> ScheduledStep:
        s = self.slots
        slots = np.concatenate([np.array([p[0] for p in prefills], np.int64), decodes])
        counts = np.ones(len(slots), np.int64)
        counts[: len(prefills)] = [p[1] for p in prefills]
        starts = s.computed[slots]
        s.computed[slots] += counts
        samples = s.computed[slots] == s.length[slots]
        s.length[slots] += samples
        return ScheduledStep(
            slots, starts, counts, samples, s.generation[slots],
            len(prefills), copies, preempted, admitted,
        )  # fmt: skip

    def update(self, step: ScheduledStep, sampled: np.ndarray) -> np.ndarray:
        """Record the tokens that a step sampled, `sampled` [n] by row.

        Tokens of sequences that ended or were preempted since are dropped. Returns the slots that
        took a token.
        """
        s = self.slots
        took = step.samples & (s.generation[step.slots] == step.generations)
        slots = step.slots[took]
        s.tokens[slots, s.known[slots]] = sampled[took]
        s.known[slots] += 1
        return slots
