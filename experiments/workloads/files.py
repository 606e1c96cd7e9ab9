"""Readers of the file formats of workloads, independent of any model.

Every reader raises ValueError, naming the file and the line, for invalid content.
"""

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from experiments.lib.text_files import parse_json_line, read_csv, read_json_list, read_lines, shown

PROMPT_FIELDS = {"prompt", "answer", "max_tokens", "stop", "task"}
TRACE_COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # Azure's traces.
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),  # Simulators' traces; in seconds.
)


# The latest arrival, after about 31 years. Clocks overflow or lose precision beyond it.
MAX_ARRIVAL_S = 1e9


def read_prompts(path: str) -> Iterator[tuple[str, dict]]:
    """The prompts of a file as (place in the file, entry).

    A .jsonl file holds a JSON object per line, any other file a prompt per line.
    """
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if not path.endswith(".jsonl"):
            yield where, {"prompt": line}
        else:
            yield where, prompt_entry(parse_json_line(line, path, number), where)


def prompt_entry(entry: Any, where: str) -> dict:
    """The checked entry of a prompts file, with `stop` as a list. where: place, for errors."""
    _check_texts(entry, ("prompt",), where)
    if unknown := set(entry) - PROMPT_FIELDS:
        raise ValueError(
            f"{where}: unknown {shown(sorted(unknown))}; allowed: {sorted(PROMPT_FIELDS)}"
        )
    for name in ("answer", "task"):
        if not isinstance(entry.get(name), str | None):
            raise ValueError(f"{where}: {name} must be a text, not {shown(entry[name])}")
    stop = entry.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"{where}: stop must be a text or a list of texts, not {shown(stop)}")
    max_tokens = entry.get("max_tokens", 1)
    if not _is_count(max_tokens):
        raise ValueError(
            f"{where}: max_tokens must be a positive integer below 2^31, not {shown(max_tokens)}"
        )
    return entry | {"stop": stops}


def read_sharegpt(path: str) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of each conversation: the first human turn right before a gpt turn."""
    for where, entry in read_json_list(path):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            expected = '{"conversations": [{"from", "value"}, …]}'
            raise ValueError(f"{where}: expected {expected}, found {shown(entry)}")
        for i, turn in enumerate(turns):
            _check_texts(turn, ("from", "value"), f"{where}, turn {i}")
        for asked, answered in itertools.pairwise(turns):
            if asked["from"] == "human" and answered["from"] == "gpt":
                yield asked["value"], answered["value"]
                break


def read_alpaca(path: str) -> Iterator[tuple[str, str]]:
    """The (prompt, answer) of each instruction. An input is a second line of the prompt."""
    for where, entry in read_json_list(path):
        _check_texts(entry, ("instruction", "input", "output"), where)
        yield "\n".join(filter(None, (entry["instruction"], entry["input"]))), entry["output"]


def read_trace(path: str) -> list[tuple[float, int, int]]:
    """(arrival in s, prompt tokens, output tokens) of all rows, sorted; the first arrives at 0."""
    rows = []
    for where, columns, row in read_csv(path, *TRACE_COLUMNS):
        values = [row[c] for c in columns]
        seconds: Callable[[str], float] = float if columns[0] == "arrived_at" else _timestamp
        try:
            arrival, prompt, output = seconds(values[0]), int(values[1]), int(values[2])
        except (ValueError, OverflowError, OSError):
            raise ValueError(
                f"{where}: cannot read {shown(values)} as an arrival and two numbers of tokens"
            ) from None
        if not abs(arrival) < 1e12 or not _is_count(prompt) or not _is_count(output):
            raise ValueError(
                f"{where}: a request needs an arrival within ±1e12 s and from 1 to 2^31 - 1 tokens "
                f"in and out, not {shown(values)}"
            )
        rows.append((arrival, prompt, output))
    rows.sort(key=lambda row: row[0])
    return [(arrival - rows[0][0], prompt, output) for arrival, prompt, output in rows]


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _check_texts(entry: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object, found {shown(entry)}")
    for name in names:
        if name not in entry:
            raise ValueError(f"{where}: the object lacks {name!r}, found {shown(entry)}")
        if not isinstance(entry[name], str):
            raise ValueError(f"{where}: {name} must be a text, not {shown(entry[name])}")
