"""/v1/completions and /v1/chat/completions: from a body to its response, whole or as server-sent
events."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from paged.requests.stopping import decode
from paged.server import openai_format as api
from paged.server.generation import ClientLeft, Delta, Generation
from paged.server.openai_format import CLIENT_LEFT, ApiError, Json, dumps
from paged.server.responses import ChatFormat, CompletionFormat, ResponseFormat, usage
from paged.server.service import Service, new_id
from paged.server.validation import (
    chat_sampling,
    chat_tokens,
    completion_sampling,
    prompt_tokens,
    read,
)

log = logging.getLogger("paged.server")
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # Proxies must not wait for more.
]
DONE = b"data: [DONE]\n\n"


@dataclass
class Call:
    """An API call that has passed all checks.

    response_id: the response's id. Ids of the engine's requests are this id with a suffix.
    echoes: the text with which each prompt's choices begin; None without echo.
    offsets: characters before each token of each prompt; None unless prompts are echoed with
        log-probabilities.
    silent: whether the response leaves out generated tokens, because none was requested.
    """

    response_id: str
    body: api.GenerationRequest
    format: ResponseFormat
    adapter: Adapter | None
    prompts: list[list[int]]
    sampling: SamplingParams
    echoes: list[str] | None = None
    offsets: list[list[int]] | None = None
    silent: bool = False


async def complete(service: Service, request: Request) -> Response:
    return await _respond(service, request, api.CompletionRequest, _completion_call)


async def chat(service: Service, request: Request) -> Response:
    return await _respond(service, request, api.ChatRequest, _chat_call)


def _completion_call(service: Service, body: api.CompletionRequest) -> Call:
    response_id, adapter = new_id("cmpl"), service.adapter(body.model)
    sampling = completion_sampling(service, body)
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    max_prompts = service.settings.max_prompts
    if not 1 <= len(given) <= max_prompts:
        raise ApiError(400, f"prompt: from 1 to {max_prompts} prompts, not {len(given)}", "prompt")
    special = body.add_special_tokens is not False
    prompts = [prompt_tokens(service, prompt, sampling, special) for prompt in given]
    format = CompletionFormat(service.texts, response_id, body.model, bool(body.return_token_ids))
    call = Call(response_id, body, format, adapter, prompts, sampling)
    if body.echo:
        texts = (p if isinstance(p, str) else decode(service.tokenizer, p) for p in given)
        call.echoes, call.silent = list(texts), body.max_tokens == 0
        if body.logprobs is not None:
            call.offsets = [service.texts.prompt_offsets(prompt, special) for prompt in given]
    return call


def _chat_call(service: Service, body: api.ChatRequest) -> Call:
    response_id, adapter = new_id("chatcmpl"), service.adapter(body.model)
    tokens = chat_tokens(service, body)
    sampling = chat_sampling(service, body, service.config.max_model_len - len(tokens))
    prompt = prompt_tokens(service, tokens, sampling, field="messages")
    format = ChatFormat(service.texts, response_id, body.model, bool(body.return_token_ids))
    return Call(response_id, body, format, adapter, [prompt], sampling)


async def _respond[B: api.GenerationRequest](
    service: Service, request: Request, kind: type[B],
    check: Callable[[Service, B], Call],
) -> Response:  # fmt: skip
    call = await read(service, request, kind, check)
    key, salt = request.state.key, call.body.cache_salt or ""
    if key is not None:  # Otherwise `cached_tokens` would reveal prompts of other keys.
        salt = f"key {key}: {salt}"
    generation = service.begin(
        call.response_id, call.prompts, call.sampling, call.adapter, salt,
        streams=bool(call.body.stream),
    )  # fmt: skip
    if call.body.stream:
        return EventStream(service, generation, _events(call, generation))
    async with _served(service, generation, request.receive):
        try:
            await generation.finish()
        except ClientLeft:
            return Response(status_code=CLIENT_LEFT)
        if call.sampling.logprobs is None and call.sampling.prompt_logprobs is None:
            return _whole(call, generation)
        return await asyncio.to_thread(_whole, call, generation)


def _whole(call: Call, generation: Generation) -> Json:
    choices, outputs = [], generation.outputs
    for i, output in enumerate(outputs):
        prompt_logprobs = call.format.prompt_logprobs(output)
        for delta in generation.rest(i):
            delta = _with_prompt(call, i, delta, output)
            choices.append(call.format.choice(delta) | prompt_logprobs)
    return Json(call.format.response(choices, usage(outputs, call.silent)))


def _with_prompt(call: Call, i: int, delta: Delta, output: RequestOutput | None = None) -> Delta:
    """The delta for the response: no text and tokens if max_tokens is 0. With echo, the first delta
    of a choice has prompt `i` before its text.

    output: the prompt's output, with the prompt's log-probabilities; None in streams.
    """
    if call.silent:
        nothing = None if delta.logprobs is None else ()
        delta = replace(delta, text="", tokens=(), logprobs=nothing, offsets=())
    if call.echoes is None or not delta.first:
        return delta
    echo, logprobs, offsets = call.echoes[i], delta.logprobs, delta.offsets
    if logprobs is not None:
        assert output and output.prompt_logprobs is not None, "echo requests them"
        assert call.offsets is not None
        logprobs = [*output.prompt_logprobs, *logprobs]
        offsets = [*call.offsets[i], *(len(echo) + at for at in offsets)]
    tokens = [*call.prompts[i], *delta.tokens]
    return replace(delta, text=echo + delta.text, tokens=tokens, logprobs=logprobs, offsets=offsets)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + dumps(content) + b"\n\n"


async def _events(call: Call, generation: Generation) -> AsyncIterator[bytes]:
    """A chunk for each delta, and a last chunk with the usage if that was requested."""
    options = call.body.stream_options
    counts = bool(options and options.include_usage)
    not_yet: dict[str, Any] = {"usage": None} if counts else {}
    async for deltas in generation.deltas():
        whole = (_with_prompt(call, delta.index // call.sampling.n, delta) for delta in deltas)
        chunks = (call.format.event([call.format.streamed(delta)], **not_yet) for delta in whole)
        yield b"".join(map(_event, chunks))
    if counts:
        yield _event(call.format.event([], usage=usage(generation.outputs, call.silent)))


@asynccontextmanager
async def _served(service: Service, generation: Generation, receive: Receive):
    """A context in which the generation fails with ClientLeft if its client disconnects. Leaving
    the context releases the generation."""
    watch = asyncio.create_task(_watch(receive, generation))
    try:
        yield
    finally:
        watch.cancel()
        service.end(generation)


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    generation.fail(ClientLeft())


class EventStream(Response):
    """A response of server-sent events. Nothing is sent before the first event, so that a request
    that fails at once gets an error status. If a client has not read its stream by the generation's
    deadline, its connection is closed."""

    def __init__(self, service: Service, generation: Generation, events: AsyncIterator[bytes]):
        super().__init__(media_type="text/event-stream")
        self._service, self._generation, self._events = service, generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _served(self._service, self._generation, receive):
            try:
                await self._send(send)
            except ClientLeft:
                return
            except TimeoutError:
                log.warning("a client has not read its stream: its connection is closed")

    async def _send(self, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            async with asyncio.timeout_at(self._generation.deadline_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        first = await anext(self._events)
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await write(first)
        try:
            async for body in self._events:
                await write(body)
        except ApiError as error:
            await write(_event(error.content))
        except (ClientLeft, TimeoutError):
            raise
        except Exception:  # The status has been sent, so only an event can report the failure.
            log.exception("a stream has failed")
            failure = ApiError(500, "the server has failed; its log says where")
            await write(_event(failure.content))
        await write(DONE, more=False)
