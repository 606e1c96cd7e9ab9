"""Errors as OpenAI's API tells them: `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import fastapi
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from paged.validation import PromptTooLong

CLIENT_LEFT = 499  # a status that nobody reads
TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which clients shorten conversations
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(fastapi.HTTPException):
    """What a request is answered with. param: the field that is wrong."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(status, message, headers)
        self.message, self.param, self.code = message, param, code

    @property
    def content(self) -> dict[str, Any]:
        status = self.status_code
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def dumps(content: Any) -> bytes:
    """JSON in ASCII: half a surrogate pair, which a message may quote, is no UTF-8."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def answer(error: ApiError) -> Json:
    return Json(error.content, error.status_code, error.headers)


def refused(what: ValueError, names: Mapping[str, str], otherwise: str) -> ApiError:
    """What the engine refuses. names: of the engine's fields, by what the request calls them;
    otherwise: the field where its message names none."""
    message = str(what)
    words = message.replace(":", " ").replace("(", " ").split()
    found = next((names[word] for word in words if word in names), otherwise)
    code = TOO_LONG if isinstance(what, PromptTooLong) else None
    return ApiError(400, message if found in words else f"{found}: {message}", found, code)


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic refuses: the first field, with all that is wrong with it."""
    if not errors or not errors[0]["loc"]:
        if errors and errors[0]["type"] == "json_invalid":
            return ApiError(400, f"the body is no JSON: {errors[0]['ctx']['error']}")
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    field = errors[0]["loc"][0]
    same = [str(each["msg"]) for each in errors if each["loc"][0] == field]
    reasons = dict.fromkeys(why.removeprefix("Value error, ") for why in same)
    return ApiError(400, f"{field}: {'; or: '.join(reasons)}", field)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return answer(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not, and bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    what = f"{error.detail}: {request.method} {request.url.path}"
    return answer(ApiError(error.status_code, what, headers=error.headers))
