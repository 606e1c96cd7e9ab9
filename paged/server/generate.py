"""/v1/completions and /v1/chat/completions: from a checked request to its answer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from fastapi import Request, Response

from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from paged.requests.stopping import decode
from paged.server import asked
from paged.server.answers import FINISH, ChatShape, CompletionShape, Delta, Shape, Usage
from paged.server.body import read
from paged.server.chat import chat_prompt
from paged.server.errors import CLIENT_LEFT, ApiError, Json, refused
from paged.server.generation import Generation, Left
from paged.server.schema import ChatRequest, CompletionRequest, Sampling
from paged.server.service import Service, new_id
from paged.server.streaming import EventStream, event, served


@dataclass
class Plan:
    """A request that has passed all checks.

    name: id of the answer.
    echoes: for each prompt the text that its choices begin with.
    offsets: for each prompt where its tokens begin in this text; None without log-probabilities.
    silent: whether the answer leaves out generated tokens, because none was requested.
    """

    name: str
    body: Sampling
    shape: Shape
    adapter: Adapter | None
    prompts: list[list[int]]
    sampling: SamplingParams
    echoes: list[str] | None = None
    offsets: list[list[int]] | None = None
    silent: bool = False


async def complete(service: Service, request: Request) -> Response:
    return await _answer(service, request, await read(service, request, CompletionRequest, _plan))


async def chat(service: Service, request: Request) -> Response:
    return await _answer(service, request, await read(service, request, ChatRequest, _plan_chat))


def _plan(service: Service, body: CompletionRequest) -> Plan:
    answer_id, adapter = new_id("cmpl"), service.adapter(body.model)
    sampling = asked.of_completion(body, service)
    given = asked.prompts_of(body.prompt)
    most = service.settings.max_prompts
    if not 1 <= len(given) <= most:
        raise ApiError(400, f"prompt: from 1 to {most} prompts, not {len(given)}", "prompt")
    special = body.add_special_tokens is not False
    prompts = [_validated(service, p, sampling, asked.NAMES, special=special) for p in given]
    shape = CompletionShape(service.texts, answer_id, body.model, bool(body.return_token_ids))
    plan = Plan(answer_id, body, shape, adapter, prompts, sampling)
    if body.echo:
        plan.echoes = [
            prompt if isinstance(prompt, str) else decode(service.tokenizer, prompt)
            for prompt in given
        ]
        plan.silent = body.max_tokens == 0
    if body.echo and body.logprobs is not None:
        plan.offsets = [service.texts.prompt_offsets(prompt, special) for prompt in given]
    return plan


def _plan_chat(service: Service, body: ChatRequest) -> Plan:
    answer_id, adapter = new_id("chatcmpl"), service.adapter(body.model)
    tokens = chat_prompt(service, body)
    sampling = asked.of_chat(body, service, service.config.max_model_len - len(tokens))
    names = asked.NAMES | {"prompt": "messages"}
    prompt = _validated(service, tokens, sampling, names, "messages")
    shape = ChatShape(service.texts, answer_id, body.model, bool(body.return_token_ids))
    return Plan(answer_id, body, shape, adapter, [prompt], sampling)


def _validated(
    service: Service, prompt: str | list[int], sampling: SamplingParams, names, field="prompt",
    special: bool = True,
) -> list[int]:  # fmt: skip
    """special: whether the tokenizer adds special tokens to a text."""
    if isinstance(prompt, str):
        service.check_length(prompt, field)
        if not special:
            prompt = service.tokenizer.encode(prompt, add_special_tokens=False)
    try:
        return service.validated(prompt, sampling)
    except ValueError as error:
        raise refused(error, names, field) from None


async def _answer(service: Service, request: Request, plan: Plan) -> Response:
    body = plan.body
    key, salt = request.state.key, body.cache_salt or ""
    if key is not None:  # or `cached_tokens` would show one what another has sent
        salt = f"key {key}: {salt}"
    generation = service.begin(
        plan.name, plan.prompts, plan.sampling, plan.adapter, salt,
        streams=bool(body.stream),
    )  # fmt: skip
    if body.stream:
        return EventStream(service, generation, _events(plan, generation))
    async with served(service, generation, request.receive):
        try:
            outputs = await generation.finish()
        except Left:
            return Response(status_code=CLIENT_LEFT)
        if plan.sampling.logprobs is None and plan.sampling.prompt_logprobs is None:
            return _whole(plan, outputs)
        return await asyncio.to_thread(_whole, plan, outputs)


def _whole(plan: Plan, outputs: list[RequestOutput]) -> Json:
    usage, choices = Usage(), []
    for i, output in enumerate(outputs):
        usage.add(output, generated=not plan.silent)
        for at, sequence in enumerate(output.sequences):
            reason = FINISH[sequence.finish_reason or ""]
            index = i * plan.sampling.n + at
            delta = Delta(index, sequence.text, sequence.tokens, sequence.logprobs, reason, True)
            choice = plan.shape.choice(_with_prompt(plan, i, delta, output))
            choices.append(choice | plan.shape.prompt_logprobs(output))
    return Json(plan.shape.answer(choices, usage))


def _with_prompt(plan: Plan, i: int, delta: Delta, output: RequestOutput | None = None) -> Delta:
    """A delta, with prompt i before it where that is asked for and it is a choice's first one.
    output: has the prompt's log-probabilities, which no stream has."""
    if plan.silent:
        delta = replace(delta, text="", tokens=[], logprobs=None if delta.logprobs is None else [])
    if plan.echoes is None or not delta.first:
        return delta
    logprobs = delta.logprobs
    if logprobs is not None:
        assert output and output.prompt_logprobs is not None, "echo asks for them"
        logprobs = [*output.prompt_logprobs, *logprobs]
    tokens = [*plan.prompts[i], *delta.tokens]
    echo, offsets = plan.echoes[i], plan.offsets[i] if plan.offsets else ()
    return replace(
        delta, text=echo + delta.text, tokens=tokens, logprobs=logprobs, echoed=len(echo),
        offsets=offsets,
    )  # fmt: skip


async def _events(plan: Plan, generation: Generation) -> AsyncIterator[bytes]:
    """Of a stream: a chunk for each delta, at the end the usage if it was asked for."""
    options = plan.body.stream_options
    counted = bool(options and options.include_usage)
    async for deltas in generation.deltas():
        told = (_with_prompt(plan, delta.index // plan.sampling.n, delta) for delta in deltas)
        yield b"".join(
            event(plan.shape.chunks([plan.shape.streamed(delta)], counted)) for delta in told
        )
    if counted:
        usage = Usage()
        for output in generation.outputs:
            usage.add(output, generated=not plan.silent)
        yield event(plan.shape.last_chunk(usage))
