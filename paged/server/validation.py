"""Validation of requests: bounds of a body before it is parsed, sampling parameters, prompts."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request
from pydantic import ValidationError

from paged.requests.sampling_params import SamplingParams
from paged.server import openai_format as api
from paged.server.openai_format import (
    MAX_FIELDS,
    MAX_STOP_TOKENS,
    TOO_LONG,
    ApiError,
    Body,
    body_error,
    engine_error,
)
from paged.server.service import Service

LONG_BODY = 4096  # bytes above which a body is parsed in a thread
MAX_DEPTH = 64  # depth of nested lists and maps
# A bracket, a quote, or the text between them, in pieces short enough to let other threads run.
_PIECE = re.compile(rb'[][{}"]|[^][{}"]{1,65536}')
# Fields with the same name and meaning in the API and in SamplingParams.
SHARED = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p",
    "repetition_penalty", "stop_token_ids", "ignore_eos", "forced_output", "prompt_logprobs",
    "best_of", "beam_width", "length_penalty", "early_stopping",
)  # fmt: skip
# Names in the engine's messages → fields of requests.
NAMES = {name: name for name in (*SHARED, "stop", "logit_bias", "max_tokens", "logprobs")}
NAMES["sequences"] = "n"
COMPLETION_TOKENS = 16  # OpenAI's default
MAX_REASON = 1000  # characters of a template's error, which may quote the request
# Parameters of `apply_chat_template` that a request may set beside a template's own variables.
TEMPLATE_PARAMETERS = {"tools", "documents", "continue_final_message"}


async def read[B: Body, T](
    service: Service, request: Request, kind: type[B], use: Callable[[Service, B], T]
) -> T:
    """Parse a request's body as `kind`, and return `use(service, body)`. Both run in a thread if
    the body is long. Raises ApiError for a body that is no `kind`.

    Parsing holds Python's global lock: 0.1 s for the longest allowed body. An overlong list would
    take seconds, so `check_lengths` refuses it before parsing.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    content = b"".join([part async for part in request.stream()])
    max_prompts = service.settings.max_prompts
    max_items = max(service.config.max_model_len, max_prompts, MAX_STOP_TOKENS)

    def work() -> T:
        if media_type != "application/json":
            raise body_error([])
        check_lengths(content, max_items, max_items * (max_prompts + 1))
        try:
            body = kind.model_validate_json(content)
        except ValidationError as error:
            raise body_error(error.errors(include_url=False, include_input=False)) from None
        return use(service, body)

    return work() if len(content) <= LONG_BODY else await service.in_thread(work)


def check_lengths(content: bytes, max_items: int, max_total: int) -> None:
    """Raise ApiError for JSON with a list of more than `max_items`, a map of more than MAX_FIELDS,
    more than `max_total` commas in all, or lists and maps nested deeper than MAX_DEPTH. Text that
    is not JSON may pass, because the parser will refuse it."""
    room: list[int] = []  # commas still allowed in each open list or map
    field = None  # last string in the outermost map, which names the next value
    at = 0
    while found := _PIECE.match(content, at):
        piece, at = found[0], found.end()
        if piece == b'"':
            end = _end_of_string(content, at)
            field = content[at - 1 : end] if len(room) == 1 else field
            at = end
        elif piece in (b"[", b"{"):
            room.append((max_items if piece == b"[" else MAX_FIELDS) - 1)
            if len(room) > MAX_DEPTH:
                message = f"at most {MAX_DEPTH} lists and maps may be in each other"
                raise _length_error(field, message, too_long=False)
        elif piece in (b"]", b"}"):
            if room:
                room.pop()
        elif room and (commas := piece.count(b",")):
            room[-1] -= commas
            max_total -= commas
            if room[-1] < 0 or max_total < 0:
                message = f"at most {max_items} items of a list, and {MAX_FIELDS} of a map"
                raise _length_error(field if len(room) > 1 else None, message)


def _end_of_string(content: bytes, at: int) -> int:
    """The index after the quote that ends a string."""
    while (end := content.find(b'"', at)) >= 0:
        before = content[at:end]
        at = end + 1
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return at
    return len(content)


def _length_error(field: bytes | None, message: str, too_long: bool = True) -> ApiError:
    try:
        name = None if field is None else str(json.loads(field))[:80]
    except ValueError:
        name = None
    code = TOO_LONG if too_long and name in ("prompt", "messages") else None
    return ApiError(400, f"{name or 'the body'}: {message}", name, code)


def completion_sampling(service: Service, body: api.CompletionRequest) -> SamplingParams:
    """A completion's sampling parameters. Raises ApiError, naming the field."""
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # the engine's minimum; the response leaves it out
    values: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    return _sampling(service, body, values, NAMES)


def chat_sampling(service: Service, body: api.ChatRequest, room: int) -> SamplingParams:
    """A chat completion's sampling parameters. Raises ApiError, naming the field.

    room: tokens of max_model_len beyond the prompt.
    """
    values: dict[str, Any] = {"max_tokens": max(1, room)}
    names = NAMES | {"logprobs": "top_logprobs"}
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) is not None:
            values["max_tokens"], names["max_tokens"] = getattr(body, name), name
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    return _sampling(service, body, values, names)


