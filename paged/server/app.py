"""The HTTP application with its routes, and the process that serves it."""

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Collection
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from paged.requests.stopping import decode
from paged.server import openai_format as api
from paged.server import stream
from paged.server.guard import BoundedHttp, Guard
from paged.server.live import PAGE, Live
from paged.server.openai_format import ApiError, Body, Json
from paged.server.service import Service
from paged.server.validation import chat_tokens, read

log = logging.getLogger("paged.server")
SPARE_FILES = 64  # open files beside connections: adapters, pipes of engines in other processes
NULLABLE = {"type": ["string", "null"]}
ERROR_FIELDS = {
    "message": {"type": "string"}, "type": {"type": "string"}, "param": NULLABLE, "code": NULLABLE,
}  # fmt: skip
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "object", "required": [*ERROR_FIELDS], "properties": ERROR_FIELDS}
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR}}}
    for status, text in {
        400: "something is wrong with the request: `param` names the field",
        401: "no valid API key, if the server needs one",
        404: "no such model or path",
        408: "the body came too slowly",
        413: "the body is too large",
        403: "not allowed on this server",
        405: "no such method of this path",
        429: "too many requests are pending: Retry-After says when there is room",
        500: "the engine has failed",
        503: "the server is shutting down",
        504: "the request took too long",
    }.items()
}
BODIES = (
    api.CompletionRequest, api.ChatRequest, api.TokenizeRequest, api.DetokenizeRequest,
    api.LoadAdapterRequest,
)  # fmt: skip
REF = "#/components/schemas/{model}"


def create_app(service: Service, keys: Collection[str] = ()) -> FastAPI:
    """The HTTP application. keys: API keys; if any, all paths but `guard.KEYLESS` need a key."""
    app = FastAPI(
        title="paged-jax", description="OpenAI's API over one paged engine, or many.",
        docs_url=None, redoc_url=None, responses=ERRORS,
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(Guard, service=service, keys=keys)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_generation(app, service)
    _add_tokenization(app, service)
    _add_models(app, service)
    _add_operation(app, service)
    document = app.openapi()
    _, schemas = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
    document["components"] = {"schemas": schemas["$defs"]}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # status 400 instead
    for route in app.routes:  # after the OpenAPI document, which need not list HEAD
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The response to unknown paths and methods, and to bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return ApiError(error.status_code, message, headers=error.headers).response


def _takes(body: type[Body]) -> dict[str, Any]:
    """The OpenAPI document's entry for the body of a route that parses its body itself."""
    content = {"application/json": {"schema": {"$ref": REF.format(model=body.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _add_generation(app: FastAPI, service: Service) -> None:
    streams: dict[int | str, dict[str, Any]] = {
        200: {"content": {"application/json": {}, "text/event-stream": {}}}
    }

    @app.post("/v1/completions", responses=streams, openapi_extra=_takes(api.CompletionRequest))
    async def completions(request: Request) -> Response:
        return await stream.complete(service, request)

    @app.post("/v1/chat/completions", responses=streams, openapi_extra=_takes(api.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await stream.chat(service, request)

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise ApiError(400, "this server generates text: it has no embeddings", code="unsupported")


def _add_tokenization(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=_takes(api.TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return await read(service, request, api.TokenizeRequest, _tokenized)

    @app.post("/detokenize", openapi_extra=_takes(api.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return await read(service, request, api.DetokenizeRequest, _detokenized)


def _tokenized(service: Service, body: api.TokenizeRequest) -> Response:
    service.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: either prompt or messages must be given", "prompt")
    if body.prompt is None:
        tokens = chat_tokens(service, body)
    else:
        service.check_length(body.prompt, "prompt")
        special = body.add_special_tokens is not False
        tokens = service.tokenizer.encode(body.prompt, add_special_tokens=special)
    limit = service.config.max_model_len
    return Json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})


def _detokenized(service: Service, body: api.DetokenizeRequest) -> Response:
    service.adapter(body.model)
    for token in body.tokens:
        if not 0 <= token < service.model.vocab_size:
            vocabulary = f"[0, {service.model.vocab_size - 1}]"
            message = f"tokens: {token} is outside the vocabulary {vocabulary}"
            raise ApiError(400, message, "tokens")
    return Json({"prompt": decode(service.tokenizer, body.tokens)})


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        adapter = service.adapter(name)
        return {
            "id": name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "paged-jax",
            "root": service.name,
            "parent": None if adapter is None else service.name,
            "max_model_len": service.config.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = [service.name, *service.adapters.names]
        return Json({"object": "list", "data": [card(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return Json(card(name))

    @app.post("/v1/load_lora_adapter", openapi_extra=_takes(api.LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> Response:
        body = await read(service, request, api.LoadAdapterRequest, lambda _, body: body)
        if not service.settings.allow_adapter_loading:
            message = "this server was started without --allow_adapter_loading"
            raise ApiError(403, message, code="adapter_loading_not_allowed")
        await service.load_adapter(body.lora_name, body.lora_path)
        return Json(card(body.lora_name))


def _add_operation(app: FastAPI, service: Service) -> None:
    live = Live(service)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8")

    @app.get("/state")
    async def state() -> Response:
        return Response(await live.state(), media_type="application/json")

    @app.get("/health")
    async def health() -> Response:
        service.admit(0)
        return Json({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = await service.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def check_address(host: str, port: int) -> None:
    """Raise ValueError if no server can listen at the address. Call this before an engine is
    built."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ValueError(f"--host={host} --port={port}: {error.strerror}") from None


def connections_for(wanted: int) -> int:
    """The number of connections, at most `wanted`, that the process's limit of open files allows.
    The limit is first raised as far as needed and permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/dev/fd")) + SPARE_FILES
    max_files = hard if hard != resource.RLIM_INFINITY else wanted + others
    if soft != resource.RLIM_INFINITY and soft < wanted + others:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + others, max_files), hard))
    allowed = max(1, min(wanted, max_files - others))
    if allowed < wanted:
        log.warning(
            "%d connections at a time, not %d: the process may have %d files open (ulimit -Hn)",
            allowed, wanted, hard,
        )  # fmt: skip
    return allowed


class Server(uvicorn.Server):
    """The server process. After the first SIGTERM or SIGINT, running requests have `drain_s`
    seconds to end. New completions and /health get status 503, other paths are served. The second
    signal ends the server at once, as does a signal before the server has started.

    stopped_by: the first signal after the start; None before it.
    """

    def __init__(self, app: FastAPI, service: Service, host: str, port: int):
        config = uvicorn.Config(
            app, host=host, port=port, log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=5, http=BoundedHttp,
            timeout_keep_alive=service.settings.head_timeout_s,
        )  # fmt: skip
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task | None = None
        self.stopped_by: signal.Signals | None = None

    async def startup(self, sockets=None) -> None:
        self._loop = asyncio.get_running_loop()
        connections = connections_for(self._service.settings.max_connections)
        # uvicorn refuses the connection that reaches the limit.
        self.config.limit_concurrency = connections + 1
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None or self._loop is None:
            self.should_exit = self.force_exit = True
            self.config.timeout_graceful_shutdown = 0  # force_exit still waits for connections.
            return
        self.stopped_by = signal.Signals(sig)
        self.stop()

    def stop(self) -> None:
        """Drain and end, as after the first signal. Any thread may call this."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        await self._service.drain()
        self.should_exit = True

    @property
    def port(self) -> int:
        """The port that the started server listens on."""
        return self.servers[0].sockets[0].getsockname()[1]
