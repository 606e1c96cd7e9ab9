"""A request continues in a second engine from its output in a first engine."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.diff_events import first_difference
from experiments.lib.event_log import read_log, write_log
from experiments.replay import replay, simulated_engine
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput, TokenLogprob
from tests.paged.hashing_executor import EOS, HashingExecutor
from tests.paged.requests.test_text_streams import bundled_text
from tests.paged.tiny import TINY, drained, padded, simulated

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, page_size=4, kv_cache_tokens=256
)
PROMPT = [5, 9, 14, 33, 7, 5]
SAMPLED = SamplingParams(max_tokens=30, temperature=1.0, seed=4)


def engine_of(config: EngineConfig = CONFIG, eos_rate: float = 0.0) -> Engine:
    return Engine(TINY, config, HashingExecutor(config, eos_rate))


def outputs(engine: Engine, prompt, how: SamplingParams, known=None) -> list[RequestOutput]:
    """Each output of the request's stream."""
    request_id = engine.add_request(prompt, how, stream=True, known_output=known)
    found = drained(engine)
    assert {output.request_id for output in found} == {request_id}
    return found


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 3),
    more=st.integers(0, 1),
    logprobs=st.sampled_from([None, 0, 2]),
    eos_rate=st.sampled_from([0.0, 0.1]),
    cut=st.floats(0, 1),
    changes=st.sampled_from([{}, {"multi_step": 3}, {"prefix_caching": True}, {"page_size": 1}]),
)
def test_it_ends_as_in_one_engine(n, more, logprobs, eos_rate, cut, changes):
    """Tokens, ends, log-probabilities and sample order are equal, wherever the output is cut."""
    how = replace(SAMPLED, n=n, best_of=n + more, logprobs=logprobs, stop_token_ids=(11,))
    *growing, whole = outputs(engine_of(eos_rate=eos_rate), PROMPT, how)
    if not growing:
        return
    before = growing[int(cut * (len(growing) - 1))]
    second = engine_of(replace(CONFIG, **changes), eos_rate)
    again = outputs(second, PROMPT, how, before.sequences)
    assert replace(again[-1], request_id="") == replace(whole, request_id="")
    second.host_policy.check()


@pytest.mark.slow
def test_penalties_and_bias_count_known_output_as_output(tiny_params):
    engine = padded(Engine.from_model(tiny_params, TINY, CONFIG))
    hows = [
        SamplingParams(max_tokens=20, ignore_eos=True, frequency_penalty=0.9, logprobs=1),
        SamplingParams(max_tokens=20, ignore_eos=True, repetition_penalty=1.5, logit_bias={7: 2.0}),
        SamplingParams(max_tokens=20, ignore_eos=True, presence_penalty=1.1, temperature=0.9,
                       seed=3),
    ]  # fmt: skip
    for how in hows:
        streamed = outputs(engine, PROMPT, how)
        again = outputs(engine, PROMPT, how, streamed[8].sequences)[-1]
        assert again.tokens == streamed[-1].tokens
        if how.logprobs is not None:
            ours = [each.logprob for each in again.logprobs or []]
            theirs = [each.logprob for each in streamed[-1].logprobs or []]
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_stop_string_may_begin_in_known_output():
    how = SamplingParams(max_tokens=60, seed=1)
    streamed = outputs(bundled_text(), "abc", how)
    before = streamed[20]
    text = streamed[-1].text
    at = len(before.text) - 1
    stop = text[at : at + 3]
    assert stop not in before.text
    how = replace(how, stop=(stop,))
    again = outputs(bundled_text(), "abc", how, before.sequences)[-1]
    assert again.finish_reason == "stop" and again.text == text[: text.index(stop)]


def test_log_probabilities_that_do_not_come_along_are_nan():
    how = replace(SAMPLED, logprobs=0)
    known = [SequenceOutput([7, 8], "", None)]
    output = outputs(engine_of(), PROMPT, how, known)[-1]
    assert output.logprobs is not None and len(output.logprobs) == 30
    assert [str(each.logprob) == "nan" for each in output.logprobs] == [True] * 2 + [False] * 28


def test_the_log_tells_it_and_replays(tmp_path):
    engine = simulated(CONFIG)
    how = replace(SAMPLED, n=2)
    known = [SequenceOutput([7, 8], "", None), SequenceOutput([9], "", "length")]
    outputs(engine, PROMPT, how, known)
    log = read_log(write_log(tmp_path, "events.jsonl", engine.events))
    events = replay(simulated_engine(log, TINY), log)
    assert first_difference(log, events) is None
    assert len(events) == len(log)


ONE = SequenceOutput([7, 8], "", None)
REFUSED: dict[str, tuple[SamplingParams, Any]] = {
    "must be a list": (SAMPLED, ONE),
    "must be of SequenceOutput": (SAMPLED, [[7, 8]]),
    "has 2 sequences, and the request has 1": (SAMPLED, [ONE, ONE]),
    "beam search cannot go on": (SamplingParams(beam_width=2), [ONE, ONE]),
    "only with its seed": (SamplingParams(temperature=1.0), [ONE]),
    "have ended": (SAMPLED, [replace(ONE, finish_reason="length")]),
    "outside the vocabulary": (SAMPLED, [replace(ONE, tokens=[61])]),
    "unknown finish_reason 'bored'": (SAMPLED, [replace(ONE, finish_reason="bored")]),
    "may have 30, and one is to be generated": (SAMPLED, [replace(ONE, tokens=[7] * 30)]),
    "its finish_reason does not say so": (SAMPLED, [replace(ONE, tokens=[7, EOS])]),
    "needs their score": (replace(SAMPLED, best_of=2), [ONE, ONE]),
    "score of known output must be a finite number": (
        replace(SAMPLED, best_of=2), [replace(ONE, score="x"), ONE],  # type: ignore
    ),
    "ended with 'stop' and has no token": (
        replace(SAMPLED, n=2), [SequenceOutput([], "", "stop"), ONE],
    ),
    "2 tokens and 1 log-probabilities": (
        replace(SAMPLED, logprobs=0), [replace(ONE, logprobs=[TokenLogprob(7, -1.0, {})])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    how, known = REFUSED[message]
    engine = engine_of()
    with pytest.raises(ValueError, match=message):
        engine.add_request(PROMPT, how, known_output=known)
    assert not engine.has_unfinished()
