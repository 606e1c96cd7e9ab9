"""Bad input of each kind raises a clear error, and the engine goes on as if it had not come."""

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import pytest

from experiments.lib.event_log import read_log, write_log
from models import load_tokenizer
from paged.engine import Engine, EngineConfig
from paged.kv_cache import POLICIES
from paged.kv_cache.host import HostPolicy
from paged.kv_cache.vllm import VLLMHost
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor
from tests.paged.tiny import TINY, drained, simulated

CONFIG = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=32, max_model_len=100, page_size=4, kv_cache_tokens=80
)


def _engine(**changes) -> Engine:
    return simulated(dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "a text prompt needs a tokenizer"),
        ("hello", {}, "a text prompt needs a tokenizer"),
        ([1, 61], {}, r"token 61 is outside the vocabulary \[0, 60\]"),
        ([1, -3], {}, "token -3 is outside the vocabulary"),
        ([1.5, 2.0], {}, "flat list of integers"),
        ([[1, 2]], {}, "flat list of integers"),
        (np.array([3, 4], "timedelta64[s]"), {}, "flat list of integers"),
        (np.ma.masked_array([3, 4], [False, True]), {}, "flat list of integers"),
        (b"ab", {}, "flat list of integers"),
        (bytearray(b"ab"), {}, "flat list of integers"),
        (memoryview(b"ab"), {}, "flat list of integers"),
        ([3] * 100, {}, r"has 100 tokens; max_model_len \(100\) allows 99"),
        ([3] * 60, {"max_tokens": 30}, r"exceed the cache: kv_cache_tokens \(80\)"),
        ([3], {"stop": (";",)}, "stop strings need a tokenizer"),
        ([3], {"stop_token_ids": (4, 61)}, "stop_token_ids: token 61 is outside"),
        ([3], {"logit_bias": {-1: 1.0}}, "logit_bias: token -1 is outside"),
        ([3], {"forced_output": (61,)}, "forced_output: token 61 is outside"),
        ([3], {"forced_output": [4] * 65}, r"65 tokens, more than max_tokens \(64\)"),
        ([3] * 90, {"forced_output": [4] * 12}, "90 tokens and forced_output 12; max_model_len"),
        ([3], {"n": 3, "temperature": 1}, "max_num_seqs is 2"),
        ([3], {"beam_width": 3}, "max_num_seqs is 2"),
        ([3] * 40, {"beam_width": 2, "max_tokens": 9}, "2 times a prompt of 40 tokens"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_and_the_others_go_on(prompt, sampling, message):
    engine = _engine()
    good = engine.add_request([3, 4, 5])
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, SamplingParams(**sampling))
    with pytest.raises(ValueError, match=message):
        engine.generate([[3, 4], prompt], SamplingParams(**sampling))
    assert [(o.request_id, len(o.tokens)) for o in drained(engine)] == [(good, 64)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_id": 5}, "request_id must be a text, not 5"),
        ({"request_id": "a\ud800"}, r"request_id must be a text, not 'a.ud800'"),
        ({"stream": "no"}, "stream must be True or False, not 'no'"),
        ({"stream": None}, "stream must be True or False, not None"),
        ({"stream": 1}, "stream must be True or False, not 1"),
        ({"stream": np.array([1, 0])}, r"stream must be True or False, not array\(\[1, 0\]\)"),
        ({"cache_salt": None}, "cache_salt must be a text, not None"),
        ({"cache_salt": "\ud800"}, r"cache_salt must be a text, not '.ud800'"),
        ({"arrival_time": float("nan")}, "arrival_time must be a finite number, not nan"),
        ({"arrival_time": "now"}, "arrival_time must be a finite number, not 'now'"),
        ({"sampling": {"max_tokens": 3}}, "sampling must be SamplingParams, not {'max_tokens': 3}"),
    ],
)
def test_bad_options_of_a_request_leave_the_others_alone(options, message):
    engine = _engine(prefix_caching=True)
    engine.add_request([3, 4, 5])
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request([3] * 10, **options)
    assert [(o.finish_reason, len(o.tokens)) for o in drained(engine)] == [("length", 64)]


