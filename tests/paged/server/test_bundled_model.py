"""Each option of both APIs with the bundled model, beside the offline engine."""

from typing import Any

import pytest

from models import checkpoint
from paged.adapters.known import KnownAdapters
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from paged.server.engine_client import EngineClient
from paged.server.settings import ServerConfig
from tests.paged.server.serving import BUNDLED, TOKENIZER, Served, served
from tests.paged.tiny import padded

pytestmark = pytest.mark.slow  # the bundled model compiles
CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=64, max_prefills_per_step=4, max_model_len=256,
    page_size=16, kv_cache_tokens=4096, adapter_slots=2, max_adapter_rank=32, prefix_caching=True,
)  # fmt: skip
PROMPT = "The old sailor counted to five. " * 3
DRAWN = {"temperature": 0.8, "seed": 5}
# What requests say beside prompt and 12 tokens; the engine calls it the same.
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {**DRAWN},
    "top p": {**DRAWN, "top_p": 0.7},
    "top k": {**DRAWN, "top_k": 3},
    "min p": {**DRAWN, "min_p": 0.2},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "logit bias": {"logit_bias": {40: 100.0}},
    "several": {**DRAWN, "n": 3},
    "best of": {**DRAWN, "n": 2, "best_of": 4},
    "beams": {"beam_width": 3, "n": 2, "length_penalty": 0.5, "early_stopping": True},
    "stop": {"stop": [" and", " the"]},
    "stop tokens": {"stop_token_ids": [19]},
    "forced": {"forced_output": [40, 41, 42]},
    "to the end": {"ignore_eos": True},
    "log-probabilities": {"logprobs": 3},
    "of several": {**DRAWN, "n": 2, "logprobs": 2},
    "of the token alone": {"logprobs": 0},
}
OPENAI = {
    "temperature", "seed", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "n",
    "best_of", "stop", "logprobs", "max_tokens",
}  # fmt: skip
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    model, params = checkpoint.load("bundled", "float32")
    return padded(Engine.from_model(params, model, CONFIG, TOKENIZER))


@pytest.fixture(scope="module")
def offline(engine: Engine) -> dict[str, RequestOutput]:
    """The output of each option, before the engine is served."""
    outputs = {
        name: engine.generate([PROMPT], SamplingParams(max_tokens=12, **option))[0]
        for name, option in OPTIONS.items()
    }
    scored = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2)
    outputs["prompt"] = engine.generate([PROMPT], scored)[0]
    engine.add_adapter("reversed", "models/bundled/adapters/reversed")
    outputs["adapter"] = engine.generate([PROMPT], SamplingParams(max_tokens=12), ["reversed"])[0]
    return outputs


@pytest.fixture(scope="module")
def server(engine: Engine, offline):
    settings = ServerConfig(allow_adapter_loading=True)
    with served(EngineClient(engine), CONFIG, settings) as running:
        known = KnownAdapters(BUNDLED, CONFIG)
        running.service.adapters.add(known.read("reversed", "models/bundled/adapters/reversed"))
        yield running


def spoken(option: dict[str, Any]) -> dict[str, Any]:
    """As the official client takes it."""
    body = {"max_tokens": 12, "temperature": 0, **option}
    if "beam_width" in body:
        del body["temperature"]
    extra = {name: body.pop(name) for name in list(body) if name not in OPENAI}
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): value for token, value in body["logit_bias"].items()}
    return {"model": "bundled", **body, "extra_body": extra}


@pytest.mark.parametrize("name", OPTIONS)
def test_completions(server: Served, offline, name):
    wanted = offline[name]
    answer = server.client.completions.create(prompt=PROMPT, **spoken(OPTIONS[name]))
    assert [choice.text for choice in answer.choices] == [s.text for s in wanted.sequences]
    reasons = [FINISH[sequence.finish_reason or ""] for sequence in wanted.sequences]
    assert [choice.finish_reason for choice in answer.choices] == reasons
    assert answer.usage.completion_tokens == sum(len(s.tokens) for s in wanted.sequences)
    for choice, sequence in zip(answer.choices, wanted.sequences, strict=True):
        if sequence.logprobs is None:
            assert choice.logprobs is None
            continue
        told = choice.logprobs
        assert told.token_logprobs == pytest.approx(
            [p.logprob for p in sequence.logprobs], abs=1e-5
        )
        assert told.tokens == [TOKENIZER.decode([token]) for token in sequence.tokens]
        assert told.text_offset[0] == 0
        if not OPTIONS[name]["logprobs"]:
            assert told.top_logprobs is None
            continue
        for best, each in zip(told.top_logprobs, sequence.logprobs, strict=True):
            named = {TOKENIZER.decode([t]): p for t, p in each.top.items()}
            named[TOKENIZER.decode([each.token])] = each.logprob
            assert best == pytest.approx(named, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "best of"])
