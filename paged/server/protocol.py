"""HTTP/1.1 as uvicorn reads it with httptools, and what that leaves out."""

import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_UNREAD = 64 * 2**10  # bytes, as many as uvicorn's other parser keeps
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class BoundedHttp(HttpToolsProtocol):
    """Heads and trailers of MOST_UNREAD bytes at most: httptools keeps all of them, and they come
    before any key is checked. Offers of another protocol are not seen: httptools would leave the
    body unread, and Java's client offers HTTP/2 with each request."""

    _in_head, _unread = True, 0

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MOST_UNREAD and not self.transport.is_closing():
            self.send_400_response(f"A head may have {MOST_UNREAD} bytes.")

    def on_headers_complete(self) -> None:
        self._in_head, self._unread = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._unread = True, 0
        super().on_message_complete()
