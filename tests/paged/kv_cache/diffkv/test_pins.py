"""A prompt that goes on from a pinned prefix computes the same bits as a prompt in chunks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.diff_events import first_difference
from experiments.lib import random_adapters
from experiments.lib.event_log import read_log, write_log
from experiments.lib.presets import AS_THEY_ARE, PRESETS, TINY, Preset, padded
from experiments.replay import replay, simulated_engine
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.scheduling.admission import PrefillRoom
from paged.simulator.executor import SimulatedExecutor
from tests.paged.tiny import random_params
from tests.sweeps import swept

TILE = 8
DIFFKV = [name for name, preset in PRESETS.items() if preset.policy == "diffkv"]
GREEDY = SamplingParams(max_tokens=18, ignore_eos=True, logprobs=1)
WAYS = [
    GREEDY,
    replace(GREEDY, temperature=1.0, seed=5, n=2),
    replace(GREEDY, logprobs=None, beam_width=2, n=2),
    replace(GREEDY, prompt_logprobs=0),
]


def config_of(name: str = "diffkv", pins: int = 2, **changes: Any) -> EngineConfig:
    preset = PRESETS[name]
    preset = replace(preset, options=preset.options | {"prompt_tile": TILE, "pins": pins})
    given: dict[str, Any] = {
        "max_num_seqs": 6, "max_num_batched_tokens": 24, "kv_cache_tokens": 640,
        "chunked_prefill": True,
    }  # fmt: skip
    return preset.engine_config(TINY, **(given | changes))


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, TINY.vocab_size, length).tolist() for length in lengths]


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    long, short, *rest = prompts(37, 21, 3, 9, 1, 4, 30, 2, 5, 3)
    begins = [long, long, long, short, short, short, long[:30], long]
    return [a + b for a, b in zip(begins, rest, strict=True)], [
        WAYS[i % len(WAYS)] for i in range(len(rest))
    ]


def contents(outputs: list[RequestOutput]) -> list[Any]:
    return [[(s.tokens, s.logprobs) for s in output.sequences] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", swept(DIFFKV, 1))
def test_who_goes_on_from_a_pin_has_the_tokens_and_log_probabilities_of_who_does_not(name):
    """The requests run alone and then together. Together, only their tokens must be equal."""
    requests, hows = asked()
    engine = padded(Engine.from_model(random_params(), TINY, config_of(name)))
    plain = [engine.generate([p], h)[0] for p, h in zip(requests, hows, strict=True)]
    long, short = requests[0][:37], requests[3][:21]
    assert engine.pin_prefix(long) == 37 and engine.pin_prefix(short) == 21
    for way in ("alone", "together"):
        if way == "alone":
            found = [engine.generate([p], h)[0] for p, h in zip(requests, hows, strict=True)]
            assert contents(found) == contents(plain)
        else:
            found = engine.generate(requests, hows)
            assert [[s.tokens for s in o.sequences] for o in found] == [
                [s.tokens for s in o.sequences] for o in plain
            ]
        # Requests with prompt log-probabilities do not use a pin, nor do prompts that part from it.
        cached = [output.cached_tokens > 0 for output in found]
        assert cached == [True, True, True, False, True, True, False, False]
    engine.host_policy.check()


def test_others_of_a_group_leave_the_stage_to_the_first():
    """Prefilled output of a later sequence may begin with a pin although the first's does not."""
    preset = Preset("diffkv", AS_THEY_ARE | {"prompt_tile": TILE, "pins": 1})
    config = preset.engine_config(TINY, chunked_prefill=True, max_num_batched_tokens=24)
    engine = Engine(TINY, config, SimulatedExecutor(vocab_size=61))
    prefix, other = prompts(30, 40)
    engine.pin_prefix(prefix)
    known = [SequenceOutput(tokens, "", None) for tokens in (other, [*prefix[4:], 5, 6])]
    how = SamplingParams(max_tokens=44, temperature=1.0, n=2, seed=0, ignore_eos=True)
    engine.add_request(prefix[:4], how, known_output=known)
    (output,) = finish(engine)
    assert output.cached_tokens == 0
    prefills = [e for e in engine.events if e["event"] == "schedule"]
    assert sum("copies" in event["moves"] for event in prefills) == 1, "the pin's own"


