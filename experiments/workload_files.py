"""Readers of the file formats that workloads come in. They know formats, not models.

Every reader raises ValueError, naming the file and where it can the line, for what it cannot read.
"""

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

PROMPT_FIELDS = {"prompt", "answer", "max_tokens", "stop", "task"}
TRACE_COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # as Azure publishes it
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),  # as simulators process it, seconds
)


def read_prompts(path: str) -> Iterator[tuple[str, dict]]:
    """(where, entry) of each prompt: JSON lines if the file is .jsonl, else one prompt a line."""
    for number, line in enumerate(_text(path).splitlines(), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        yield where, _prompt_entry(line, where) if path.endswith(".jsonl") else {"prompt": line}


def _prompt_entry(line: str, where: str) -> dict:
    entry = _json(line, where)
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f'{where}: expected an object with a "prompt" text')
    if unknown := set(entry) - PROMPT_FIELDS:
        raise ValueError(f"{where}: unknown {sorted(unknown)}; allowed: {sorted(PROMPT_FIELDS)}")
    for name in ("answer", "task"):
        if not isinstance(entry.get(name), str | None):
            raise ValueError(f"{where}: {name} must be a text, not {entry[name]!r}")
    stop = entry.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"{where}: stop must be a text or a list of texts, not {stop!r}")
    max_tokens = entry.get("max_tokens", 1)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"{where}: max_tokens must be a positive integer, not {max_tokens!r}")
    return entry | {"stop": stops}


def read_sharegpt(path: str) -> Iterator[tuple[str, str]]:
    """(prompt, answer): the first human turn that a gpt turn answers, of each conversation."""
    for entry in _json_list(path):
        try:
            turns = [(turn["from"], turn["value"]) for turn in entry["conversations"]]
        except (KeyError, TypeError):
            expected = '{"conversations": [{"from", "value"}, …]}'
            raise ValueError(f"{path}: expected {expected}, found {entry!r:.80}") from None
        for (asker, prompt), (answerer, answer) in itertools.pairwise(turns):
            if asker == "human" and answerer == "gpt":
                yield prompt, answer
                break


def read_alpaca(path: str) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of each instruction, with its input on a line of its own."""
    for entry in _json_list(path):
        try:
            yield "\n".join(filter(None, (entry["instruction"], entry["input"]))), entry["output"]
        except (KeyError, TypeError):
            expected = '{"instruction", "input", "output"}'
            raise ValueError(f"{path}: expected {expected}, found {entry!r:.80}") from None


def read_trace(path: str) -> list[tuple[float, int, int]]:
    """(arrival in s, prompt tokens, output tokens) of each row, by arrival; the first is at 0."""
    reader = csv.DictReader(_text(path).splitlines())
    header = reader.fieldnames or []
    columns = next((c for c in TRACE_COLUMNS if set(c) <= set(header)), None)
    if columns is None:
        allowed = " or ".join(",".join(c) for c in TRACE_COLUMNS)
        raise ValueError(f"{path} has columns {','.join(header) or '(none)'}; expected {allowed}")
    seconds: Callable[[str], float] = float if columns[0] == "arrived_at" else _timestamp
    rows = []
    for row in reader:
        values = [row[c] for c in columns]
        try:
            arrival, prompt, output = seconds(values[0]), int(values[1]), int(values[2])
        except (TypeError, ValueError):
            raise ValueError(f"{path}, line {reader.line_num}: cannot read {values}") from None
        if prompt < 1 or output < 1 or not math.isfinite(arrival):
            raise ValueError(
                f"{path}, line {reader.line_num}: a request needs a finite arrival and at least "
                f"one token in and out, not {values}"
            )
        rows.append((arrival, prompt, output))
    rows.sort(key=lambda row: row[0])
    return [(arrival - rows[0][0], prompt, output) for arrival, prompt, output in rows]


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error})") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def _json_list(path: str) -> list:
    data = _json(_text(path), path)
    if not isinstance(data, list):
        raise ValueError(f"{path}: expected a JSON list, found {type(data).__name__}")
    return data
