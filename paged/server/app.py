"""The HTTP application: which path does what."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from paged.requests.stopping import decode
from paged.server import errors, generate
from paged.server.body import read
from paged.server.chat import chat_prompt
from paged.server.errors import ApiError, Json
from paged.server.guard import Guard
from paged.server.live import PAGE, Live
from paged.server.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
)
from paged.server.service import Service

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUS = {
    400: "something is wrong with the request: `param` names the field",
    401: "no API key, where the server wants one",
    404: "no such model or path",
    408: "the body came too slowly",
    413: "the body is too large",
    403: "not allowed on this server",
    405: "no such method of this path",
    429: "too many requests are pending: Retry-After says when there is room",
    500: "the engine has failed",
    503: "the server is shutting down",
    504: "the request took too long",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in _STATUS.items()
}

BODIES = (
    CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, LoadAdapterRequest,
)  # fmt: skip
REF = "#/components/schemas/{model}"


def create_app(service: Service, keys: Collection[str] = ()) -> FastAPI:
    """keys: if there are any, requests need one of them."""
    app = FastAPI(
        title="paged-jax", description="OpenAI's API over one paged engine, or many.",
        docs_url=None, redoc_url=None, responses=REFUSALS,
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(Guard, service=service, keys=keys)
    app.add_exception_handler(ApiError, errors.on_api_error)
    app.add_exception_handler(HTTPException, errors.on_http_error)
    _add_generation(app, service)
    _add_tokenization(app, service)
    _add_models(app, service)
    _add_operation(app, service)
    document = app.openapi()
    _, schemas = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
    document["components"] = {"schemas": schemas["$defs"]}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # status 400 says what is wrong
    for route in app.routes:  # after the OpenAPI document, which need not list HEAD
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")
    return app


def _takes(body: type[Body]) -> dict[str, Any]:
    """The request body in the OpenAPI document, for a path that parses it itself."""
    content = {"application/json": {"schema": {"$ref": REF.format(model=body.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _add_generation(app: FastAPI, service: Service) -> None:
    streams: dict[int | str, dict[str, Any]] = {
        200: {"content": {"application/json": {}, "text/event-stream": {}}}
    }

    @app.post("/v1/completions", responses=streams, openapi_extra=_takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await generate.complete(service, request)

    @app.post("/v1/chat/completions", responses=streams, openapi_extra=_takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await generate.chat(service, request)

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise ApiError(400, "this server generates text: it has no embeddings", code="unsupported")


def _add_tokenization(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=_takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return await read(service, request, TokenizeRequest, _tokenized)

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return await read(service, request, DetokenizeRequest, _detokenized)


def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    if body.model is not None:
        service.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: either prompt or messages must be given", "prompt")
    if body.prompt is None:
        tokens = chat_prompt(service, body)
    else:
        service.check_length(body.prompt, "prompt")
        special = body.add_special_tokens is not False
        tokens = service.tokenizer.encode(body.prompt, add_special_tokens=special)
    longest = service.config.max_model_len
    return Json({"tokens": tokens, "count": len(tokens), "max_model_len": longest})


def _detokenized(service: Service, body: DetokenizeRequest) -> Response:
    if body.model is not None:
        service.adapter(body.model)
    most = service.model.vocab_size
    for token in body.tokens:
        if not 0 <= token < most:
            message = f"tokens: {token} is outside the vocabulary [0, {most - 1}]"
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

    @app.post("/v1/load_lora_adapter", openapi_extra=_takes(LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> Response:
        body = await read(service, request, LoadAdapterRequest, lambda _, body: body)
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
