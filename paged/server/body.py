"""Request bodies: bounds are checked before parsing, and long bodies are parsed in a thread.

Parsing holds Python's global lock: a tenth of a second for the largest body that is allowed, but
seconds for a list that must be refused.
"""

import json
import re
from collections.abc import Callable

from fastapi import Request
from pydantic import ValidationError

from paged.server.errors import TOO_LONG, ApiError, invalid
from paged.server.schema import MOST_FIELDS, MOST_STOP_TOKENS, Body
from paged.server.service import Service

LONG_BODY = 4096  # bytes above which a body is parsed in a thread
DEEPEST = 64  # nested lists and maps
# A bracket, a quote, or the text between them, in pieces short enough to let other threads run.
_PIECE = re.compile(rb'[][{}"]|[^][{}"]{1,65536}')


async def read[B: Body, T](
    service: Service, request: Request, kind: type[B], use: Callable[[Service, B], T]
) -> T:
    """Parse a request's body as a `kind`, and return `use(service, body)`. Raises ApiError for a
    body that is none."""
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
    MOST_FIELDS, more than `most` items in all, or lists and maps nested deeper than DEEPEST. Text
    that is not JSON passes: the parser refuses it."""
    room: list[int] = []  # commas still allowed in each open list or map
    field = None  # last string in the outermost map: the name of the value after it
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
    """The index after the quote that ends a string."""
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