@pytest.mark.parametrize("salt", [5, None, "\ud800"])
def test_a_bad_salt_of_a_prefix_leaves_the_pinned_ones(salt):
    engine = _engine(prefix_caching=True)
    engine.pin_prefix([3] * 20)
    with pytest.raises(ValueError, match="cache_salt must be a text, not"):
        engine.pin_prefix([9] * 5, salt)
    assert VLLMHost.of(engine.host_policy).pool.num_used == 5


def test_options_of_a_request_may_be_numpys(tmp_path):
    engine = _engine()
    options: dict[str, Any] = {"stream": np.True_, "arrival_time": np.longdouble(-1)}
    engine.add_request([3], **options)
    engine.step()
    arrival = read_log(write_log(tmp_path, "events.jsonl", engine.events))[1]
    assert (arrival["stream"], arrival["time_s"]) == (True, -1.0)


def test_a_text_that_is_none_is_refused():
    tokenizer = load_tokenizer("bundled")
    model = TINY.replace(vocab_size=512)
    engine = Engine(model, CONFIG, SimulatedExecutor(vocab_size=512, first_token=3), tokenizer)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        engine.add_request("half a pair: \ud800")


def test_an_arrival_in_the_future_is_refused():
    with pytest.raises(ValueError, match=r"arrival_time 3\.0 is in the future"):
        _engine().add_request([3], arrival_time=3.0)


def test_generate_refuses_one_string_and_unequal_lists():
    with pytest.raises(ValueError, match=r"prompts must be a list, .* of prompts, not 'abc'"):
        _engine().generate("abc")
    with pytest.raises(ValueError, match="2 prompts with 1 sampling"):
        _engine().generate([[3], [4]], [SamplingParams()])


@pytest.mark.parametrize("prompts", [None, 5, {3: 4}, b"", iter([[3]]), np.array([[3]])])
def test_generate_refuses_what_is_no_sequence_of_prompts(prompts):
    with pytest.raises(ValueError, match="prompts must be a list, tuple or other sequence of"):
        _engine().generate(prompts)


def test_generate_takes_any_sequence_of_prompts():
    how = SamplingParams(max_tokens=2, ignore_eos=True)
    expected = [o.tokens for o in _engine().generate([[3], [4]], how)]
    ways: list[Any] = [([3], [4]), deque([(3,), (4,)]), [np.array([3]), np.array([4])]]
    for prompts in ways:
        assert [o.tokens for o in _engine().generate(prompts, (how, how))] == expected


@pytest.mark.parametrize("sampling", [0, "", {}, 5])
def test_sampling_of_another_type_is_refused(sampling):
    engine = _engine()
    for ask in (engine.add_request, engine.stream, lambda _, how: engine.generate([[3]], how)):
        with pytest.raises(ValueError, match=r"^sampling must be "):
            ask([3], sampling)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("request_id", ["a", None, 5, []])
def test_aborting_what_is_no_request_is_refused(request_id):
    with pytest.raises(ValueError, match="is unknown or has finished"):
        _engine().abort(request_id)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_tokens", 0, "at least 1"),
        ("top_k", 2**31, "below 2\\^31"),
        ("seed", 2**32, "2\\^32"),
        ("temperature", -0.1, "0 \\(greedy\\) or at least"),
        ("temperature", 1e-60, "0 \\(greedy\\) or at least 1.18e-38"),
        ("temperature", 1e-45, "0 \\(greedy\\) or at least 1.18e-38"),
        ("temperature", float("nan"), "finite"),
        ("top_k", -1, "at least 0"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.1, "at most 1"),
        ("seed", -1, "2\\^32"),
        ("temperature", 1e39, "finite number"),
        ("min_p", 1.5, "from 0"),
        ("repetition_penalty", 0.0, "from 0.01 to 100"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -3, "from -2 to 2"),
        ("logprobs", 21, "from 0 to 20"),
        ("prompt_logprobs", -1, "from 0 to 20"),
        ("stop_token_ids", np.array([7]), "tuple of token ids"),
        ("stop_token_ids", ("a",), "tuple of token ids"),
        ("forced_output", "ab", "tuple of token ids"),
        ("logit_bias", [5], "a map of token ids to numbers"),
        ("logit_bias", {5: 101}, "token ids to numbers from -100"),
        ("logit_bias", {5: None}, "token ids to numbers from -100"),
        ("logit_bias", {i: 1.0 for i in range(301)}, "300 tokens"),
        ("stop", None, "tuple of non-empty strings"),
        ("stop", "x", "tuple of non-empty strings"),
        ("stop", ("",), "tuple of non-empty strings"),
    ],
)
def test_bad_sampling_parameters_are_refused(field, value, allowed):
    with pytest.raises(ValueError, match=f"{field} (must be|must map|may name) .*{allowed}"):
        SamplingParams(**{field: value})


