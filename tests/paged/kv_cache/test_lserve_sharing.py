"""LServe's prefix cache in an engine: tokens that it shares, limits of sharing, and refusals."""

import pytest

from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor
from tests.paged.kv_cache.test_lserve_prefixes import BASE, KINDS, PAGE
from tests.paged.tiny import TINY


def simulated(kind: str, **options) -> Engine:
    config = EngineConfig(**BASE, policy_options={**KINDS[kind], **options})
    return Engine(TINY, config, SimulatedExecutor(vocab_size=TINY.vocab_size, first_token=3))


HOW = SamplingParams(max_tokens=8, ignore_eos=True, seed=0)


def cached(engine: Engine) -> list[int]:
    return [request.cached_tokens for request in engine.metrics.requests]


@pytest.mark.parametrize(("checkpoints", "found"), [(8, 14), (0, 0)])
def test_memory_that_is_set_aside_keeps_checkpoints_in_a_crowd(checkpoints, found):
    engine = simulated("lserve", checkpoints=checkpoints)
    prompt = [5 + i for i in range(15)]
    engine.generate([prompt], HOW)
    engine.generate([[20 + i] * 15 for i in range(4)], HOW)
    engine.generate([prompt], HOW)
    assert cached(engine)[-1] == found
    engine.host_policy.check()


def test_a_prompt_that_ends_without_a_token_leaves_no_checkpoint():
    engine = simulated("lserve")
    prompt, checkpoints = [5 + i for i in range(15)], engine.host_policy.streaming.checkpoints
    name = engine.add_request(prompt, HOW)
    while not checkpoints._cached:
        engine.step()
    engine.abort(name)
    assert not checkpoints._cached and not len(checkpoints.cached_blocks)
    for _ in range(2):
        engine.generate([prompt], HOW)
    assert cached(engine)[-2:] == [0, 14] and len(checkpoints.cached_blocks)
    engine.host_policy.check()


def test_a_checkpoint_stays_if_one_of_its_makers_does():
    engine = simulated("lserve", checkpoints=4)
    prompt, checkpoints = [5 + i for i in range(7)], engine.host_policy.streaming.checkpoints
    names = [engine.add_request(prompt, HOW) for _ in range(2)]
    while not checkpoints._cached:
        engine.step()
    engine.abort(names[0])
    while engine.has_unfinished():
        engine.step()
    engine.generate([prompt], HOW)
    assert cached(engine)[-1] == 6
    engine.host_policy.check()


def test_output_is_shared_as_far_as_no_page_was_selected():
    engine = simulated("quest")
    (first,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True, seed=0))
    prompt = [5, 6, 7, *first.tokens]
    for own in (9, 10):  # the first request prefills the output
        engine.generate([[*prompt, own]], HOW)
    all_read = engine.host_policy.layout.all_below * PAGE
    assert all_read == 6 and len(prompt) == 23
    assert cached(engine) == [0, all_read, 22]


def test_a_sparsely_prefilled_prompt_shares_nothing_and_cannot_be_pinned():
    engine = simulated("minference")
    for length in (14, 14, 13, 14):
        engine.generate([list(range(5, 5 + length))], HOW)
    assert cached(engine) == [0, 0, 0, 0]
    engine.generate([list(range(5, 18))], HOW)
    assert cached(engine)[-1] == 12
    with pytest.raises(ValueError, match=r"14 tokens is prefilled sparsely .* pin fewer than 14"):
        engine.pin_prefix(list(range(5, 19)))
    assert engine.pin_prefix(list(range(5, 16))) == 11


def test_where_every_prompt_is_sparse_prefixes_are_refused():
    options = KINDS["minference"] | {"minference_from": 3}
    with pytest.raises(ValueError, match="policy 'lserve' cannot share prefixes"):
        EngineConfig(**BASE, policy_options=options)


def test_windows_of_pins_leave_less_for_others_and_say_so():
    engine = simulated("no quota")
    layout, pinned = engine.host_policy.layout, 0
    with pytest.raises(ValueError, match="exceed the cache"):
        while True:
            engine.pin_prefix([5 + pinned] * 13)
            pinned += 1
    assert pinned > 1 and layout.quota == 0
    engine.host_policy.check()
