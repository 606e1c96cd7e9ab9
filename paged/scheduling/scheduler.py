"""Iteration-level scheduling: who runs next, and with how many tokens (vLLM §4.3, §4.5).

First come, first served. Each step takes all running sequences that generate, then chunks of
prompts under a token budget, then new requests while blocks and slots allow. When blocks run out
the latest arrivals are preempted, with all sequences of their group; they keep their place in the
order, and are recomputed or swapped in again.
"""

from collections import deque

import numpy as np

from paged.config import EngineConfig
from paged.kv_cache.policy import HostPolicy
from paged.requests.sequence import Sequence, SequenceGroup, Status, share_prefixes
from paged.scheduling.scheduled_step import BlockMoves, ScheduledStep
from paged.scheduling.slots import Slots


class _PrefillRoom:
    """The prefill rows of one step, under the limits of tokens and of rows.

    refused: whether a sequence that runs found no room: then nobody new may enter.
    """

    def __init__(self, config: EngineConfig, budget: int):
        self._config, self.budget = config, budget
        self.rows: list[tuple[int, int]] = []
        self.refused = False

    @property
    def full(self) -> bool:
        return self.budget == 0 or len(self.rows) == self._config.max_prefills_per_step

    def takes(self, left: int) -> bool:
        return not self.full and (self._config.chunked_prefill or left <= self.budget)

    def add(self, slot: int, left: int, forks: int = 0) -> None:
        """As many of the `left` tokens as fit; none if the sequence must go whole and cannot. With
        the last of them come `forks` rows of one token: it waits a step if these do not fit."""
        if not self.takes(left):
            self.refused = True
            return
        count = min(left, self.budget)
        if count == left and count + forks > self.budget:
            count = left - 1
        self.rows.append((slot, count))
        self.budget -= count + (forks if count == left else 0)


