"""What a request asks of the engine: prompts, and how they are decoded."""

from collections.abc import Mapping
from typing import Any

from paged.requests.sampling_params import SamplingParams
from paged.server.errors import ApiError, refused
from paged.server.schema import ChatRequest, CompletionRequest, Sampling
from paged.server.service import Service

# Fields that are called and mean the same in the API and in SamplingParams.
SHARED = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p",
    "repetition_penalty", "stop_token_ids", "ignore_eos", "forced_output", "prompt_logprobs",
    "best_of", "beam_width", "length_penalty", "early_stopping",
)  # fmt: skip
# What the engine's messages call them, and how the requests do.
NAMES = {name: name for name in (*SHARED, "stop", "logit_bias", "max_tokens", "logprobs")}
NAMES["sequences"] = "n"
COMPLETION_TOKENS = 16  # OpenAI's default


def of_completion(body: CompletionRequest, service: Service) -> SamplingParams:
    """Raises ApiError, naming the field."""
    values = shared(body, service)
    most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and body.echo:
        most = 1  # the engine's least; the answer leaves it out
    values |= {"max_tokens": most, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    return made(body, values, NAMES)


def of_chat(body: ChatRequest, service: Service, room: int) -> SamplingParams:
    """room: tokens that the context leaves. Raises ApiError, naming the field."""
    values, names = shared(body, service), NAMES | {"logprobs": "top_logprobs"}
    values["max_tokens"] = max(1, room)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) is not None:
            values["max_tokens"], names["max_tokens"] = getattr(body, name), name
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    return made(body, values, names)


def shared(body: Sampling, service: Service) -> dict[str, Any]:
    values = {name: getattr(body, name) for name in SHARED}
    values = {name: value for name, value in values.items() if value is not None}
    searches = values.get("beam_width", 1) != 1
    values.setdefault("temperature", 0.0 if searches else 1.0)
    if body.stop is not None:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        special = service.texts.special
        # No output has the text of a special token: as a stop string it means the token.
        values["stop"] = [text for text in stop if text not in special]
        ends = () if body.ignore_eos else service.model.eos_token_ids
        tokens = [special[text] for text in stop if text in special and special[text] not in ends]
        values["stop_token_ids"] = [*values.get("stop_token_ids", ()), *tokens]
    if body.logit_bias is not None:
        values["logit_bias"] = _token_ids(body.logit_bias)
    return values


def _token_ids(bias: Mapping[str, float]) -> dict[int, float]:
    for name in bias:
        if not (name.isascii() and name.isdecimal() and len(name) < 20):
            raise ApiError(400, f"logit_bias: {name[:80]!r} is no token id", "logit_bias")
    return {int(name): value for name, value in bias.items()}


def made(body: Sampling, values: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    if body.stop_token_ids is None:
        names = {**names, "stop_token_ids": "stop"}
    try:
        sampling = SamplingParams(**values)
    except ValueError as error:
        raise refused(error, names, "n") from None
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if body.stream and sampling.prompt_logprobs is not None:
        name = "prompt_logprobs" if body.prompt_logprobs is not None else "echo"
        message = f"{name}: log-probabilities of prompts come with whole answers: without stream"
        raise ApiError(400, message, name)
    if body.stream and sampling.ranks:
        message = "best_of above n cannot be streamed: which are the best is known at the end"
        raise ApiError(400, message, "best_of")
    return sampling


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One or several prompts, as several."""
    if isinstance(prompt, str):
        return [prompt]
    given: list[Any] = prompt
    return [given] if given and isinstance(given[0], int) else given