def test_streamed_completions(server: Served, offline, name):
    wanted = offline[name]
    count = len(wanted.sequences)
    texts, reasons = [""] * count, [None] * count
    logprobs: list[list[float]] = [[] for _ in range(count)]
    offsets: list[list[int]] = [[] for _ in range(count)]
    for chunk in server.client.completions.create(
        prompt=PROMPT, stream=True, **spoken(OPTIONS[name])
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                logprobs[choice.index] += choice.logprobs.token_logprobs
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [sequence.text for sequence in wanted.sequences]
    assert reasons == [FINISH[s.finish_reason or ""] for s in wanted.sequences]
    for i, sequence in enumerate(wanted.sequences):
        expected = [p.logprob for p in sequence.logprobs or ()]
        assert logprobs[i] == pytest.approx(expected, abs=1e-5)
        assert offsets[i] == sorted(offsets[i])


def test_chat_has_log_probabilities_of_its_own_shape(server: Served, engine: Engine):
    messages = [{"role": "user", "content": "Who?"}]
    how = {"model": "bundled", "messages": messages, "max_tokens": 6, "temperature": 0}
    body = {"messages": messages, "add_generation_prompt": True}
    tokens = server.http.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    sampling = SamplingParams(max_tokens=6, logprobs=2)
    wanted = server.engine_client.ask(lambda e: e.generate([tokens], sampling)[0]).result(60)
    whole = server.client.chat.completions.create(**how, logprobs=True, top_logprobs=2).choices[0]
    assert whole.message.content == wanted.text
    streamed = []
    for chunk in server.client.chat.completions.create(
        **how, logprobs=True, top_logprobs=2, stream=True
    ):
        streamed += chunk.choices[0].logprobs.content
    for told in (whole.logprobs.content, streamed):
        for one, each in zip(told, wanted.logprobs or (), strict=True):
            assert one.logprob == pytest.approx(each.logprob, abs=1e-5)
            assert bytes(one.bytes).decode() == one.token == TOKENIZER.decode([each.token])
            best = {top.token: top.logprob for top in one.top_logprobs}
            named = {TOKENIZER.decode([t]): p for t, p in each.top.items()}
            assert best == pytest.approx(named, abs=1e-5)
    bare = server.client.chat.completions.create(**how, logprobs=True).choices[0]
    assert all(one.top_logprobs == [] for one in bare.logprobs.content)


def test_an_echo_tells_what_the_prompt_was_worth(server: Served, offline):
    wanted = offline["prompt"]
    how = {"model": "bundled", "prompt": PROMPT, "temperature": 0, "logprobs": 2, "echo": True}
    told = server.client.completions.create(max_tokens=4, **how).choices[0]
    assert told.text == PROMPT + wanted.text
    expected = [each.logprob for each in wanted.prompt_logprobs[1:]]
    expected += [each.logprob for each in wanted.logprobs]
    assert told.logprobs.token_logprobs[0] is None
    assert told.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    assert len(told.logprobs.tokens) == len(wanted.prompt_tokens) + 4
    ends = [at + len(token) for at, token in
            zip(told.logprobs.text_offset[1:], told.logprobs.tokens[1:])]  # fmt: skip
    assert ends[-1] == len(told.text)
    alone = server.client.completions.create(max_tokens=0, **how).choices[0]
    assert alone.text == PROMPT
    assert alone.logprobs.token_logprobs == told.logprobs.token_logprobs[:-4]
    extra = {"prompt_logprobs": 1}
    how = {"model": "bundled", "prompt": PROMPT, "max_tokens": 1, "extra_body": extra}
    scored = server.client.completions.create(**how).choices[0].model_extra["prompt_logprobs"]
    assert scored[0] is None and len(scored) == len(wanted.prompt_tokens)
    assert scored[3]["logprob"] == pytest.approx(wanted.prompt_logprobs[3].logprob, abs=1e-5)


def test_cached_tokens_are_counted(server: Served):
    how = {"model": "bundled", "prompt": "A prefix that nobody had. " * 6, "max_tokens": 2}
    usages = [server.client.completions.create(**how).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached == [0, (usages[0].prompt_tokens - 1) // 16 * 16]
    salted = server.client.completions.create(**how, extra_body={"cache_salt": "mine"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_adapters_are_models(server: Served, offline):
    how = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = server.client.completions.create(model="reversed", **how)
    assert answer.choices[0].text == offline["adapter"].text != offline["greedy"].text
    assert answer.model == "reversed"
    body = {"lora_name": "loaded", "lora_path": "models/bundled/adapters/reversed"}
    loaded = server.http.post(f"{server.url}/v1/load_lora_adapter", json=body)
    assert loaded.status_code == 200 and loaded.json()["parent"] == "bundled"
    assert "loaded" in [model.id for model in server.client.models.list()]
    again = server.client.completions.create(model="loaded", **how)
    assert again.choices[0].text == offline["adapter"].text
    for bad in (
        {"lora_path": "/nowhere"},
        {"lora_path": "a" * 5000},
        {"lora_name": "bundled"},
        {"lora_name": ""},
    ):
        answer = server.http.post(f"{server.url}/v1/load_lora_adapter", json={**body, **bad})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(bad))
    assert "paged_adapter_loads_total" in server.http.get(f"{server.url}/metrics").text
