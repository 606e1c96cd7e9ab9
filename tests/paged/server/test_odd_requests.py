"""Unusual requests that real clients send: legal ones are served, others refused with a reason."""

from dataclasses import replace
from typing import Any

import pytest

from paged.adapters.known import KnownAdapters
from paged.requests.stopping import decode
from tests.paged.server.serving import (
    BUNDLED,
    CONFIG,
    KEY,
    TOKENIZER,
    Served,
    joined,
    scripted,
    served,
    simulated,
)

COMPLETION = {"model": "bundled", "prompt": "a cat", "max_tokens": 4, "seed": 1}
MESSAGES = [{"role": "user", "content": "Who?"}]
CHAT = {"model": "bundled", "messages": MESSAGES, "max_tokens": 4, "seed": 1}
CACHING = replace(CONFIG, prefix_caching=True)
LONG = "The old sailor counted to five. " * 8


def post(server: Served, path: str, body: dict[str, Any]):
    return server.http.post(f"{server.url}/v1/{path}", json=body)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": []}, {"tools": None}, {"functions": []}, {"tool_choice": "none"},
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True},
        {"reasoning_effort": None}, {"reasoning_effort": ""}, {"verbosity": None},
        {"modalities": ["text"], "audio": None, "prediction": None, "web_search_options": None},
        {"logprobs": False, "top_logprobs": 0}, {"stop": []}, {"logit_bias": {}},
        {"stop": "</s>"}, {"stop": ["</s>"], "beam_width": 2},
    ],
    ids=str,
)  # fmt: skip
def test_empty_fields_are_no_wishes(server: Served, more):
    alone = {name: value for name, value in more.items() if name == "beam_width"}
    wanted = post(server, "chat/completions", CHAT | alone).json()
    answer = post(server, "chat/completions", CHAT | more)
    assert answer.status_code == 200, answer.text
    if not alone:  # a simulated engine's beams depend on their slots
        assert answer.json()["choices"] == wanted["choices"]


def test_an_answer_may_be_sent_back(server: Served):
    """A message of OpenAI's client has null fields, which do not change the prompt."""
    create = server.client.chat.completions.create
    message = create(**CHAT).choices[0].message
    lengths = [
        create(**CHAT | {"messages": [*MESSAGES, told, *MESSAGES]}).usage.prompt_tokens
        for told in (
            message,
            message.model_dump(),
            {"role": "assistant", "content": message.content},
        )
    ]
    assert len(set(lengths)) == 1


def test_the_text_of_a_special_token_means_the_token():
    """A stop string that spells a special token stops streams too, and `ignore_eos` does not affect
    it."""
    unknown, end = TOKENIZER.convert_tokens_to_ids(["<unk>", "</s>"])
    tokens = [90, 91, 92, unknown, 93, end]
    with served(scripted(tokens, 3)) as server:

        def text(stop, **more) -> tuple[str, str]:
            how = {"model": "bundled", "prompt": [4, 4, 4], "max_tokens": 20, "stop": stop}
            choice = server.client.completions.create(**how, extra_body=more).choices[0]
            chunks = list(server.client.completions.create(**how, extra_body=more, stream=True))
            assert joined(chunks) == [choice.text]
            assert chunks[-1].choices[0].finish_reason == choice.finish_reason
            return choice.text, choice.finish_reason

        letters = decode(TOKENIZER, tokens[:3])
        whole = letters + decode(TOKENIZER, [93])
        assert text("<unk>") == text(["never", "<unk>"]) == (letters, "stop")
        assert text("</s>") == text(None) == (whole, "stop")
        assert text("</s>", ignore_eos=True) == (whole, "stop")
        assert text(None, ignore_eos=True)[1] == "length"
        assert text(whole[2], stop_token_ids=[unknown]) == (whole[:2], "stop")


def test_texts_with_and_without_special_tokens(server: Served):
    bare = TOKENIZER.encode("a cat", add_special_tokens=False)
    for wish, more in ((None, 1), (True, 1), (False, 0)):
        body = COMPLETION | {"add_special_tokens": wish, "return_token_ids": True, "echo": True}
        body["suffix"] = ""  # the same as no suffix
        answer = post(server, "completions", body).json()
        assert answer["usage"]["prompt_tokens"] == len(bare) + more
        assert answer["choices"][0]["token_ids"][more : len(bare) + more] == bare
    assert post(server, "completions", COMPLETION | {"add_special_tokens": "no"}).status_code == 400
    nothing = COMPLETION | {"prompt": "", "add_special_tokens": False}
    assert "empty" in post(server, "completions", nothing).json()["error"]["message"]
    counts = [
        server.http.post(f"{server.url}/tokenize", json={"messages": MESSAGES} | wish).json()[
            "count"
        ]
        for wish in ({}, {"add_special_tokens": False}, {"add_special_tokens": True})
    ]  # a chat template writes its own special tokens
    assert counts[0] == counts[1] == counts[2] - 1


def test_templates_have_variables_of_requests(server: Served):
    variables = {"enable_thinking": False, "tools": [], "documents": []}
    body = CHAT | {"chat_template_kwargs": variables}
    assert post(server, "chat/completions", body).status_code == 200


def test_heads_of_what_can_be_got(server: Served):
    for path in ("/health", "/v1/models", "/v1/models/bundled", "/", "/openapi.json", "/metrics"):
        head, whole = server.http.head(server.url + path), server.http.get(server.url + path)
        assert head.status_code == whole.status_code == 200
        assert head.content == b"" and int(head.headers["content-length"]) > 0
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert server.http.head(f"{server.url}/state").status_code == 200
    assert server.http.head(f"{server.url}/v1/models/gpt-0").status_code == 404
    refused = server.http.head(f"{server.url}/v1/completions")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"


def test_keys_share_no_cached_prefix():
    """With a shared prefix, `cached_tokens` would reveal the prompts of other keys."""

    def cached(server: Served, key: str | None, **more) -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = COMPLETION | {"prompt": LONG, **more}
        answer = server.http.post(f"{server.url}/v1/completions", json=body, headers=headers)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with served(simulated(CACHING)[0], CACHING, keys=[KEY, "other"]) as server:
        assert cached(server, KEY) == 0
        most = cached(server, KEY)
        assert most == (len(TOKENIZER.encode(LONG)) - 1) // 16 * 16 > 0
        assert cached(server, "other") == 0 and cached(server, "other") == most
        assert cached(server, KEY, cache_salt="own") == 0
        assert cached(server, KEY, cache_salt="own") == most
        assert cached(server, KEY) == most
    with served(simulated(CACHING)[0], CACHING) as server:
        assert cached(server, None) == 0 and cached(server, None) == most


def test_models_are_told_without_their_folders_and_chat_without_a_template_is_refused():
    folder = "models/bundled/adapters/reversed"
    with served(simulated()[0], template=None) as server:
        error = post(server, "chat/completions", CHAT).json()["error"]
        assert (error["param"], error["code"]) == ("messages", "no_chat_template")
        server.service.adapters.add(KnownAdapters(BUNDLED, CONFIG).read("reversed", folder))
        answer = server.http.get(f"{server.url}/v1/models")
        model, adapter = answer.json()["data"]
        assert (model["id"], model["root"], model["parent"]) == ("bundled", "bundled", None)
        assert (adapter["id"], adapter["root"], adapter["parent"]) == (
            "reversed",
            "bundled",
            "bundled",
        )
        assert "/" not in answer.text