def _sampling(
    service: Service,
    body: api.GenerationRequest,
    values: dict[str, Any],
    names: Mapping[str, str],
) -> SamplingParams:
    values = _shared(service, body) | values
    if body.stop_token_ids is None:
        names = {**names, "stop_token_ids": "stop"}
    try:
        sampling = SamplingParams(**values)
    except ValueError as error:
        raise engine_error(error, names, "n") from None
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if body.stream and sampling.prompt_logprobs is not None:
        name = "prompt_logprobs" if body.prompt_logprobs is not None else "echo"
        message = f"{name}: log-probabilities of prompts come with whole answers: without stream"
        raise ApiError(400, message, name)
    if body.stream and sampling.ranks:
        message = "best_of above n cannot be streamed: the best samples are known at the end"
        raise ApiError(400, message, "best_of")
    return sampling


def _shared(service: Service, body: api.GenerationRequest) -> dict[str, Any]:
    values = {name: getattr(body, name) for name in SHARED}
    values = {name: value for name, value in values.items() if value is not None}
    searches = values.get("beam_width", 1) != 1
    values.setdefault("temperature", 0.0 if searches else 1.0)
    if body.stop is not None:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        special = service.texts.special
        # Outputs never contain a special token's text, so such a stop string stops at the token.
        values["stop"] = [text for text in stop if text not in special]
        ends = () if body.ignore_eos else service.model.eos_token_ids
        tokens = [special[text] for text in stop if text in special and special[text] not in ends]
        values["stop_token_ids"] = [*values.get("stop_token_ids", ()), *tokens]
    if body.logit_bias is not None:
        for name in body.logit_bias:
            if not (name.isascii() and name.isdecimal() and len(name) < 20):
                raise ApiError(400, f"logit_bias: {name[:80]!r} is no token id", "logit_bias")
        values["logit_bias"] = {int(name): value for name, value in body.logit_bias.items()}
    return values


def prompt_tokens(
    service: Service, prompt: str | list[int], sampling: SamplingParams, special: bool = True,
    field: str = "prompt",
) -> list[int]:  # fmt: skip
    """The token ids of a prompt. Raises ApiError for a prompt that no engine can serve.

    special: whether the tokenizer adds special tokens to a text.
    field: the request's field that error messages name.
    """
    if isinstance(prompt, str):
        service.check_length(prompt, field)
        if not special:
            prompt = service.tokenizer.encode(prompt, add_special_tokens=False)
    names = NAMES if field == "prompt" else NAMES | {"prompt": field}
    try:
        return service.validated(prompt, sampling)
    except ValueError as error:
        raise engine_error(error, names, field) from None


def chat_tokens(service: Service, body: api.ChatRequest | api.TokenizeRequest) -> list[int]:
    """The token ids of a conversation in the chat template. Raises ApiError if there is no
    template, if it refuses the messages, if they are too long, and for reserved variables."""
    if not service.chat_template:
        message = (
            "messages: the served model has no chat template, and the server was given none "
            "(--chat_template); /v1/completions takes a prompt"
        )
        raise ApiError(400, message, "messages", "no_chat_template")
    messages, max_messages = body.messages or (), service.config.max_model_len
    if len(messages) > max_messages:  # A message has a token or more, and rendering takes seconds.
        message = f"messages: {len(messages):,} messages; max_model_len is {max_messages}"
        raise ApiError(400, message, "messages", TOO_LONG)
    conversation = [
        {"role": message.role, "content": message.text}
        | ({} if message.name is None else {"name": message.name})
        for message in messages
    ]
    variables = _template_variables(service, body)
    try:
        service.check_length(json.dumps(variables), "chat_template_kwargs")
        text = service.tokenizer.apply_chat_template(
            conversation, tokenize=False, chat_template=service.chat_template,
            add_generation_prompt=body.add_generation_prompt is not False, **variables,
        )  # fmt: skip
    except ApiError:
        raise
    except Exception as error:  # A template is a program, which may raise anything.
        reason = (str(error) or type(error).__name__)[:MAX_REASON]
        message = f"messages: the chat template refuses them: {reason}"
        raise ApiError(400, message, "messages") from None
    service.check_length(text, "messages")
    return service.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))


def _template_variables(
    service: Service, body: api.ChatRequest | api.TokenizeRequest
) -> dict[str, Any]:
    """The request's template variables. Raises ApiError for reserved names: parameters of
    `apply_chat_template` that are not in TEMPLATE_PARAMETERS, and names of special tokens, because
    a template may repeat a token's text for each message."""
    variables = body.chat_template_kwargs or {}
    reserved = {*inspect.signature(service.tokenizer.apply_chat_template).parameters}
    reserved |= {*service.tokenizer.special_tokens_map}
    for name in variables:
        if name in reserved - TEMPLATE_PARAMETERS:
            message = f"chat_template_kwargs: {name!r} may not be set by a request"
            raise ApiError(400, message, "chat_template_kwargs")
    return variables
