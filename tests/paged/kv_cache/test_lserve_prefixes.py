"""LServe's prefix cache, host half: a query reads the keys and values of its own sequence."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paged.engine import EngineConfig
from paged.kv_cache.lserve.host import LServeHost
from paged.kv_cache.policy import ShardedModel
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import Sequence, SequenceGroup
from tests.paged.tiny import TINY

PAGE = 2
BASE: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_prefills_per_step": 3,
    "max_model_len": 32, "page_size": PAGE, "kv_cache_tokens": 150, "watermark": 0.0,
    "policy": "lserve", "prefix_caching": True,
}  # fmt: skip
STREAMS = {"gates": ((0.1, 0.9), (0.8, 0.7)), "streaming_share": 0.5, "sink": 2, "local": 4}
SELECTS = {"budget": 6, "reuse": 2, "logical_page": 2}
KINDS: dict[str, dict[str, Any]] = {
    "lserve": STREAMS | SELECTS | {"checkpoints": 2},
    "no quota": STREAMS | SELECTS | {"checkpoints": 0},
    "duo_attention": STREAMS | SELECTS | {"budget": 32},
    "quest": SELECTS | {"sink": 2, "local": 4},
    "minference": STREAMS | SELECTS
    | {"minference_from": 14, "minference_budget": 6, "minference_tile": 4},
}  # fmt: skip
TRUNKS = [(0,) * 12, (0,) * 6 + (1,) * 6, (1, 0) * 7]


@dataclass(eq=False)
class Running:
    """A sequence in a slot.

    contents: for each computed token, a hash of the tokens that it was computed from.
    """

    sequence: Sequence
    tokens: list[int]
    contents: list[int]

    @property
    def prompt(self) -> int:
        return self.sequence.num_prompt_tokens

    @property
    def generates(self) -> bool:
        return self.prompt < len(self.tokens) == len(self.contents) + 1


class HostBesideMemory(RuleBasedStateMachine):
    """Memory holds, for each token of a unit, a hash of the token and all tokens before it. A token
    that was computed from only some of these tokens gets a unique hash, which differs even from the
    hash of the same token in an equal sequence."""

    kind = "lserve"

    def __init__(self):
        super().__init__()
        kind = self.kind
        self.config = EngineConfig(**BASE, policy_options=KINDS[kind])
        self.host = LServeHost(self.config, ShardedModel.split(TINY))
        self.memory: dict[str, np.ndarray] = {}
        for pool in self.host.pools:
            self.memory[pool.name] = np.zeros((pool.num_units, PAGE), np.int64)
            self.memory[f"host {pool.name}"] = np.zeros((pool.num_host_units, PAGE), np.int64)
        self.running: dict[int, Running] = {}
        self.swapped: list[tuple[Any, Running]] = []
        self.numbers, self.unlike = itertools.count(1), itertools.count(1)
        self.past = [*map(list, TRUNKS)]

    # Rules

    @rule(
        data=st.data(), shared=st.integers(0, 20), more=st.integers(1, 12),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    )  # fmt: skip
    def admit(self, data, shared, more, own):
        """Admit a prompt that begins like an earlier sequence, or goes on from its output."""
        tokens = [*data.draw(st.sampled_from(self.past))[:shared], *own]
        limit = len(tokens) + more
        free = [slot for slot in range(self.config.max_num_seqs) if slot not in self.running]
        group = SequenceGroup("", 0, np.array(tokens, np.int32), SamplingParams(), 0, limit)
        (sequence,) = group.sequences
        if not free or limit > self.config.max_model_len or not self.host.fits(limit, 1):
            return
        if not self.host.can_admit([sequence], keep_watermark=False):
            assert self.running, "a sequence that fits is refused though nothing runs"
            return
        self._admit(free[0], sequence, tokens)

    def _admit(self, slot: int, sequence: Sequence, tokens: list[int]) -> None:
        sequence.slot = slot
        computed = self.host.admit(slot, sequence)
        assert computed < len(tokens)
        running = self.running[slot] = Running(sequence, [*tokens], [])
        for _ in range(computed):
            self._compute(running)
        self._move()  # a step follows before any sequence leaves

    def _compute(self, running: Running) -> None:
        """Compute one more token, from all tokens before it or, in sparse attention, from some."""
        position, before = len(running.contents), (*running.contents[-1:],)
        options = self.config.policy_options
        sparse_prompt = bool(options.minference_from) and running.prompt >= options.minference_from
        all_read = position // PAGE < self.host.layout.all_below
        exact = not sparse_prompt and (position < running.prompt or all_read)
        like = 0 if exact else next(self.unlike)
        running.contents.append(hash((before, running.tokens[position], like)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), times=st.integers(1, 6))
    def steps(self, data, times):
        for _ in range(times):
            if self.running:
                self._step(data)

    def _step(self, data) -> None:
        """Run chunks of some prompts, and one token of some sequences that generate."""
        room, prefills, starts, ends = self.config.max_num_batched_tokens, 0, [], []
        slots = data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, unique=True))
        chosen = []
        for slot in slots:
            running = self.running[slot]
            start, prompt = len(running.contents), running.prompt
            most = 1 if start >= prompt else min(prompt - start, room)
            if room < 1 or (most > 1 and prefills == self.config.max_prefills_per_step):
                continue
            count = data.draw(st.integers(1, most))
            if start >= prompt:
                end = np.array([start + 1])
                if not self.host.can_append(np.array([slot]), end):
                    continue
                self.host.append(np.array([slot]), end)
            room, prefills = room - count, prefills + (count > 1)
            chosen.append(slot)
            starts.append(start)
            ends.append(start + count)
        self._run(np.array(chosen, np.int64), np.array(starts), np.array(ends))
        for slot in chosen:
            if len(self.running[slot].contents) == len(self.running[slot].tokens):
                self._sample(slot, data.draw(st.integers(0, 1)))

    def _run(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self.host.advance(next(self.numbers), slots, starts, ends)
        self._move()
        tables = np.zeros((len(slots), self.host.table_width), np.int32)
        self.host.tables(slots, tables)
        written = set()
        for slot, table, start, end in zip(slots.tolist(), tables, starts, ends):
            for position in range(start, end):
                self._compute(self.running[slot])
                for place in self._places(table, position):
                    assert place not in written, "two tokens of a step share a place"
                    written.add(place)
                    pool, block, offset = place
                    self.memory[pool][block, offset] = self.running[slot].contents[position]
        for slot, table, start, end in zip(slots.tolist(), tables, starts, ends):
            for query in range(start, end):
                self._check_reads(table, query, self.running[slot].contents)

    def _places(
        self, table: np.ndarray, position: int, in_window: bool = True
    ) -> list[tuple[str, int, int]]:
        """The places (pool, block, offset) of a token."""
        (page, offset), layout = divmod(position, PAGE), self.host.layout
        columns = {"dense": page}
        if layout.streams and in_window:
            columns["streaming"] = layout.max_pages + int(layout.column(page))
        places = [(pool, int(table[column]), offset) for pool, column in columns.items()]
        assert all(block != 0 for _, block, _ in places), "the null block is used"
        return places

    def _check_reads(self, table: np.ndarray, query: int, contents: list[int]) -> None:
        layout = self.host.layout
        for position in range(query + 1):
            page = position // PAGE
            in_window = page < layout.sink or page >= query // PAGE - layout.local
            for pool, block, offset in self._places(table, position, in_window):
                found = self.memory[pool][block, offset]
                assert found == contents[position], f"{pool}: another token's keys and values"

    def _sample(self, slot: int, token: int) -> None:
        running = self.running[slot]
        running.tokens.append(token)
        if len(running.tokens) >= running.sequence.group.limit:
            self._confirm(slot)
            self.free(slot)
        else:
            self._confirm(slot)

    def _confirm(self, slot: int) -> None:
        known = np.zeros((self.config.max_num_seqs, self.config.max_model_len + 1), np.int32)
        running = self.running[slot]
        known[slot, : len(running.tokens)] = running.tokens
        self.host.confirm(np.array([slot]), np.array([len(running.contents)]), known)

    def free(self, slot: int) -> None:
        self.past.append(self.running.pop(slot).tokens)
        self.host.free(slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data):
        self.free(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.running)))
        free = [slot for slot in range(self.config.max_num_seqs) if slot not in self.running]
        of = self.running[parent]
        if not free or not of.generates:
            return
        self.host.fork(parent, free[0])
        self.running[free[0]] = Running(of.sequence, [*of.tokens], [*of.contents])
        every = np.array(sorted(self.running))
        ends = np.array([len(self.running[slot].contents) + 1 for slot in every.tolist()])
        if not self.host.can_append(every, ends):
            self.free(free[0])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        if self.host.can_swap_out([slot]):
            swapped, running = self.host.swap_out([slot]), self.running.pop(slot)
            running.sequence.computed = len(running.contents)
            self.swapped.append((swapped, running))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), drop=st.booleans())
    def swap_in(self, data, drop):
        at = data.draw(st.integers(0, len(self.swapped) - 1))
        swapped, running = self.swapped[at]
        free = [slot for slot in range(self.config.max_num_seqs) if slot not in self.running]
        if drop:
            self.host.drop_swapped(swapped)
        elif free and self.host.can_swap_in(swapped, keep_watermark=False):
            running.sequence.slot = free[0]
            self.host.swap_in(swapped, [running.sequence])
            self.running[free[0]] = running
        else:
            return
        del self.swapped[at]
        self._move()

    @precondition(lambda self: not self.running and not self.swapped)
    @rule(trunk=st.sampled_from(TRUNKS), length=st.integers(1, 12))
    def pin(self, trunk, length):
        tokens = [*trunk[:length]]
        group = SequenceGroup("", 0, np.array(tokens, np.int32), SamplingParams(), 0, length + 1)
        (sequence,) = group.sequences
        # A pin must leave a window for other sequences.
        if not self.host.fits(2 * self.config.max_model_len, 2):
            return
        self._admit(0, sequence, tokens)
        start, most = len(self.running[0].contents), self.config.max_num_batched_tokens
        for at in range(start, length, most):
            self._run(np.array([0]), np.array([at]), np.array([min(length, at + most)]))
        self.running[0].tokens.append(0)
        self._confirm(0)
        self.host.pin(0, np.array(tokens, np.int32), group.cache_root)
        self.free(0)

    def _move(self) -> None:
        moves = self.host.take_moves()
        for verb, source, destination in (
            ("exports", "", "host "), ("imports", "host ", ""), ("copies", "", ""),
        ):  # fmt: skip
            for pool, pairs in getattr(moves, verb).items():
                of, to = np.array(list(pairs), np.int64).reshape(-1, 2).T
                assert len(np.unique(to)) == len(to), "two units are moved to one place"
                self.memory[destination + pool][to] = self.memory[source + pool][of]

    # Invariants

    @invariant()
    def books_are_right(self):
        self.host.check()

    def teardown(self):
        for slot in [*self.running]:
            self.free(slot)
        for swapped, _ in self.swapped:
            self.host.drop_swapped(swapped)
        self.host.check()
        assert self.host.dense.prefixes is not None
        pinned = {"dense": self.host.dense.prefixes.num_pinned}
        if self.host.streaming:
            pinned["streaming"] = self.host.streaming.checkpoints.num_pinned
        for name, units in self.host.used_units().items():
            assert len(units) == pinned.get(name, 0), f"{name}: units of nobody"


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_reads_what_its_own_sequence_has_written(kind):
    machine = type("OfKind", (HostBesideMemory,), {"kind": kind})
    run = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
    run_state_machine_as_test(machine, settings=run)
