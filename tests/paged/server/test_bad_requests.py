"""Bad requests get an error in OpenAI's format with the field's name, and disturb no others."""

import json
import threading
from typing import Any

import httpx2
import pytest

from paged.requests.sampling_params import SamplingParams
from paged.server.openai_format import ApiError
from paged.server.settings import ServerConfig
from paged.server.validation import MAX_DEPTH, check_lengths
from tests.paged.server.serving import TEMPLATE, Served, served, simulated

COMPLETION = {"model": "bundled", "prompt": "a cat", "max_tokens": 2}
MESSAGES = [{"role": "user", "content": "a"}]
CHAT = {"model": "bundled", "messages": MESSAGES, "max_tokens": 2}
BIASES = {str(token): 1 for token in range(301)}

# (field that the error names, changes of a good request)
BAD_COMPLETIONS: list[tuple[str | None, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("prompt", {"prompt": ["a", 5]}),
    ("prompt", {"prompt": [[1, 2], "a"]}),
    ("prompt", {"prompt": [1, -5]}),
    ("prompt", {"prompt": [1, 512]}),
    ("prompt", {"prompt": [1, 2**70]}),
    ("prompt", {"prompt": [1, 2.5]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": ["a", "cat " * 10_000]}),
    ("prompt", {"prompt": ["a"] * 200}),
    ("model", {"model": None}),
    ("model", {"model": "gpt-0"}),
    ("model", {"model": 5}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": 2.5}),
    ("max_tokens", {"max_tokens": 2**40}),
    ("temperature", {"temperature": -0.5}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": 1e60}),
    ("temperature", {"temperature": float("nan")}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 2}),
    ("n", {"n": 0}),
    ("n", {"n": 2, "temperature": 0}),
    ("n", {"n": 100}),
    ("n", {"n": True}),
    ("best_of", {"n": 3, "best_of": 2}),
    ("best_of", {"best_of": 3, "stream": True}),
    ("beam_width", {"beam_width": 50}),
    ("temperature", {"beam_width": 2, "temperature": 0.5}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**40}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": True}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("echo", {"echo": True, "logprobs": 1, "stream": True}),
    ("echo", {"echo": "yes"}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": 5}),
    ("stop", {"stop": "<unk>", "beam_width": 2, "temperature": 0}),
    ("stop_token_ids", {"stop_token_ids": [9999]}),
    ("logit_bias", {"logit_bias": {"a": 1}}),
    ("logit_bias", {"logit_bias": {"5": 1000}}),
    ("logit_bias", {"logit_bias": {"9999": 1}}),
    ("logit_bias", {"logit_bias": BIASES}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("forced_output", {"forced_output": [4, 4, 4]}),
    ("stream", {"stream": "true"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": {"include_all": True}}),
    ("grammar", {"grammar": "a*"}),
    # Each token would be compared with all entries.
    ("stop", {"stop": ["a"] * 65}),
    ("stop", {"stop": "a" * 1025}),
    ("stop_token_ids", {"stop_token_ids": [4] * 1025}),
    (None, {f"field {i}": None for i in range(1001)}),
]  # fmt: skip
BAD_CHATS: list[tuple[str | None, dict[str, Any]]] = [
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages", {"messages": [{"content": "a"}]}),
    ("messages", {"messages": [{"role": "user", "content": 5}]}),
    ("messages", {"messages": [{"role": "nobody", "content": "a"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"eos_token": "a"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"bos_token": "a"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "a"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 50}),
    ("logprobs", {"logprobs": 3}),
    ("messages", {"messages": [{"role": "user", "content": "cat " * 10_000}]}),
    ("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": -3}),
    ("max_tokens", {"max_tokens": 0}),
]  # fmt: skip
# This template fails in the way that the request's variables choose.
FAILING = (
    TEMPLATE + "{{ deep | default(0) | tojson }}{{ 1 // (divisor | default(1)) }}"
    "{{ 'a' * (times | default(0)) }}{% for i in range(count | default(0)) %}{% endfor %}"
    "{{ raise_exception(why) if why else '' }}{{ (1).nothing.more if attribute else '' }}"
)
BODIES = [
    b"", b"{", b"[]", b"5", b'"a"', b"null", b"\xff\xfe", b'{"model": "bundled", "prompt":',
    b'{"model": "bundled", "prompt": "a", "\\ud800": 1}',
    b'{"model": "bundled", "prompt": "a", "stop": "\\ud800"}',
    b"[" * 100_000, b'{"model": "bundled", "prompt": ' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    settings = ServerConfig(max_body_bytes=200_000, max_pending=300)
    with served(simulated(step_s=0.002)[0], settings=settings, template=FAILING) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def another(server: Served):
    """A client that repeats one request during these tests always gets the text of that request
    alone."""
    how = {"prompt": "a bystander", "max_tokens": 400, "seed": 3, "temperature": 0.7}
    answers: list[str] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            answer = server.client.completions.create(model="bundled", **how)
            answers.append(answer.choices[0].text)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    ended.set()
    thread.join()
    sampling = SamplingParams(max_tokens=400, seed=3, temperature=0.7)
    alone = simulated()[0].generate(["a bystander"], sampling)[0].text
    assert answers and set(answers) == {alone}
    assert not any(server.wait_until_idle().values())


def check(response: httpx2.Response, field: str | None) -> None:
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field, error
    assert field is None or field in error["message"]
    assert response.headers["x-request-id"]


MODEL, PROMPT = {"model": "bundled"}, {"prompt": "a cat"}
LONG_TEXT = "cat " * 10_000
OTHERS: list[tuple[str | None, str, Any]] = [
    ("model", "v1/completions", PROMPT),
    ("prompt", "v1/completions", MODEL),
    (None, "v1/embeddings", {**MODEL, "input": "a"}),
    ("prompt", "tokenize", {}),
    ("prompt", "tokenize", {**PROMPT, "messages": []}),
    ("prompt", "tokenize", {"prompt": 5}),
    (None, "tokenize", {"prompt": "\ud800"}),
    ("prompt", "tokenize", {"prompt": LONG_TEXT}),
    ("messages", "tokenize", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
    ("model", "tokenize", {**PROMPT, "model": "gpt-0"}),
    ("tokens", "detokenize", {"tokens": [600]}),
    ("tokens", "detokenize", {"tokens": "a"}),
    ("tokens", "detokenize", {"tokens": [4] * 1025}),
    *((None, "v1/completions", body) for body in BODIES),
]
REFUSED = [
    *((field, "v1/completions", COMPLETION | change) for field, change in BAD_COMPLETIONS),
    *((field, "v1/chat/completions", CHAT | change) for field, change in BAD_CHATS),
    *OTHERS,
]


@pytest.mark.parametrize(("field", "path", "body"), REFUSED, ids=range(len(REFUSED)))
def test_the_field_that_is_wrong_is_named(server: Served, field, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    check(server.http.post(f"{server.url}/{path}", content=content, headers=headers), field)


def test_paths_and_methods_that_there_are_not(server: Served):
    check(server.http.get(f"{server.url}/v1/nothing"), None)
    check(server.http.get(f"{server.url}/v1/completions"), None)
    check(server.http.delete(f"{server.url}/v1/models"), None)


def test_adapters_are_loaded_only_where_that_is_allowed(server: Served):
    body = {"lora_name": "mine", "lora_path": "/nowhere"}
    response = server.http.post(f"{server.url}/v1/load_lora_adapter", json=body)
    assert response.status_code == 403
    assert "allow_adapter_loading" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("prompt", {"prompt": [{}] * 1000}),
        ("prompt", {"prompt": [[4, 1.5]] * 1000}),
        ("prompt", {"prompt": [[[[4] * 1025]]]}),
        ("stop", {"stop": [5] * 1000}),
        ("stop_token_ids", {"stop_token_ids": ["a"] * 1000}),
        ("logit_bias", {"logit_bias": {str(i): "a" for i in range(1000)}}),
        ("metadata", {"metadata": {str(i): 5 for i in range(5000)}}),
        ("a,[b", {"a,[b": [4] * 1025}),
    ],
)
def test_a_body_that_is_wrong_everywhere_is_told_of_the_first(server: Served, field, wrong):
    """A body of 8 MiB may have a million errors, and a response with all would take gigabytes."""
    body = {**COMPLETION, **wrong}
    response = server.http.post(f"{server.url}/v1/completions", json=body)
    check(response, field)
    assert len(response.content) < 1000


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def deep(depth: int) -> dict[str, Any]:
    """A request with lists and maps nested `depth` deep."""
    return {**CHAT, "chat_template_kwargs": {"value": nested(depth - 2)}}


KWARGS, CONTEXT = "chat_template_kwargs", "context_length_exceeded"
CANNOT, FAILS, DEEP = (
    "this server does not support it",
    "the chat template refuses",
    "in each other",
)
LONG_CHAT = [{"role": "user", "content": "cat " * 600}]
# (path, changes of a good request, field and code of the error, words of its message)
REFUSALS: list[tuple[str, dict[str, Any], str, str | None, tuple[str, ...]]] = [
    ("completions", {"suffix": "the end"}, "suffix", None, (CANNOT,)),
    *[("chat/completions", {name: "high"}, name, None, (CANNOT,))
      for name in ("tools", "functions", "reasoning_effort", "prediction")],
    *[("completions", {"prompt": prompt}, "prompt", CONTEXT, ())
      for prompt in ("cat " * 600, "cat " * 10_000, [4] * 512)],
    ("chat/completions", {"messages": LONG_CHAT}, "messages", CONTEXT, ()),
    # Clients retry after CONTEXT with a shorter prompt, which does not help a nested one.
    ("completions", {"prompt": nested(70)}, "prompt", None, (DEEP,)),
    ("chat/completions", {KWARGS: {"deep": nested(1500)}}, KWARGS, None, (DEEP,)),
    # Templates would take seconds to render these.
    ("chat/completions", {"messages": MESSAGES * 513},
     "messages", CONTEXT, ("513 messages",)),
    ("chat/completions", {KWARGS: {"documents": [{"text": "a" * 100_000}]}}, KWARGS, CONTEXT, ()),
    *[("chat/completions", {KWARGS: variables}, "messages", None, (FAILS, reason))
      for variables, reason in [
        ({"divisor": 0}, "by zero"),
        ({"count": 10**9}, "Range too big"), ({"times": 10**17}, "MemoryError"),
        ({"times": 10**30}, "index-sized"), ({"times": []}, "can't multiply"),
        ({"attribute": True}, "no attribute"), ({"why": "a" * 10_000}, "aaa"),
    ]],
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "change", "param", "code", "words"), REFUSALS, ids=range(len(REFUSALS))
)
def test_refusals(server: Served, path, change, param, code, words):
    good = COMPLETION if path == "completions" else CHAT
    answer = server.http.post(f"{server.url}/v1/{path}", json=good | change)
    assert answer.status_code == 400 and len(answer.content) < 2000
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert all(word in error["message"] for word in (param, *words))


def test_bodies_are_as_long_and_deep_as_they_may_be(server: Served):
    text = '[4, {"a": 5}]\\" ' * 5
    url = f"{server.url}/v1/chat/completions"
    for body in (deep(MAX_DEPTH), {**CHAT, "messages": [{"role": "user", "content": text}]}):
        assert server.http.post(url, json=body).status_code == 200
    check(server.http.post(url, json=deep(MAX_DEPTH + 1)), "chat_template_kwargs")
    check_lengths(
        json.dumps([[4] * 100, [4] * 100, {"a": "," * 1000}, "[" * 1000]).encode(), 100, 300
    )
    longer: list[Any]
    for longer in ([4] * 101, [["a"] * 101], [{"a": {"b": [[]] * 101}}]):
        with pytest.raises(ApiError, match="at most 100 items"):
            check_lengths(json.dumps(longer).encode(), 100, 300)
    with pytest.raises(ApiError, match="at most 100 items"):  # too many in all lists
        check_lengths(json.dumps([[4] * 100] * 4).encode(), 100, 300)
    for text in ("\\", '"', '\\"', '"\\', '\\\\"[,' * 200):
        check_lengths(json.dumps([text] * 100).encode(), 100, 100)
        with pytest.raises(ApiError, match="at most 100 items"):
            check_lengths(json.dumps([text] * 101).encode(), 100, 300)
