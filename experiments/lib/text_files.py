"""Readers of UTF-8 text, JSON and CSV files. Lines end at \\n or \\r\\n alone.

All raise ValueError with a message that begins with "FILE:LINE: ", with "FILE:LINE, entry N: "
for an entry of a list, or with "FILE: " for a file that cannot be read.
"""

import csv
import io
import json
import math
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHITESPACE = re.compile(r"[ \t\r\n]*")  # JSON's whitespace


def read_text(path: str | Path, nul: bool = False) -> str:
    """The text of a UTF-8 file, without a byte order mark. nul: whether it may hold NUL."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None
    # UTF-16 without a byte order mark decodes as UTF-8, with a NUL at every other place.
    if not nul and "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text (it holds a NUL)")
    return text


def read_lines(path: str | Path) -> list[str]:
    """The lines of a file. A line ends at \\n or \\r\\n, and may contain Unicode's other line
    breaks."""
    lines = read_text(path).split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def parse_json_line(text: str, path: str | Path, line: int) -> Any:
    """The JSON value of `text`, which is line `line` of the file."""
    value, end = _decode(text, 0, path, line)
    if end != len(text):
        raise ValueError(f"{path}:{line}: not JSON (more than one value: column {end + 1})")
    return value


def read_json_list(path: str | Path) -> Iterator[tuple[str, Any]]:
    """("FILE:LINE, entry N", value) of each entry of a file that is one JSON list."""
    text = read_text(path)
    end = _skip(text, 0)
    if not text.startswith("[", end):
        raise ValueError(f"{path}:1: not a JSON list, which begins with '['")
    end = _skip(text, end + 1)
    line, index, is_over = 1 + text.count("\n", 0, end), 0, text.startswith("]", end)
    while not is_over:
        start, label = end, f", entry {index}"
        value, end = _decode(text, start, path, line, label)
        yield f"{path}:{line}{label}", value
        is_over = text.startswith("]", end)
        if not is_over and not text.startswith(",", end):
            line += text.count("\n", start, end)
            raise ValueError(f"{path}:{line}{label}: not JSON (no ',' or ']' follows it)")
        if not is_over:
            end = _skip(text, end + 1)
        line, index = line + text.count("\n", start, end), index + 1
    rest = _skip(text, end + 1)
    if rest != len(text):
        line += text.count("\n", end, rest)
        raise ValueError(f"{path}:{line}: not JSON (something follows the list)")


def read_csv(
    path: str | Path, *allowed: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...], dict[str, str]]]:
    """("FILE:LINE", columns, row) of each row below the header.

    allowed: alternative sets of columns. The file must have all columns of one set, and may have
        more columns. `columns` is the first set in `allowed` that the file has.
    """
    reader = csv.DictReader(io.StringIO(read_text(path, nul=True), newline="\n"), strict=True)
    line = 1  # where the next row begins
    try:
        header = list(reader.fieldnames or [])
        columns = next((c for c in allowed if set(c) <= set(header)), None)
        if columns is None or len(set(header)) < len(header):
            expected = " or ".join(",".join(c) for c in allowed)
            found = ",".join(header) or "(none)"
            raise ValueError(f"{path}:1: has columns {found}; expected {expected}, each once")
        line = reader.line_num + 1
        for row in reader:
            where, line = f"{path}:{reader.line_num}", reader.line_num + 1
            if None in row or None in row.values():
                raise ValueError(f"{where}: a row needs {len(header)} values, as the header has")
            yield where, columns, row
    except csv.Error as error:
        raise ValueError(f"{path}:{line}: not CSV ({error})") from None


def shown(value: Any) -> str:
    """A value as short text for a message, however long or deep the value is."""
    return reprlib.repr(value)


def _decode(text: str, start: int, path: str | Path, line: int, label: str = "") -> tuple[Any, int]:
    """The JSON value at `start`, and the end of the whitespace after it."""
    where = f"{path}:{line}{label}"
    start = _skip(text, start)
    try:
        value, end = DECODER.raw_decode(text, start)
        # A JSON escape may be half a surrogate pair, which is no character.
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line += text.count("\n", start, error.pos)
        problem = f"{error.msg}: column {error.colno}"
        raise ValueError(f"{path}:{line}{label}: not JSON ({problem})") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON that is nested too deep") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise ValueError(f"{where}: {half} is half a surrogate pair, not a character") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return value, _skip(text, end)


def _skip(text: str, start: int) -> int:
    """The end of the whitespace at `start`."""
    return WHITESPACE.match(text, start).end()  # type: ignore[union-attr]


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def _integer(text: str) -> int:
    _number(text)  # refuse integers here that could not be converted to float later
    return int(text)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the object has {shown(twice)} twice")
    return value


DECODER = json.JSONDecoder(
    parse_float=_number,
    parse_int=_integer,
    parse_constant=_no_number,
    object_pairs_hook=_object,
)
