"""Responses in OpenAI's format: choices, log-probabilities and usage."""

import math
import time
from collections.abc import Sequence
from typing import Any

from paged.requests.sequence import RequestOutput, TokenLogprob
from paged.requests.token_texts import TokenTexts
from paged.server.generation import Delta

MIN_LOGPROB = -9999.0  # JSON has no -inf.


def usage(outputs: Sequence[RequestOutput], silent: bool) -> dict[str, Any]:
    """Counts of tokens.

    silent: whether max_tokens is 0 (with echo). Then the completion has 0 tokens.
    """
    prompt = sum(len(output.prompt_tokens) for output in outputs)
    sequences = [sequence for output in outputs for sequence in output.sequences]
    completion = 0 if silent else sum(len(sequence.tokens) for sequence in sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.cached_tokens for o in outputs)},
    }


class ResponseFormat:
    """Builds the responses of one API: completions, or chat completions.

    name: the requested model.
    token_ids: whether choices have the ids of their tokens.
    """

    whole: str
    chunk: str

    def __init__(self, texts: TokenTexts, response_id: str, name: str, token_ids: bool = False):
        self._texts, self._id, self._name = texts, response_id, name
        self._token_ids, self._created = token_ids, int(time.time())

    def response(self, choices: list[dict[str, Any]], counts: dict[str, Any]) -> dict[str, Any]:
        return self._frame(self.whole, choices) | {"usage": counts}

    def event(self, choices: list[dict[str, Any]], **usage: Any) -> dict[str, Any]:
        """usage: counts in the last chunk, null in earlier chunks, absent if not requested."""
        return self._frame(self.chunk, choices) | usage

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = {"id": self._id, "object": kind, "created": self._created, "model": self._name}
        return frame | {"choices": choices}

    def choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def streamed(self, delta: Delta) -> dict[str, Any]:
        return self.choice(delta)

    def ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": list(delta.tokens)} if self._token_ids else {}

    def token(self, logprob: TokenLogprob) -> dict[str, Any]:
        """A token with its alternatives, in the format of the chat API."""
        top = [self._one(*each) for each in logprob.top.items()]
        return self._one(logprob.token, logprob.logprob) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, spelt = self._texts.text(token), self._texts.bytes(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(spelt)}

    def prompt_logprobs(self, output: RequestOutput) -> dict[str, Any]:
        logprobs = output.prompt_logprobs
        if logprobs is None:
            return {}
        return {"prompt_logprobs": [None if p is None else self.token(p) for p in logprobs]}


class CompletionFormat(ResponseFormat):
    whole = chunk = "text_completion"

    def choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None if delta.logprobs is None else self._logprobs(delta, delta.logprobs),
            "finish_reason": delta.finish_reason,
        } | self.ids(delta)

    def _logprobs(
        self, delta: Delta, logprobs: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:  # fmt: skip
        alternatives = any(each is not None and each.top for each in logprobs)
        return {
            "tokens": [self._text(token) for token in delta.tokens],
            "token_logprobs": [None if p is None else finite(p.logprob) for p in logprobs],
            "top_logprobs": [self._top(each) for each in logprobs] if alternatives else None,
            "text_offset": list(delta.offsets),
        }

    def _text(self, token: int) -> str:
        return self._texts.text(token, "bytes:")

    def _top(self, logprob: TokenLogprob | None) -> dict[str, float] | None:
        """Log-probabilities of the alternatives, best first, and of the token itself. The keys are
        texts. If two tokens have the same text, the key of the second is its id, in vLLM's
        notation."""
        if logprob is None:
            return None
        values = {**logprob.top, logprob.token: logprob.logprob}
        names: dict[str, int] = {}
        for token in (logprob.token, *logprob.top):
            if names.setdefault(self._text(token), token) != token:
                names[f"token_id:{token}"] = token
        name_of = {token: name for name, token in names.items()}
        return {name_of[token]: finite(value) for token, value in values.items()}


class ChatFormat(ResponseFormat):
    whole, chunk = "chat.completion", "chat.completion.chunk"

    def choice(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": delta.index, "message": message} | self._rest(delta)

    def streamed(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if delta.text or delta.first:
            message["content"] = delta.text
        return {"index": delta.index, "delta": message} | self._rest(delta)

    def _rest(self, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            content = [self.token(each) for each in delta.logprobs if each is not None]
            logprobs = {"content": content, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": delta.finish_reason} | self.ids(delta)


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
