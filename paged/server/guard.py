"""What every request passes, whatever it asks for: an id, a key, limits of its body, a log line."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged.server.errors import CLIENT_LEFT, ApiError, answer
from paged.server.service import Service, new_id

log = logging.getLogger("paged.server.access")
OPEN = ("/health", "/")  # without a key
# Statuses of requests whose body is not read to its end. A connection that is closed while data
# still arrives is reset, and many clients then see no answer: so the rest is read and dropped
# first, for LINGER_S seconds at most.
UNREAD, LINGER_S = (408, 413), 2.0
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Guard:
    """ASGI middleware. keys: if there are any, requests need one of them as a bearer token."""

    def __init__(self, app: ASGIApp, service: Service, keys: Collection[str] = ()):
        self._app, self._service = app, service
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else new_id("req")
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        began, status = time.monotonic(), 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()), (b"x-request-id", request_id.encode())
                ]  # fmt: skip
                if self._service.draining or status in UNREAD:
                    message["headers"].append((b"connection", b"close"))
            elif status in UNREAD and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body"}
            await send(message)

        body = _Body(receive, self._service.settings)
        try:
            if scope["http_version"] not in ("1.0", "1.1"):
                raise ApiError(400, "HTTP/1.1 is spoken here", headers={"Connection": "close"})
            state["key"] = self._check(scope["path"], headers)
            await self._app(scope, body.receive, told)
        except ApiError as error:
            await answer(error)(scope, receive, told)
        except ClientDisconnect:  # in the middle of its body
            pass
        except asyncio.CancelledError:  # the server ends; uvicorn would show where it waited
            if not status:
                await answer(ApiError(503, "the server has shut down"))(scope, receive, told)
        except Exception:
            if status:
                raise
            log.exception("%s has failed", request_id)
            failure = ApiError(500, "the server has failed; its log says where")
            await answer(failure)(scope, receive, told)
        finally:
            status = status or CLIENT_LEFT
            route = getattr(scope.get("route"), "path", "unknown")
            self._service.metrics.http.labels(route, str(status)).inc()
            log.info(
                "%s %s %s %d %.1f ms", request_id, scope["method"], quote(scope["path"]), status,
                1e3 * (time.monotonic() - began),
            )  # fmt: skip

    def _check(self, path: str, headers: dict[bytes, bytes]) -> int | None:
        """The index of the request's key among the keys; None if the path needs none."""
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # A proxy that goes by the other header would read the rest as another request.
            message = "either Transfer-Encoding or Content-Length, not both"
            raise ApiError(400, message, headers={"Connection": "close"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._service.settings.max_body_bytes:
            raise _too_large(self._service.settings.max_body_bytes)
        if not self._keys or path in OPEN:
            return None
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = _digest(key) if kind.lower() == b"bearer" else b""
        # All are compared, so that the time tells nothing.
        same = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(same):
            message = "this server needs an API key: 'Authorization: Bearer KEY'"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)
        return same.index(True)


class _Body:
    """The body of a request, which may be neither too large nor too slow."""

    def __init__(self, receive: Receive, settings):
        self._receive, self._settings = receive, settings
        self._deadline_s = asyncio.get_running_loop().time() + settings.body_timeout_s
        self._left, self._whole = settings.max_body_bytes, False

    async def receive(self) -> Message:
        if self._whole:  # what comes now is that the client has gone
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            seconds = self._settings.body_timeout_s
            raise ApiError(408, f"the body has not come within {seconds:g} s") from None
        self._whole = not message.get("more_body", False)
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _too_large(self._settings.max_body_bytes)
        return message

    async def discard(self) -> None:
        """Read and drop the rest of the body, for LINGER_S seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._whole:
                    self._whole = not (await self._receive()).get("more_body", False)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most:,} bytes", code="body_too_large")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
