"""Prefix caching beside a naive twin, and the tokens and memory that it saves."""

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged.blocks.block_pool import BlockPool
from paged.blocks.prefix_cache import PrefixCache, chain, root_key
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from tests.paged.hashing_executor import HashingExecutor, generate
from tests.paged.tiny import TINY, drained

PAGE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(lambda x: np.array(x, np.int32))


class CacheBesideTwin(RuleBasedStateMachine):
    """The twin finds a prefix by comparing it with every published prefix.

    prefixes: the salt and the whole prefix that each published block ends.
    owned: the blocks of each sequence.
    idle: published blocks without an owner, in the order in which their last owner left them.
    """

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache()
        self.pool = BlockPool(9, self.cache)
        self.prefixes: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.owned: list[list[int]] = []
        self.idle: list[int] = []

    def find(self, tokens, salt):
        blocks = []
        for end in range(PAGE, len(tokens) + 1, PAGE):
            wanted = salt, tuple(tokens[:end].tolist())
            found = [b for b, prefix in self.prefixes.items() if prefix == wanted]
            if not found:
                break
            blocks += found
        return blocks

    @rule(tokens=TOKENS, salt=st.sampled_from("ab"))
    def admit(self, tokens, salt):
        cached, _ = self.cache.find(chain(tokens, PAGE, root_key(salt)))
        assert cached == self.find(tokens, salt)
        need = -(-len(tokens) // PAGE)
        if need - sum(self.pool.refcounts[b] > 0 for b in cached) > self.pool.num_free:
            return
        self.pool.share(np.array(cached, np.int32))
        self.idle = [b for b in self.idle if b not in cached]
        spare = 8 - len({b for owned in [*self.owned, cached] for b in owned}) - len(self.idle)
        for _ in range(need - len(cached) - spare):
            del self.prefixes[self.idle.pop(0)]
        blocks = cached + self.pool.allocate(need - len(cached)).tolist()
        self.owned.append(blocks)
        entries = chain(tokens, PAGE, root_key(salt))
        for i, (key, content) in enumerate(entries):
            prefix = salt, tuple(tokens[: (i + 1) * PAGE].tolist())
            if prefix not in self.prefixes.values():
                self.prefixes[blocks[i]] = prefix
            if i >= len(cached):
                self.cache.publish(blocks[i], key, content)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        blocks = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.release(np.array(blocks, np.int32))
        left = {b for owned in self.owned for b in owned}
        self.idle += [b for b in reversed(blocks) if b not in left and b in self.prefixes]

    @invariant()
    def the_same_blocks_are_idle_in_the_same_order(self):
        assert list(self.cache.idle) == self.idle

    @invariant()
    def refcounts_are_owners(self):
        counts = np.zeros(9, int)
        for blocks in self.owned:
            counts[blocks] += 1
        assert (self.pool.refcounts == counts).all()


CacheBesideTwin.TestCase.settings = settings(max_examples=80, deadline=None)
test_cache_beside_twin = CacheBesideTwin.TestCase


def _engine(**changes) -> Engine:
    options = {
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96, "page_size": 4,
        "kv_cache_tokens": 400, "prefix_caching": True,
    } | changes  # fmt: skip
    config = EngineConfig(**options)
    return Engine(TINY, config, HashingExecutor(config))


HOW = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
PREFIX = [3 + i % 50 for i in range(41)]


def _saved(engine: Engine) -> list[int]:
    return [r.cached_tokens for r in engine.metrics.requests]


@pytest.mark.parametrize("state", ["cold", "cached", "pinned", "evicted"])
def test_tokens_are_the_same_whatever_is_cached(state):
    engine = _engine()
    if state == "cached":
        engine.generate([[*PREFIX, 9]], HOW)
    elif state == "pinned":
        assert engine.pin_prefix(PREFIX) == 41
    elif state == "evicted":
        engine.generate([PREFIX], HOW)
    if state in ("pinned", "evicted"):
        engine.generate([[7 + i] * 80 for i in range(12)], HOW)
    output = engine.generate([[*PREFIX, 5, 6]], HOW)[0]
    assert output.tokens == generate([*PREFIX, 5, 6], 0, 49, 0.0, True)
    assert _saved(engine)[-1] == {"cold": 0, "cached": 40, "pinned": 41, "evicted": 0}[state]


def test_generated_tokens_are_cached_once_confirmed():
    engine = _engine()
    first = engine.generate([[5] * 10], SamplingParams(max_tokens=20, seed=0, ignore_eos=True))[0]
    engine.generate([[5] * 10 + first.tokens + [8]], HOW)
    # 29 of the 30 tokens were written: the last one was never an input.
    assert _saved(engine) == [0, 28]


def test_a_prompt_with_log_probabilities_is_computed_in_full_and_cached_for_others():
    engine = _engine()
    asked = dataclasses.replace(HOW, prompt_logprobs=0)
    for how in (HOW, asked, HOW):
        engine.generate([PREFIX], how)
    assert _saved(engine) == [0, 0, 40]
    fresh = _engine()
    for how in (asked, HOW):
        fresh.generate([PREFIX], how)
    assert _saved(fresh) == [0, 40]


def test_prefixes_are_shared_among_equal_salts_only():
    engine = _engine()
    for salt in ("a", "b", "a"):
        engine.add_request(PREFIX, HOW, cache_salt=salt)
        drained(engine)
    assert _saved(engine) == [0, 0, 40]


def test_a_shared_block_takes_memory_once():
    engine = _engine()
    engine.pin_prefix(PREFIX)
    engine.generate([[*PREFIX, 5 + i] for i in range(4)], HOW)
    assert max(s.num_running for s in engine.metrics.steps) == 4
    # Eleven blocks of the prefix, and two more for each of the four requests.
    most = max(s.kv_token_states + s.kv_internal + s.kv_reserved for s in engine.metrics.steps)
    assert most <= 76
    assert max(s.kv_shared for s in engine.metrics.steps) >= 4 * 40


def test_of_pinned_prefixes_the_longest_is_taken():
    engine = _engine(page_size=8)
    for length in (10, 14, 12):
        engine.pin_prefix(PREFIX[:length])
    engine.generate([[*PREFIX[:14], 5, 6]], HOW)
    assert _saved(engine)[-1] == 14


def test_a_pinned_prefix_leaves_less_for_others_and_says_so():
    engine = _engine(kv_cache_tokens=100)
    engine.pin_prefix(PREFIX)
    with pytest.raises(ValueError, match="exceed the cache"):
        engine.add_request([5] * 60, HOW)
    assert len(engine.generate([[5] * 50], HOW)[0].tokens) == 6


def test_pinning_is_refused_where_it_cannot_be_kept():
    with pytest.raises(ValueError, match="needs prefix_caching"):
        _engine(prefix_caching=False).pin_prefix(PREFIX)
    engine = _engine()
    engine.add_request([5], HOW)
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        engine.pin_prefix(PREFIX)
    with pytest.raises(ValueError, match="the prompt is empty"):
        _engine().pin_prefix([])