def test_only_the_like_share_a_pin(tmp_path: Path):
    """A pin serves only requests with its salt and adapter."""
    config = config_of(adapter_slots=2, max_adapter_rank=16)
    engine = Engine(TINY, config, SimulatedExecutor(vocab_size=61))
    engine.add_adapter("a", random_adapters.write(tmp_path / "a", TINY, 0, rank=4))
    (prefix,) = prompts(20)
    engine.pin_prefix(prefix, cache_salt="mine")
    engine.pin_prefix(prefix, adapter="a")
    how = SamplingParams(max_tokens=2)
    for salt, adapter, shared in (("", None, 0), ("mine", None, 16), ("", "a", 16), ("b", "a", 0)):
        name = engine.add_request([*prefix, 5, 6], how, cache_salt=salt, adapter=adapter)
        (output,) = [output for output in finish(engine) if output.request_id == name]
        assert output.cached_tokens == shared, (salt, adapter)


def finish(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs


def test_a_log_with_pins_is_replayed(tmp_path: Path):
    requests, hows = asked()
    engine = Engine(TINY, config_of(), SimulatedExecutor(vocab_size=61))
    engine.pin_prefix(requests[0][:37])
    engine.generate(requests, hows)
    write_log(tmp_path, "events.jsonl", engine.events)
    log = read_log(tmp_path / "events.jsonl")
    assert first_difference(log, replay(simulated_engine(log, TINY), log)) is None


@pytest.mark.parametrize(
    ("pins", "lengths", "message"),
    [
        (0, [20], "needs option pins of policy 'diffkv'"),
        (1, [20, 20], "as many prefixes are pinned as option pins allows: 1"),
        (1, [TILE + 1], "9 tokens is too short to be pinned: at least 10 are needed"),
    ],
)
def test_what_cannot_be_pinned_is_refused(pins, lengths, message):
    engine = Engine(TINY, config_of(pins=pins), SimulatedExecutor(vocab_size=61))
    *good, bad = prompts(*lengths)
    for prompt in good:
        engine.pin_prefix(prompt)
    with pytest.raises(ValueError, match=message):
        engine.pin_prefix(bad)


def test_pins_need_chunks_and_take_room():
    with pytest.raises(ValueError, match=r"pins \(2\) need prompts in chunks"):
        config_of(chunked_prefill=False, max_num_batched_tokens=64)
    pages = [
        Engine(TINY, config_of(pins=pins), SimulatedExecutor(vocab_size=61)).host_policy.capacity
        for pins in (0, 1)
    ]
    assert pages[1] < pages[0]


@pytest.mark.parametrize(("in_chunks", "row", "takes"), [
    (False, None, True),
    (True, None, False),  # another prompt uses the stage
    (False, (1, 10, 0, 16), False),  # another prompt goes on from a pin, and ends
    (False, (1, 10, 0, 0), True),  # another prompt runs whole
    (False, (1, 30, 0, 0), False),  # another prompt begins, and goes on in later steps
])  # fmt: skip
def test_one_prompt_a_step_goes_on(in_chunks, row, takes):
    room = PrefillRoom(config_of(), 20, in_chunks)
    if row:
        room.add(*row)
    assert room.takes(20, pinned=16) == takes


def test_the_chunks_of_a_pin_end_where_others_go_on():
    room = PrefillRoom(config_of(), 20)
    room.add(0, 19, 0, 0, 16)
    assert room.rows == [(0, 16)]


@pytest.mark.slow
def test_what_is_not_finite_does_not_stay_in_the_stage():
    """A prompt that ends with an error leaves nothing in the stage for the next chunked prompt."""
    params = random_params()
    poisoned = params | {"embed": params["embed"].at[60].set(np.nan)}
    engine = padded(Engine.from_model(poisoned, TINY, config_of()))
    how = replace(GREEDY, max_tokens=3, logit_bias={60: -100.0})
    good, bad = prompts(34, 50)
    good, bad = [min(token, 59) for token in good], [*bad[:40], 60, *bad[40:]]
    plain = engine.generate([good], how)
    assert engine.generate([bad], how)[0].finish_reason == "error"
    assert contents(engine.generate([good], how)) == contents(plain)
    beside = engine.generate([good[:10], [60] * 5], how)
    assert [output.finish_reason for output in beside] == ["length", "error"]
