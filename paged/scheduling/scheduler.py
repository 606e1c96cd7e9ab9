"""Iteration-level scheduling: the sequences of each step, and their tokens (vLLM §4.3, §4.5).

First come, first served. Each step takes all running sequences that decode, then chunks of running
prompts under a token budget, then new requests while blocks and slots allow. A request whose
adapter is not on the device may be overtaken. When blocks run out, the latest arrivals are
preempted, with all sequences of their group. Preempted groups keep their place in the queue, and
are recomputed or swapped in. If a policy treats output unlike prompts, recomputed output is
replayed: decoded token by token.
"""

import bisect
import operator
from collections import deque

import numpy as np

from paged.adapters.store import AdapterStore
from paged.config import EngineConfig
from paged.kv_cache.host import HostPolicy
from paged.requests.sequence import Sequence, SequenceGroup, Status, share_prefixes
from paged.scheduling.admission import PrefillRoom, candidates
from paged.scheduling.children import Children, Released
from paged.scheduling.scheduled_step import ScheduledStep, by_adapter, rows_of
from paged.scheduling.slots import Slots

ARRIVAL = operator.attrgetter("order")


class Scheduler:
    """Decides steps: `schedule` adds a step's tokens to `Slots.computed`, and `update` records the
    sampled tokens a step later.

    gate: holds back requests whose adapter is not on the device (Punica §5.2); None: no adapters.
    """

    def __init__(self, config: EngineConfig, policy: HostPolicy, gate: AdapterStore | None = None):
        self.config, self.policy, self._can = config, policy, config.parts
        self.gate = gate or AdapterStore(0, 0)
        self.slots = Slots(config.max_num_seqs, config.max_model_len, self._can.replays)
        self.waiting: deque[SequenceGroup] = deque()  # by arrival order
        self.running: list[SequenceGroup] = []  # by arrival order
        # nobody_enters: a step with the same rows admits no waiting group; one with fewer rows,
        # only if lacked_room. Reset when memory is freed, when a waiting group is aborted, when a
        # prefill may have cached blocks or checkpoints, and by `add` (see there for exceptions).
        # lacked_room: the last step had no room for a prompt.
        self.nobody_enters = self.lacked_room = False
        self._head_lacks_memory = False
        self._running_slots: np.ndarray | None = None
        self._beams: list[SequenceGroup] = []  # running beam searches
        self._children = Children(self.slots)
        # Swapped groups until they complete, or until they are swapped in: see `admit_after_swap`.
        self.returning: set[SequenceGroup] = set()

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def running_slots(self) -> np.ndarray:
        """Slots of all running sequences in arrival order; cached until membership changes."""
        if self._running_slots is None:
            slots = [s.slot for g in self.running for s in g.sequences if s.slot >= 0]
            self._running_slots = np.array(slots, np.int64)
        return self._running_slots

    def add(self, group: SequenceGroup) -> None:
        # Behind a head without memory the group cannot enter, but its adapter may need a load.
        self.nobody_enters &= self._head_lacks_memory and not self.config.adapter_slots
        self.waiting.append(group)

    def abort(self, group: SequenceGroup, reason: str = "abort") -> None:
        """End a group that waits or runs."""
        if group in self.waiting:
            self.waiting.remove(group)
            self.nobody_enters = False
        for sequence in group.unfinished:
            self.finish(sequence, reason)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End one sequence. Its blocks are free at once. A step in flight may still write them, but
        the next owner writes later, because steps run in order."""
        if sequence.status is Status.RUNNING:
            self._free(sequence, Status.FINISHED)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        if sequence.group.finished:
            self._retire(sequence.group)

    def _retire(self, group: SequenceGroup) -> None:
        self._leave_device(group)
        self.returning.discard(group)
        if group.swapped is not None:
            self.policy.drop_swapped(group.swapped)
            group.swapped = None

    def _leave_device(self, group: SequenceGroup) -> None:
        if group in self.running:
            self.gate.leave(group)
        for groups in (self.running, self._beams):
            if group in groups:
                groups.remove(group)
        self._children.leave(group)

    def _free(self, sequence: Sequence, status: Status) -> None:
        self.policy.free(sequence.slot)
        self._release(sequence, status)

    def _release(self, sequence: Sequence, status: Status) -> None:
        self.slots.release(sequence, status)
        self._running_slots = None
        self.nobody_enters = False

    def _ready(self, slots: np.ndarray) -> np.ndarray:
        """The `slots` with a decode row in the next step. The row computes the newest token, or a
        token of replayed output. All beams of a group decode in the same step."""
        ready = slots[self.slots.generate(slots)]
        for group in self._beams:
            beams = [beam.slot for beam in group.sequences]
            if not np.isin(beams, ready).all():
                ready = ready[~np.isin(ready, beams)]
        return np.append(ready, slots[self.slots.replay(slots)]) if self.slots.replays else ready

    def decodes(self) -> np.ndarray | None:
        """Slots that decode in the next step, or None if there are no blocks for all of them."""
        ready = self._ready(self.running_slots())
        return ready if self.policy.can_append(ready, self.slots.computed[ready] + 1) else None

    def _iterations(self, decodes: np.ndarray) -> np.ndarray:
        """Tokens [n] that each of `decodes` [n] computes in a step without prefills.

        A row computes up to `multi_step` tokens. None computes more than its tokens left to
        replay, or, without these, more than those to the length limit. Beams compute 1 token, as
        do all rows if blocks do not suffice.
        """
        s = self.slots
        replayed = s.length[decodes] - s.computed[decodes] - 1
        left = np.where(replayed > 0, replayed, s.limit[decodes] - s.length[decodes])
        counts = np.minimum(self.config.multi_step, left)
        counts[s.beam[decodes]] = 1
        fits = self.policy.can_append(decodes, s.computed[decodes] + counts)
        return counts if fits else np.ones_like(counts)

    def _preempt_latest(self) -> SequenceGroup:
        """Preempt the latest arrival with all its sequences (vLLM §4.5)."""
        assert len(self.running) > 1, "one group alone must fit: checked when it was added"
        group = self.running[-1]
        sequences = [s for s in group.sequences if s.status is Status.RUNNING]
        slots = [sequence.slot for sequence in sequences]
        for sequence in sequences:
            sequence.computed = int(self.slots.computed[sequence.slot])
        # Even a host pool as large as the device's can be full: running groups grow into the memory
        # of swapped groups, and are then swapped out too.
        if self.swaps(len(slots)) and self.policy.can_swap_out(slots):
            group.swapped = self.policy.swap_out(slots)
            for sequence in sequences:
                self._release(sequence, Status.SWAPPED)
            self.returning.add(group)
        else:
            for sequence in sequences:
                self._free(sequence, Status.WAITING)
        self._leave_device(group)
        bisect.insort(self.waiting, group, key=ARRIVAL)
        group.num_preemptions += 1
        return group

    def swaps(self, num_sequences: int) -> bool:
        """Whether a preempted group should be swapped out instead of recomputed (vLLM §4.5).

        'auto' recomputes if the policy cannot swap. It also recomputes a single sequence if all its
        tokens would be prefilled, which takes at most 20 % longer than swapping (§7.3). Otherwise
        it swaps: groups of several sequences share less after recomputation.
        """
        if self.config.preemption_mode != "auto":
            return self.config.preemption_mode == "swap"
        return self._can.swap and (num_sequences > 1 or not self._can.recompute_exact)

    def _admit(self, group: SequenceGroup, room: PrefillRoom) -> bool:
        """Admit a waiting group; False if there is no room. Running beam searches keep slots
        reserved for beams that are not live yet."""
        reserved = sum(g.sampling.beam_width - len(g.sequences) for g in self._beams)
        wanted = max(len(group.unfinished), group.sampling.beam_width if group.search else 0)
        if wanted > self.slots.num_free - reserved or room.refused:
            return False
        enter = self._compute if group.swapped is None else self._swap_in
        group.adapter_slot = self.gate.adapter_slot_of(group)
        if not enter(group, room):
            return False
        self.gate.enter(group)
        self._children.add([s for s in group.unfinished if s.parent is not None])
        if group.search:
            self._beams.append(group)
        bisect.insort(self.running, group, key=ARRIVAL)
        self._running_slots = None
        return True

    def _compute(self, group: SequenceGroup, room: PrefillRoom) -> bool:
        """Admit a group that is new or preempted for recomputation; False without room."""
        sequences = group.unfinished
        if self._can.fork != "no":
            whole = self._can.fork == "computed"
            share_prefixes(sequences, self.config.page_size, whole, self.slots.replays)
        length = len(sequences[0].prefill_tokens(self.slots.replays))
        if not room.takes(length, self.policy.pinned(sequences[0])):
            return False
        # If no other group runs, no blocks are kept for growth.
        if not self.policy.can_admit(sequences, keep_watermark=bool(self.running)):
            return False
        for sequence in sequences:
            slot = self.slots.acquire(sequence)
            computed = self.slots.computed[slot] = self.policy.admit(slot, sequence)
            if sequence.parent is None:
                group.num_cached_tokens += computed
            elif self.slots.computed[sequence.parent.slot] >= sequence.shared:
                # The shared tokens are in the prefix cache.
                self.policy.computed(sequence.parent.slot, slot, sequence.shared)
                self._children.let_go(sequence)
        return True

    def _swap_in(self, group: SequenceGroup, room: PrefillRoom) -> bool:
        """Admit a swapped group with the tokens it had computed; False without room."""
        if not self.policy.can_swap_in(group.swapped, keep_watermark=bool(self.running)):
            return False
        sequences = group.unfinished
        slots = [self.slots.acquire(sequence) for sequence in sequences]
        self.slots.computed[slots] = [sequence.computed for sequence in sequences]
        self.policy.swap_in(group.swapped, sequences)
        group.swapped = None
        if self.config.admit_after_swap == "resumed":
            self.returning.discard(group)
        return True

    def _prefilling(self, slots: np.ndarray) -> np.ndarray:
        """The `slots` with more than one token to prefill."""
        return slots[(self.slots.prefill_left(slots) > 0) & ~self.slots.held[slots]]

    def _add_prefills(self, prefilling: np.ndarray, room: PrefillRoom) -> None:
        """Add the next chunk of each of the slots `prefilling`."""
        s = self.slots
        for slot in prefilling.tolist():
            start = int(s.computed[slot])
            left = int(min(s.length[slot], s.prefill[slot])) - start
            # A decode row computes the last token, so that all beams sample in the same step.
            if s.beam[slot] and len(s.sequence_in(slot).group.sequences) > 1 and not s.replays:
                left -= 1
            stop = self._can.pinned_tokens(left + start) if s.sequence_in(slot).group.pin else 0
            room.add(slot, left, self._children.forks_of([slot]), start, stop)

    def schedule(self, number: int, decodes: np.ndarray | None = None) -> ScheduledStep | None:
        """Step `number`, or None if there is nothing to compute now.

        decodes: the result of the method `decodes`, if the caller has just computed it.
        """
        s = self.slots
        preempted = []
        while decodes is None and (decodes := self.decodes()) is None:
            preempted.append(self._preempt_latest())
        self.policy.append(decodes, s.computed[decodes] + 1)

        budget = self.config.max_num_batched_tokens - len(decodes)
        budget -= self._children.forks_of(decodes)
        prefilling = self._prefilling(self.running_slots())
        begun = s.computed[prefilling] > 0
        room = PrefillRoom(self.config, budget, in_chunks=bool(begun.any()))
        self._add_prefills(prefilling, room)

        admitted, refused = list[SequenceGroup](), None
        # A step that preempts admits no group, which would take the blocks just freed.
        closed = bool(preempted) or (self._can.static_batching and bool(self.running))
        most = self.config.max_overtakes
        for group in candidates(() if closed else self.waiting, self.gate, self.returning, most):
            if not self._admit(group, room):
                refused = group
                break
            admitted.append(group)
            decodes = np.append(decodes, self._start(group, room))
        for group in admitted:
            self.waiting.remove(group)
        self.lacked_room = room.refused
        head = self.waiting[0] if self.waiting else None
        self._head_lacks_memory = refused is not None and refused is head and not room.refused
        self.nobody_enters = not preempted and (not admitted or self._head_lacks_memory)

        if not room.rows and not len(decodes):
            assert not preempted, "preempted everything"
            return None
        return self._commit(number, room.rows, decodes, preempted, admitted)

    def _start(self, group: SequenceGroup, room: PrefillRoom) -> np.ndarray:
        """Add prefill rows of a group just admitted. Returns its slots that decode in this step."""
        s = self.slots
        slots = np.array([sequence.slot for sequence in group.unfinished], np.int64)
        self._add_prefills(self._prefilling(slots), room)
        ready = self._ready(slots)
        rows = len(ready) + self._children.forks_of(ready)
        if rows > room.budget:
            return ready[:0]
        room.budget -= rows
        self.policy.append(ready, s.computed[ready] + 1)
        return ready

    def _commit(
        self, number: int, prefills: list[tuple[int, int]], decodes: np.ndarray,
        preempted: list[SequenceGroup], admitted: list[SequenceGroup],
    ) -> ScheduledStep:  # fmt: skip
        s, released = self.slots, Released()
        if self.config.adapter_slots:
            decodes = by_adapter(prefills, decodes, s.adapter, self.config.adapter_slots)
        if self._children:
            released = self._children.release([*prefills, *((int(slot), 1) for slot in decodes)])
        iterations = np.ones(len(decodes), np.int64)
        # A released child shares only the tokens that its parent has computed after one iteration.
        if self.config.multi_step > 1 and not prefills and not released.shares:
            iterations = self._iterations(decodes)
            self.policy.append(decodes, s.computed[decodes] + iterations)

        slots, counts, most = rows_of(prefills, decodes, iterations, released.forks)
        starts, length = s.computed[slots], s.length[slots]
        ends = starts + counts
        samples = ends >= length
        yields = samples * most
        if self._beams:
            yields[s.beam[slots]] = 0
        s.computed[slots] = ends
        s.length[slots] = length + yields
        self.policy.advance(number, slots, starts, ends)
        if prefills and self.config.prefix_caching:
            self.nobody_enters = False  # A waiting prompt may use a new checkpoint.
        for parent, child, shared in released.shares:
            self.policy.computed(parent, child, shared)
        return ScheduledStep(
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            yields=yields,
            generations=s.generation[slots],
            num_prefills=len(prefills),
            sources=np.array(released.sources, np.int64),
            moves=self.policy.take_moves(),
            has_beams=bool(self._beams) and bool(s.beam[slots].any()),
            preempted=preempted,
            admitted=admitted,
        )

    def update(
        self, step: ScheduledStep, iteration: int, sampled: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Record the tokens that an iteration of a step sampled, `sampled` [n] by row.

        Returns the rows that yield a token in this iteration, and these tokens. Rows of sequences
        that have since ended or been preempted are left out. A negative token (`INVALID_TOKEN`) is
        returned but not recorded.
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
        self._confirm(good)
        if step.num_prefills and self.config.prefix_caching:
            self.nobody_enters = False  # A waiting prompt may share the new blocks.
        return rows, tokens

    def advance_beams(self, group: SequenceGroup, moves: list[tuple[int, int]]) -> None:
        """Replace a group's beams by `moves`: (parent, token), where parent indexes the group's
        sequences. All tokens of the beams are known. Blocks of dropped beams are free at once (vLLM
        §4.4)."""
        s, live = self.slots, group.sequences
        kept = {parent for parent, _ in moves}
        for i, sequence in enumerate(live):
            if i not in kept:
                self._free(sequence, Status.FINISHED)
        beams: list[Sequence] = []
        for parent, _ in moves:
            beam = live[parent]
            if beam in beams:
                beam = Sequence(group, s.known_tokens(beam.slot), beam.seed)
                slot = s.acquire(beam)
                self.policy.fork(live[parent].slot, slot)
                s.computed[slot] = s.computed[live[parent].slot]
            beams.append(beam)
        slots = np.array([beam.slot for beam in beams])
        s.tokens[slots, s.known[slots]] = [token for _, token in moves]
        s.known[slots] += 1
        s.length[slots] += 1
        group.sequences = beams
        self._running_slots = None
        self._confirm(slots)

    def _confirm(self, slots: np.ndarray) -> None:
        """Let the prefix cache publish the known and computed tokens of `slots`."""
        if self.config.prefix_caching:
            s = self.slots
            self.policy.confirm(slots, np.minimum(s.known[slots], s.computed[slots]), s.tokens)
