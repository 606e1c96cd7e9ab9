"""OpenAI's client against the server over a simulated engine. An offline engine gives the expected
texts for the same seeds."""

import concurrent.futures

import openai
import pytest

from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from tests.paged.server.serving import TOKENIZER, Served, joined, simulated

SEEDED = {"seed": 7, "temperature": 0.8}
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
CHAT_TEXT = "<s>system: Be short.\nuser: Who?\nassistant:"


@pytest.fixture(scope="module")
def offline() -> Engine:
    return simulated()[0]


def expected(offline: Engine, prompt, **how) -> list[str]:
    output = offline.generate([prompt], SamplingParams(**{**SEEDED, **how}))[0]
    return [sequence.text for sequence in output.sequences]


def test_a_completion_is_the_engines(server: Served, offline: Engine):
    text = "The old sailor"
    answer = server.client.completions.create(model="bundled", prompt=text, max_tokens=12, **SEEDED)
    assert [choice.text for choice in answer.choices] == expected(offline, text, max_tokens=12)
    assert answer.choices[0].finish_reason == "length" and answer.object == "text_completion"
    prompt = len(TOKENIZER.encode(text))
    assert answer.usage.prompt_tokens == prompt
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, prompt + 12)


def test_prompts_of_every_kind(server: Served, offline: Engine):
    tokens = [TOKENIZER.encode("a cat"), TOKENIZER.encode("two dogs")]
    for prompt, several in [
        ("a cat", ["a cat"]), (["a cat", "two dogs"], ["a cat", "two dogs"]),
        (tokens[0], [tokens[0]]), (tokens, tokens),
    ]:  # fmt: skip
        answer = server.client.completions.create(
            model="bundled", prompt=prompt, max_tokens=5, n=2, **SEEDED
        )
        texts = [text for one in several for text in expected(offline, one, max_tokens=5, n=2)]
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_streamed_completions_are_whole_ones(server: Served, offline: Engine):
    stream = server.client.completions.create(
        model="bundled", prompt=["a cat", "two dogs"], max_tokens=20, n=2, stream=True,
        stream_options={"include_usage": True}, **SEEDED,
    )  # fmt: skip
    *chunks, last = stream
    assert all(chunk.usage is None and chunk.id == last.id for chunk in chunks)
    wanted = [t for p in ("a cat", "two dogs") for t in expected(offline, p, max_tokens=20, n=2)]
    assert joined(chunks, 4) == wanted
    reasons = {choice.index: choice.finish_reason for chunk in chunks for choice in chunk.choices}
    assert reasons == dict.fromkeys(range(4), "length")
    assert last.choices == [] and last.usage.completion_tokens == 80


def test_chat_is_what_the_template_says(server: Served, offline: Engine):
    tokens = TOKENIZER.encode(CHAT_TEXT, add_special_tokens=False)
    wanted = expected(offline, tokens, max_tokens=9, n=2)
    how = {"model": "bundled", "messages": CHAT, "n": 2, **SEEDED}
    answer = server.client.chat.completions.create(max_completion_tokens=9, **how)
    assert [choice.message.content for choice in answer.choices] == wanted
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(tokens)
    texts, roles = ["", ""], []
    for chunk in server.client.chat.completions.create(max_tokens=9, stream=True, **how):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] * bool(choice.delta.role)
    assert texts == wanted and roles == ["assistant"] * 2


def test_chat_goes_on_to_the_end_of_the_context(server: Served):
    answer = server.client.chat.completions.create(model="bundled", messages=CHAT, **SEEDED)
    assert answer.usage.total_tokens == server.service.config.max_model_len


def test_content_in_parts(server: Served):
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]
    how = {"model": "bundled", "max_tokens": 4, **SEEDED}
    plain, in_parts = (
        server.client.chat.completions.create(messages=[{"role": "user", "content": each}], **how)
        for each in ("Who?", parts)
    )
    assert plain.usage == in_parts.usage
    assert plain.choices[0].message.content == in_parts.choices[0].message.content


