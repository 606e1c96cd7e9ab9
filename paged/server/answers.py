"""Outputs in OpenAI's shapes: choices, log-probabilities and usage."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged.requests.sequence import RequestOutput, TokenLogprob
from paged.requests.stopping import TextStream
from paged.server.token_text import TokenTexts, offsets

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
LEAST_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(frozen=True)
class Delta:
    """The new part of choice `index`; all of it if it is not streamed.

    logprobs: of `tokens`, if requested.
    first: whether the part begins with the first token.
    echoed: number of characters of the prompt before it.
    offsets: where the prompt's tokens begin among these characters.
    """

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob | None] | None
    finish_reason: str | None
    first: bool = False
    echoed: int = 0
    offsets: Sequence[int] = ()


@dataclass
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: RequestOutput, generated: bool = True) -> None:
        self.prompt_tokens += len(output.prompt_tokens)
        self.completion_tokens += generated * sum(len(s.tokens) for s in output.sequences)
        self.cached_tokens += output.cached_tokens

    @property
    def content(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB


class Shape:
    """The frame of an API's answers. name: of the model that was asked for. token_ids: whether
    choices have those of their tokens."""

    whole: str
    chunk: str

    def __init__(self, texts: TokenTexts, answer_id: str, name: str, token_ids: bool = False):
        self._texts, self._id, self._name = texts, answer_id, name
        self._token_ids = token_ids
        self._created = int(time.time())

    def answer(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._frame(self.whole) | {"choices": choices, "usage": usage.content}

    def chunks(self, choices: list[dict[str, Any]], usage: bool) -> dict[str, Any]:
        """usage: whether a last chunk will tell it; until then it is null."""
        told = {"usage": None} if usage else {}
        return self._frame(self.chunk) | {"choices": choices} | told

    def last_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._frame(self.chunk) | {"choices": [], "usage": usage.content}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name}

    def choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def streamed(self, delta: Delta) -> dict[str, Any]:
        return self.choice(delta)

    def ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": list(delta.tokens)} if self._token_ids else {}

    def token(self, logprob: TokenLogprob) -> dict[str, Any]:
        """A token with its alternatives, in the shape of the chat API."""
        top = [self._one(*each) for each in logprob.top.items()]
        return self._one(logprob.token, logprob.logprob) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, spelt = self._texts.text(token), self._texts.bytes(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(spelt)}

    def prompt_logprobs(self, output: RequestOutput) -> dict[str, Any]:
        if output.prompt_logprobs is None:
            return {}
        told = [None if each is None else self.token(each) for each in output.prompt_logprobs]
        return {"prompt_logprobs": told}


class CompletionShape(Shape):
    whole = chunk = "text_completion"

    def __init__(self, texts: TokenTexts, answer_id: str, name: str, token_ids: bool = False):
        super().__init__(texts, answer_id, name, token_ids)
        self._streams: dict[int, TextStream] = {}  # the tokens answered so far, by choice

    def choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None if delta.logprobs is None else self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        } | self.ids(delta)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert delta.logprobs is not None
        stream = self._streams.setdefault(delta.index, self._texts.stream())
        output = offsets(stream, delta.tokens[len(delta.offsets) :])
        asked = any(each is not None and each.top for each in delta.logprobs)
        return {
            "tokens": [self._text(token) for token in delta.tokens],
            "token_logprobs": [None if p is None else finite(p.logprob) for p in delta.logprobs],
            "top_logprobs": [self._top(each) for each in delta.logprobs] if asked else None,
            "text_offset": [*delta.offsets, *(delta.echoed + at for at in output)],
        }

    def _text(self, token: int) -> str:
        return self._texts.text(token, "bytes:")

    def _top(self, logprob: TokenLogprob | None) -> dict[str, float] | None:
        """The alternatives by their text, best first, and the token itself. A token with the same
        text as another is named by its id, in vLLM's notation."""
        if logprob is None:
            return None
        values = {**logprob.top, logprob.token: logprob.logprob}
        names: dict[str, int] = {}
        for token in (logprob.token, *logprob.top):
            if names.setdefault(self._text(token), token) != token:
                names[f"token_id:{token}"] = token
        named = {token: name for name, token in names.items()}
        return {named[token]: finite(value) for token, value in values.items()}


class ChatShape(Shape):
    whole, chunk = "chat.completion", "chat.completion.chunk"

    def _rest(self, delta: Delta) -> dict[str, Any]:
        told = None
        if delta.logprobs is not None:
            content = [self.token(each) for each in delta.logprobs if each is not None]
            told = {"content": content, "refusal": None}
        return {"logprobs": told, "finish_reason": delta.finish_reason} | self.ids(delta)

    def choice(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": delta.index, "message": message} | self._rest(delta)

    def streamed(self, delta: Delta) -> dict[str, Any]:
        told: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if delta.text or delta.first:
            told["content"] = delta.text
        return {"index": delta.index, "delta": told} | self._rest(delta)
