"""HTTP/1.1 by uvicorn with h11, a strict parser, and with a timeout for request heads."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(H11Protocol):
    """uvicorn's own keep-alive timeout runs from an answer to the first byte of the next head. Here
    it runs from the connection, or from the last answer, to the end of a head.

    A connection above uvicorn's limit_concurrency - 1 replaces the one that has waited longest for
    a request; if none waits, uvicorn answers with status 503.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        assert self.limit_concurrency is not None
        if len(self.connections) >= self.limit_concurrency - 1:
            self._make_room()
        super().connection_made(transport)
        self._await_head()

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

    def _await_head(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()

    def _should_upgrade(self) -> bool:
        return False  # Java's client offers HTTP/2 with each request

    def timeout_keep_alive_handler(self) -> None:
        head_has_begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if head_has_begun and not self.transport.is_closing():
            self.transport.write(LATE)
        super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP; while another answer is under way, only close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