def test_a_policy_of_a_relative_module_is_refused():
    """tests/experiments/test_bad_flags.py tests other refusals of a configuration."""
    with pytest.raises(ValueError, match=r"or MODULE:ATTRIBUTE, not '\.dense:VLLM'"):
        dataclasses.replace(CONFIG, policy=".dense:VLLM")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"options": dict}, "options must be a dataclass"),
        ({"parts": None}, "parts must be a function, not None"),
        ({"host": "VLLMHost"}, "host must be a function, not 'VLLMHost'"),
        ({"parts": lambda config: {"owner": "blocks"}}, "parts must return Parts, not {"),
    ],
)
def test_a_policy_with_wrong_parts_is_refused(monkeypatch, changes, message):
    wrong = dataclasses.replace(POLICIES["vllm"], **changes)
    monkeypatch.setattr("tests.paged.tiny.WRONG", wrong, raising=False)
    with pytest.raises(ValueError, match=f"policy 'tests.paged.tiny:WRONG': {message}"):
        EngineConfig(policy="tests.paged.tiny:WRONG")


def test_an_option_without_default_must_be_given(monkeypatch):
    options = dataclasses.make_dataclass("Needy", [("budget", int)], frozen=True)
    needy = dataclasses.replace(POLICIES["vllm"], options=options)
    monkeypatch.setattr("tests.paged.tiny.NEEDY", needy, raising=False)
    with pytest.raises(ValueError, match=r"policy_options of 'tests.paged.tiny:NEEDY': .*'budget'"):
        EngineConfig(policy="tests.paged.tiny:NEEDY")


def test_a_host_half_without_a_method_is_refused():
    class Bare(HostPolicy):
        pass

    with pytest.raises(TypeError, match=r"abstract methods .*'usage'"):
        Bare()  # type: ignore


def test_an_end_of_sequence_outside_the_vocabulary_is_refused():
    model = TINY.replace(eos_token_ids=(61,))
    with pytest.raises(ValueError, match="eos token 61 is outside the vocabulary of 61"):
        Engine(model, CONFIG, SimulatedExecutor(vocab_size=61))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be from 1 to 65536, not 0"),
        ({"n": 3, "best_of": 2, "temperature": 1}, r"best_of must be at least n \(3\) .*, not 2"),
        ({"n": 2, "temperature": 1e-60}, "temperature must be 0 \\(greedy\\) or at least"),
        ({"n": 2}, "n and best_of above 1 need a temperature above 0, or beam_width"),
        ({"beam_width": 0}, "beam_width must be from 1 to 19, not 0"),
        ({"beam_width": 2.5}, "beam_width must be a whole number, not 2.5"),
        ({"beam_width": 2, "n": 3}, r"n \(3\) must be at most beam_width \(2\)"),
        ({"beam_width": 2, "temperature": 0.5}, r"beam search does not take temperature \(0.5\)"),
        ({"beam_width": 2, "stop": ("x",)}, "beam search does not take stop"),
        ({"beam_width": 2, "logprobs": 0}, "beam search does not take logprobs"),
        ({"length_penalty": 2.0}, r"length_penalty \(2.0\) needs a beam search"),
        ({"early_stopping": True}, r"early_stopping \(True\) needs a beam search"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty must be from -10 to 10, not 11"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or 'never', not 'soon'"),
    ],
)
def test_bad_groups_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)