def test_stop_strings_are_cut_in_streams_too(server: Served, offline: Engine):
    whole = expected(offline, "a cat", max_tokens=40)[0]
    stop = whole[11:14]
    how = {"model": "bundled", "prompt": "a cat", "max_tokens": 40, "stop": stop, **SEEDED}
    answer = server.client.completions.create(**how).choices[0]
    assert answer.text == whole[: whole.find(stop)] and answer.finish_reason == "stop"
    chunks = list(server.client.completions.create(stream=True, **how))
    assert joined(chunks) == [answer.text]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_echo_begins_with_the_prompt(server: Served, offline: Engine):
    how = {"model": "bundled", "prompt": ["a cat", "two dogs"], "echo": True, **SEEDED}
    answer = server.client.completions.create(max_tokens=4, **how)
    wanted = [p + expected(offline, p, max_tokens=4)[0] for p in ("a cat", "two dogs")]
    assert [choice.text for choice in answer.choices] == wanted
    stream = server.client.completions.create(max_tokens=4, stream=True, **how)
    assert joined(stream, 2) == wanted
    nothing = server.client.completions.create(max_tokens=0, **how)
    assert [choice.text for choice in nothing.choices] == ["a cat", "two dogs"]
    assert nothing.usage.completion_tokens == 0


def test_searches_and_the_best_of_samples_come_whole(server: Served):
    """Beams are not compared, because a simulated engine's beams depend on their slots."""
    how = {"model": "bundled", "prompt": "a cat", "n": 2, "max_tokens": 6}
    beams = server.client.completions.create(**how, extra_body={"beam_width": 3})
    assert len(beams.choices) == 2 and all(choice.text for choice in beams.choices)
    stream = server.client.completions.create(**how, stream=True, extra_body={"beam_width": 3})
    assert all(joined(stream, 2))
    best = server.client.completions.create(**{**how, "n": 1, **SEEDED}, best_of=3)
    assert len(best.choices) == 1


def test_models(server: Served):
    assert [model.id for model in server.client.models.list()] == ["bundled"]
    assert server.client.models.retrieve("bundled").owned_by == "paged-jax"
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.completions.create(model="gpt-0", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_tokens_and_back(server: Served):
    text = "The old sailor\n counted to 12."

    def asked(path: str, **body):
        return server.http.post(f"{server.url}/{path}", json=body).json()

    told = asked("tokenize", model="bundled", prompt=text)
    assert told["tokens"] == TOKENIZER.encode(text) and told["count"] == len(told["tokens"])
    bare = asked("tokenize", prompt=text, add_special_tokens=False)
    assert bare["tokens"] == told["tokens"][1:]
    chat = asked("tokenize", messages=CHAT)
    assert chat["tokens"] == TOKENIZER.encode(CHAT_TEXT, add_special_tokens=False)
    assert asked("detokenize", tokens=told["tokens"]) == {"prompt": text}


def test_figures_in_prometheus_format(server: Served):
    server.client.completions.create(model="bundled", prompt="a cat", max_tokens=3)
    lines = server.http.get(f"{server.url}/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines
              if not line.startswith("#")}  # fmt: skip
    assert values['paged_prompts_total{reason="length"}'] >= 1
    assert values["paged_time_to_first_token_seconds_count"] >= 1
    assert (
        values["paged_request_seconds_count"] == values["paged_time_to_first_token_seconds_count"]
    )
    assert values["paged_steps_total"] >= 3 and values["paged_output_tokens_total"] >= 3
    assert values['paged_http_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert values['paged_running{runner="engine"}'] == 0
    assert values['paged_kv_bytes{pool="blocks",runner="engine"}'] == 0
    assert values['paged_kv_bytes_total{pool="blocks",runner="engine"}'] > 0


def test_many_at_once_get_their_own(server: Served, offline: Engine):
    def ask(i: int) -> str:
        how = {"model": "bundled", "prompt": f"{i} cats", "max_tokens": 10 + i, "seed": i}
        if i % 2:
            return server.client.completions.create(**how).choices[0].text
        return joined(server.client.completions.create(stream=True, **how))[0]

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, range(24)))
    for i, text in enumerate(texts):
        assert [text] == expected(offline, f"{i} cats", max_tokens=10 + i, seed=i)
    assert not any(server.wait_until_idle().values())
