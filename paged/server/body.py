"""Bodies of requests: bounded before they are parsed, and worked on beside the event loop if long.

Parsing holds Python's lock, a tenth of a second for the largest body that is allowed; a list that
must be refused would hold it for seconds.
"""

import json
import re
from collections.abc import Callable

from fastapi import Request
from pydantic import ValidationError

from paged.server.errors import TOO_LONG, ApiError, invalid
from paged.server.schema import MOST_FIELDS, MOST_STOP_TOKENS, Body
from paged.server.service import Service

LONG_BODY = 4096  # bytes from which a body is worked on in a thread
DEEPEST = 64  # lists and maps in each other
# A bracket, a quote, or what is between them; short enough for other threads to have their turn.
_PIECE = re.compile(rb'[][{}"]|[^][{}"]{1,65536}')


async def read[B: Body, T](
    service: Service, request: Request, kind: type[B], use: Callable[[Service, B], T]
) -> T:
    """What `use` makes of a request's body. Raises ApiError for one that is no `kind`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    content = b"".join([part async for part in request.stream()])
    most_prompts = service.settings.max_prompts
    longest = max(service.config.max_model_len, most_prompts, MOST_STOP_TOKENS)

    def work() -> T:
        if media_type != "application/json":
            raise invalid([])
        check_lengths(content, longest, longest * (most_prompts + 1))
        try:
            body = kind.model_validate_json(content)
        except ValidationError as error:
            raise invalid(error.errors(include_url=False, include_input=False)) from None
        return use(service, body)

    return work() if len(content) <= LONG_BODY else await service.beside(work)


def check_lengths(content: bytes, longest: int, most: int) -> None:
    """Raise ApiError for JSON with a list of more than `longest` items, a map of more than
    MOST_FIELDS, more than `most` in all, or too many of them in each other. What is no JSON
    passes."""
    room: list[int] = []  # for more commas, in each list or map that is open
    field = None  # the last string in the body's own map: before a list or a map, its name
    at = 0
    while found := _PIECE.match(content, at):
        piece, at = found[0], found.end()
        if piece == b'"':
            end = _end_of_string(content, at)
            field = content[at - 1 : end] if len(room) == 1 else field
            at = end
        elif piece in (b"[", b"{"):
            room.append((longest if piece == b"[" else MOST_FIELDS) - 1)
            if len(room) > DEEPEST:
                message = f"at most {DEEPEST} lists and maps may be in each other"
                raise _refused(field, message, too_long=False)
        elif piece in (b"]", b"}"):
            if room:
                room.pop()
        elif room and (commas := piece.count(b",")):
            room[-1] -= commas
            most -= commas
            if room[-1] < 0 or most < 0:
                message = f"at most {longest} items of a list, and {MOST_FIELDS} of a map"
                raise _refused(field if len(room) > 1 else None, message)


def _end_of_string(content: bytes, at: int) -> int:
    """Behind the quote that ends it."""
    while (end := content.find(b'"', at)) >= 0:
        before = content[at:end]
        at = end + 1
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return at
    return len(content)


def _refused(field: bytes | None, message: str, too_long: bool = True) -> ApiError:
    try:
        name = None if field is None else str(json.loads(field))[:80]
    except ValueError:
        name = None
    code = TOO_LONG if too_long and name in ("prompt", "messages") else None
    return ApiError(400, f"{name or 'the body'}: {message}", name, code)