class Scheduler:
    """`schedule` decides a step and counts it as done; `update` brings its tokens, a step later."""

    def __init__(self, config: EngineConfig, policy: HostPolicy):
        self.config, self.policy, self._can = config, policy, config.capabilities
        self.slots = Slots(config.max_num_seqs, config.max_model_len)
        self.waiting: deque[SequenceGroup] = deque()  # by arrival order
        self.running: list[SequenceGroup] = []  # by arrival order, all before those that wait
        self._running_slots: np.ndarray | None = None
        self._beams: list[SequenceGroup] = []  # searches that run
        self._followers: list[Sequence] = []  # running, held until their donors are computed
        # Swapped groups that have not completed, or not even come back: see `admit_after_swap`.
        self._returning: set[SequenceGroup] = set()

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
        for sequence in group.unfinished:
            self.finish(sequence, "abort")

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End one sequence; its blocks are free at once. A step in flight may still write them,
        but steps run in order, so it does so before their next owner."""
        if sequence.status is Status.RUNNING:
            self._release(sequence, Status.FINISHED)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        if sequence.group.finished:
            self._retire(sequence.group)

    def _retire(self, group: SequenceGroup) -> None:
        self._leave_device(group)
        self._returning.discard(group)
        if group.swapped is not None:
            self.policy.drop_swapped(group.swapped)
            group.swapped = None

    def _leave_device(self, group: SequenceGroup) -> None:
        for groups in (self.running, self._beams):
            if group in groups:
                groups.remove(group)
        if self._followers:
            self._followers = [s for s in self._followers if s.group is not group]

    def _release(self, sequence: Sequence, status: Status) -> None:
        self.policy.free(sequence.slot)
        self.slots.release(sequence, status)
        self._running_slots = None

    def _ready(self, slots: np.ndarray) -> np.ndarray:
        """Those of running `slots` that compute one token in the next step: their newest, and then
        sample."""
        s, length = self.slots, self.slots.length[slots]
        ready = slots[
            (length - s.computed[slots] == 1) & (length < s.limit[slots]) & ~s.held[slots]
        ]
        for group in self._beams:
            beams = [beam.slot for beam in group.sequences]
            if not np.isin(beams, ready).all():
                ready = ready[~np.isin(ready, beams)]
        return ready

    def decodes(self) -> np.ndarray | None:
        """Slots that generate in the next step, or None if there are no blocks for all of them."""
        ready = self._ready(self.running_slots())
        return ready if self.policy.can_append(ready, self.slots.length[ready]) else None

    def _iterations(self, decodes: np.ndarray) -> np.ndarray:
        """Tokens that each of `decodes` [n] computes in a step of decodes alone: `multi_step`, or
        what its limit leaves; one if there are no blocks for more."""
        s = self.slots
        counts = np.minimum(self.config.multi_step, s.limit[decodes] - s.length[decodes])
        counts[s.beam[decodes]] = 1
        if self.policy.can_append(decodes, s.length[decodes] + counts - 1):
            return counts
        return np.ones_like(counts)

    def _preempt_latest(self, moves: BlockMoves) -> SequenceGroup:
        """Take all sequences of the latest arrival off the device (vLLM §4.5)."""
        assert len(self.running) > 1, "one group alone must fit: checked when it was added"
        group = self.running[-1]
        sequences = [s for s in group.sequences if s.status is Status.RUNNING]
        slots = [sequence.slot for sequence in sequences]
        status = Status.WAITING
        # A host pool as large as the device's can be full: groups grow before they are swapped out.
        if self._swaps(len(slots)) and self.policy.can_swap_out(slots):
            group.swapped, swaps_out = self.policy.swap_out(slots)
            moves.swaps_out += swaps_out
            status = Status.SWAPPED
            self._returning.add(group)
        assert status is Status.SWAPPED or self._can.recompute_exact, "tokens would change"
        for sequence in sequences:
            sequence.computed = int(self.slots.computed[sequence.slot])
            self._release(sequence, status)
        self._leave_device(group)
        self.waiting.appendleft(group)
        group.num_preemptions += 1
        return group

    def _swaps(self, num_sequences: int) -> bool:
        """Whether a group of so many sequences is swapped out, not recomputed: recomputation shares
        less, and is no worse for one sequence (§7.3)."""
        mode = self.config.preemption_mode
        return mode == "swap" or (mode == "auto" and num_sequences > 1 and self._can.swap)

    def _may_enter(self, group: SequenceGroup, room: _PrefillRoom) -> bool:
        """Whether there are slots, and nobody else's turn; beams keep theirs while few are live."""
        if self._returning and group.num_preemptions == 0:
            return False
        reserved = sum(g.sampling.beam_width - len(g.sequences) for g in self._beams)
        beams = group.sampling.beam_width if group.search else 0
        wanted = max(len(group.unfinished), beams)
        return wanted <= self.slots.num_free - reserved and not room.refused

    def _admit(self, room: _PrefillRoom, moves: BlockMoves) -> SequenceGroup | None:
        """Move the head of the queue to the device if its blocks and slots are there."""
        group = self.waiting[0]
        if not self._may_enter(group, room):
            return None
        enter = self._compute if group.swapped is None else self._swap_in
        if not enter(group, room, moves):
            return None
        self._followers += [s for s in group.unfinished if s.donor is not None]
        if group.search:
            self._beams.append(group)
        self.running.append(self.waiting.popleft())
        self._running_slots = None
        return group

    def _compute(self, group: SequenceGroup, room: _PrefillRoom, moves: BlockMoves) -> bool:
        """Admit a group that is new, or was preempted and not swapped out; False without room."""
        sequences = group.unfinished
        if self._can.fork:
            share_prefixes(sequences, self.config.page_size)
        if not room.takes(len(sequences[0].tokens)):
            return False
        # With nothing else running there is no growth to keep blocks for.
        if not self.policy.can_admit(sequences, keep_watermark=bool(self.running)):
            return False
        for sequence in sequences:
            slot = self.slots.acquire(sequence)
            computed, copies = self.policy.admit(slot, sequence)
            self.slots.computed[slot] = computed
            moves.copies += copies
            if sequence.donor is None:
                group.num_cached_tokens += computed
            elif self.slots.computed[sequence.donor.slot] >= sequence.shared:
                self._let_go(sequence)  # what they share is in the prefix cache
        return True

    def _swap_in(self, group: SequenceGroup, room: _PrefillRoom, moves: BlockMoves) -> bool:
        """Admit a group that was swapped out, as it was; False without room."""
        if not self.policy.can_swap_in(group.swapped, keep_watermark=bool(self.running)):
            return False
        sequences = group.unfinished
        slots = [self.slots.acquire(sequence) for sequence in sequences]
        self.slots.computed[slots] = [sequence.computed for sequence in sequences]
        moves.swaps_in += self.policy.swap_in(group.swapped, sequences)
        group.swapped = None
        if self.config.admit_after_swap == "resumed":
            self._returning.discard(group)
        return True

    def _forks_of(self, donor: Sequence, followers: list[Sequence]) -> int:
        """How many of `followers` sample where `donor` samples first."""
        same = (f.donor is donor and f.shared == len(f.tokens) for f in followers)
        return sum(same)

    def _add_prefill(self, slot: int, room: _PrefillRoom) -> None:
        """The next chunk of a sequence of which more than its newest token is to be computed."""
        s, sequence = self.slots, self.slots.owner[slot]
        assert sequence is not None
        if s.held[slot]:
            return
        left = int(s.length[slot] - s.computed[slot])
        # Beams sample in the same step.
        if s.beam[slot] and len(sequence.group.sequences) > 1:
            left -= 1
        room.add(slot, left, self._forks_of(sequence, self._followers))

    def schedule(self, decodes: np.ndarray | None = None) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute now. decodes: what `decodes` has
        just said, if it was asked."""
        s, moves = self.slots, BlockMoves()
        preempted = []
        while decodes is None and (decodes := self.decodes()) is None:
            preempted.append(self._preempt_latest(moves))
        moves.copies += self.policy.append(decodes, s.length[decodes])

        budget = self.config.max_num_batched_tokens - len(decodes)
        if self._followers:
            budget -= sum(self._forks_of(s.owner[slot], self._followers) for slot in decodes)
        room = _PrefillRoom(self.config, budget)
        running = self.running_slots()
        for slot in running[s.length[running] - s.computed[running] > 1].tolist():
            self._add_prefill(slot, room)

        admitted: list[SequenceGroup] = []
        # Requests wait in a step that preempts, or they would take what was just set free.
        closed = bool(preempted) or (self._can.static_batching and bool(self.running))
        while self.waiting and not closed and (group := self._admit(room, moves)):
            admitted.append(group)
            decodes = np.append(decodes, self._start(group, room, moves))

        if not room.rows and not len(decodes):
            assert not preempted, "preempted everything"
            return None
        forks, sources = self._forks(room.rows, decodes)
        iterations = np.ones(len(decodes), np.int64)
        if self.config.multi_step > 1 and not room.rows and not forks:
            iterations = self._iterations(decodes)
            moves.copies += self.policy.append(decodes, s.length[decodes] + iterations - 1)
        return self._commit(
            room.rows, decodes, forks, iterations, sources=np.array(sources, np.int64),
            preempted=preempted, admitted=admitted, **vars(moves),
        )  # fmt: skip

    def _start(self, group: SequenceGroup, room: _PrefillRoom, moves: BlockMoves) -> np.ndarray:
        """Prefill rows of a group that has just been admitted; its slots that decode at once."""
        s = self.slots
        slots = np.array([sequence.slot for sequence in group.unfinished], np.int64)
        for slot in slots[s.length[slots] - s.computed[slots] > 1].tolist():
            self._add_prefill(slot, room)
        ready = self._ready(slots)
        rows = len(ready) + sum(self._forks_of(s.owner[slot], self._followers) for slot in ready)
        if rows > room.budget:
            return ready[:0]
        room.budget -= rows
        moves.copies += self.policy.append(ready, s.length[ready])
        return ready

    def _forks(self, prefills, decodes) -> tuple[list[int], list[int]]:
        """Let followers go on whose donors are computed after this step: (slots, source rows) of
        those that sample in it."""
        forks: list[int] = []
        sources: list[int] = []
        if self._followers:
            chunks = [*prefills, *((int(slot), 1) for slot in decodes)]
            row_of = {slot: row for row, (slot, _) in enumerate(chunks)}
            waiting = []
            for follower in self._followers:
                assert follower.donor is not None
                donor = follower.donor.slot
                row = row_of.get(donor, -1)
                count = chunks[row][1] if row >= 0 else 0
                if self.slots.computed[donor] + count < follower.shared:
                    waiting.append(follower)
                    continue
                if follower.shared == self.slots.length[follower.slot]:
                    assert row >= 0, "the donor has sampled without its follower"
                    forks.append(follower.slot)
                    sources.append(row)
                self._let_go(follower)
            self._followers = waiting
        return forks, sources

    def _let_go(self, follower: Sequence) -> None:
        """What it shares with its donor is computed, or will be in this step."""
        follower.donor, self.slots.held[follower.slot] = None, False

    def _commit(self, prefills, decodes, forks, iterations, **rest) -> ScheduledStep:
        s, slots, counts, most = self.slots, decodes, iterations, iterations
        if prefills or forks:
            chunks = np.array(prefills, np.int64).reshape(-1, 2)
            slots = np.concatenate([chunks[:, 0], decodes, np.array(forks, np.int64)])
            counts = np.concatenate([chunks[:, 1], iterations, np.zeros(len(forks), np.int64)])
            most = np.maximum(counts, 1)
            most[: len(chunks)] = 1
        starts, length = s.computed[slots], s.length[slots]
        ends = starts + counts
        samples = ends >= length
        yields = samples * most
        if self._beams:
            yields[s.beam[slots]] = 0
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
            has_beams=bool(self._beams) and bool(s.beam[slots].any()),
            **rest,
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

    def advance_beams(self, group: SequenceGroup, moves: list[tuple[int, int]]) -> None:
        """Go on with beams (parent, token), parents by their place among the group's sequences, all
        of whose tokens are known. Dropped beams' blocks are free at once (vLLM §4.4)."""
        s, live = self.slots, group.sequences
        kept = {parent for parent, _ in moves}
        for i, sequence in enumerate(live):
            if i not in kept:
                self._release(sequence, Status.FINISHED)
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
        if self.config.prefix_caching:
            self.policy.confirm(slots, np.minimum(s.known[slots], s.computed[slots]), s.tokens)
