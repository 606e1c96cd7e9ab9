"""Checks of every connection and request: limits of time, number and size, request smuggling and
API keys. Also assigns request ids, and writes the access log."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import quote

import h11
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged.server.openai_format import CLIENT_LEFT, ApiError
from paged.server.service import Service, new_id
from paged.server.settings import ServerConfig

log = logging.getLogger("paged.server.access")
KEYLESS = ("/health", "/")  # paths without a key
# Statuses of requests whose bodies are not read to the end. A connection that is closed while data
# still arrives is reset, and many clients then see no response. So the rest of the body is first
# read and dropped, for LINGER_S seconds at most.
UNREAD, LINGER_S = (408, 413), 2.0
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class BoundedHttp(H11Protocol):
    """HTTP/1.1 by uvicorn with h11, a strict parser. uvicorn's keep-alive timeout runs from a
    response to the first byte of the next head. Here the timeout runs from the connection, or from
    the last response, to the end of a head.

    A connection above uvicorn's limit_concurrency - 1 replaces the connection that has waited
    longest for a request. If no connection waits, uvicorn answers with status 503.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        assert self.limit_concurrency is not None
        if len(self.connections) >= self.limit_concurrency - 1:
            self._make_room()
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _make_room(self) -> None:
        self.logger.warning(
            "%d connections are open, as many as may be: the one that has waited longest for a "
            "request makes room", len(self.connections),
        )  # fmt: skip
        ends = {c: c.timeout_keep_alive_task.when() for c in self.connections
                if isinstance(c, BoundedHttp) and c.timeout_keep_alive_task}  # fmt: skip
        if ends:
            longest = min(ends, key=ends.__getitem__)
            self.connections.discard(longest)
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()

    def _should_upgrade(self) -> bool:
        return False  # Java's client offers HTTP/2 with each request.

    def timeout_keep_alive_handler(self) -> None:
        head_has_begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if head_has_begun and not self.transport.is_closing():
            self.transport.write(LATE)
        super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Respond to bytes that are not HTTP. Once a response to the current request has begun, the
        connection is only closed."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True


class Guard:
    """ASGI middleware around all routes.

    keys: API keys; if there are any, all paths but KEYLESS need one as a bearer token.
    """

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
        began_s, status = time.monotonic(), 0
        body = _Body(receive, self._service.settings)

        async def respond(message: Message) -> None:
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

        async def fail(error: ApiError) -> None:
            await error.response(scope, receive, respond)

        try:
            if scope["http_version"] not in ("1.0", "1.1"):
                raise ApiError(
                    400, "the HTTP version must be 1.0 or 1.1", headers={"Connection": "close"}
                )
            state["key"] = self._check(scope["path"], headers)
            await self._app(scope, body.receive, respond)
        except ApiError as error:
            await fail(error)
        except ClientDisconnect:  # The client left before the end of its request's body.
            pass
        except asyncio.CancelledError:  # The server ends. uvicorn would log the task's stack.
            if not status:
                await fail(ApiError(503, "the server has shut down"))
        except Exception:
            if status:
                raise
            log.exception("%s has failed", request_id)
            await fail(ApiError(500, "the server has failed; its log says where"))
        finally:
            status = status or CLIENT_LEFT
            route = getattr(scope.get("route"), "path", "unknown")
            self._service.metrics.http.labels(route, str(status)).inc()
            log.info(
                "%s %s %s %d %.1f ms", request_id, scope["method"], quote(scope["path"]), status,
                1e3 * (time.monotonic() - began_s),
            )  # fmt: skip

    def _check(self, path: str, headers: dict[bytes, bytes]) -> int | None:
        """The index of the request's key among the keys; None if the path or the server needs no
        key. Raises ApiError for a missing or wrong key, for a body too large, and for headers that
        allow request smuggling."""
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # A proxy that uses the other header would read the body's end as another request.
            message = "either Transfer-Encoding or Content-Length, not both"
            raise ApiError(400, message, headers={"Connection": "close"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._service.settings.max_body_bytes:
            raise _too_large(self._service.settings.max_body_bytes)
        if not self._keys or path in KEYLESS:
            return None
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = _digest(key) if kind.lower() == b"bearer" else b""
        # The key is compared with all keys, so that the time reveals nothing.
        same = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(same):
            message = "this server needs an API key: 'Authorization: Bearer KEY'"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)
        return same.index(True)


class _Body:
    """A request's body, neither too large nor too slow."""

    def __init__(self, receive: Receive, settings: ServerConfig):
        self._receive, self._settings = receive, settings
        self._deadline_s = asyncio.get_running_loop().time() + settings.body_timeout_s
        self._room, self._whole = settings.max_body_bytes, False

    async def receive(self) -> Message:
        if self._whole:  # The next message is the client's disconnect.
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            seconds = self._settings.body_timeout_s
            raise ApiError(408, f"the body has not come within {seconds:g} s") from None
        self._whole = not message.get("more_body", False)
        self._room -= len(message.get("body", b""))
        if self._room < 0:
            raise _too_large(self._settings.max_body_bytes)
        return message

    async def discard(self) -> None:
        """Read and drop the rest of the body, for LINGER_S seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._whole:
                    self._whole = not (await self._receive()).get("more_body", False)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes:,} bytes", code="body_too_large")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
