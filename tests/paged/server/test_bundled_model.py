"""Each option of both APIs with the bundled model: answers equal the offline engine's outputs."""

from typing import Any

import pytest

from models import checkpoint
from paged.adapters.known import KnownAdapters
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, TokenLogprob
from paged.server.settings import ServerConfig
from tests.paged.server.serving import BUNDLED, TOKENIZER, Served, joined, served
from tests.paged.tiny import padded

pytestmark = pytest.mark.slow  # the bundled model compiles
CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=64, max_prefills_per_step=4, max_model_len=256,
    page_size=16, kv_cache_tokens=4096, adapter_slots=2, max_adapter_rank=32, prefix_caching=True,
)  # fmt: skip
PROMPT = "The old sailor counted to five. " * 3
DRAWN = {"temperature": 0.8, "seed": 5}
# Options of requests besides the prompt and 12 tokens, under their names in SamplingParams.
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
    """The engine's output for each option, generated before the engine is served."""
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
    with served(engine, CONFIG, settings) as running:
        known = KnownAdapters(BUNDLED, CONFIG)
        running.service.adapters.add(known.read("reversed", "models/bundled/adapters/reversed"))
        yield running


def spoken(option: dict[str, Any]) -> dict[str, Any]:
    """The arguments of OpenAI's client for an option."""
    body = {"max_tokens": 12, "temperature": 0, **option}
    if "beam_width" in body:
        del body["temperature"]
    extra = {name: body.pop(name) for name in list(body) if name not in OPENAI}
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): value for token, value in body["logit_bias"].items()}
    return {"model": "bundled", **body, "extra_body": extra}


def named(logprob: TokenLogprob) -> dict[str, float]:
    """Log-probabilities of the alternatives and of the token itself, by text."""
    values = {**logprob.top, logprob.token: logprob.logprob}
    return {TOKENIZER.decode([token]): value for token, value in values.items()}


WAYS = [(name, False) for name in OPTIONS] + [(name, True) for name in OPTIONS if name != "best of"]


@pytest.mark.parametrize(("name", "stream"), WAYS)
def test_completions(server: Served, offline, name, stream):
    how = spoken(OPTIONS[name])
    answer = server.client.completions.create(prompt=PROMPT, stream=stream, **how)
    chunks = list(answer) if stream else [answer]
    wanted = offline[name].sequences
    assert joined(chunks, len(wanted)) == [sequence.text for sequence in wanted]
    for i, sequence in enumerate(wanted):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == i]
        assert parts[-1].finish_reason == FINISH[sequence.finish_reason or ""]
        told = [part.logprobs for part in parts if part.logprobs]
        if sequence.logprobs is None:
            assert not told
            continue

        def all_of(field: str, told=told) -> list:
            return [each for part in told for each in getattr(part, field) or ()]

        logprobs = [p.logprob for p in sequence.logprobs]
        assert all_of("token_logprobs") == pytest.approx(logprobs, abs=1e-5)
        assert all_of("tokens") == [TOKENIZER.decode([token]) for token in sequence.tokens]
        assert all_of("text_offset") == sorted(all_of("text_offset"))
        assert all_of("text_offset")[0] == 0
        best = [named(p) for p in sequence.logprobs] if OPTIONS[name]["logprobs"] else []
        assert len(all_of("top_logprobs")) == len(best)
        for told_best, each in zip(all_of("top_logprobs"), best, strict=True):
            assert told_best == pytest.approx(each, abs=1e-5)
    if not stream:
        assert answer.usage.completion_tokens == sum(len(s.tokens) for s in wanted)


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
            assert best == pytest.approx(named(each), abs=1e-5)
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
