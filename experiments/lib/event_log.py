"""Event logs as files: a line for each event of `Engine.events`, and a last line that ends the log.

The last line is {"event": "end", "events": N, "complete": true}, after N events. `complete` is
false if the run was interrupted. A log without this line is truncated.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.lib.run_record import write_json_lines
from experiments.lib.text_files import parse_json_line, read_lines, shown
from models.checkpoint import DTYPES
from paged.metrics import RequestRecord, StepRecord

Event = Mapping[str, Any]
Kind = tuple[str, Callable[[Any], bool]]  # the kind of a value: (description, test)


def _list_of(kind: Kind) -> Kind:
    words, test = kind
    return f"a list, each {words}", lambda v: isinstance(v, list) and all(map(test, v))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_pages(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[0], str):
        return False
    return value[1] in PAGE_VERBS and COUNTS[1](value[2])


PAGE_VERBS = ("allocate", "share", "release", "evict")
TEXT: Kind = "a text", lambda v: isinstance(v, str)
NAME: Kind = "a text or null", lambda v: v is None or isinstance(v, str)
TRUTH: Kind = "true or false", lambda v: isinstance(v, bool)
ANYTHING: Kind = "anything", lambda v: True
DTYPE: Kind = f"one of {', '.join(DTYPES)}", lambda v: v in DTYPES
OBJECT: Kind = "an object", lambda v: isinstance(v, dict)
INTEGER: Kind = "a whole number", lambda v: type(v) is int
COUNT: Kind = "a whole number from 0", lambda v: type(v) is int and v >= 0
COUNTS = _list_of(COUNT)
NUMBER: Kind = "a number", _is_number
PAGES = _list_of(
    (
        f"a pool, one of {', '.join(PAGE_VERBS)} and a list of units",
        _is_pages,
    )
)


def _is_known(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"tokens", "finish_reason", "score"}:
        return False
    reason = value["finish_reason"]
    return (
        COUNTS[1](value["tokens"])
        and (reason is None or isinstance(reason, str))
        and _is_number(value["score"])
    )


KNOWN: Kind = "an object of tokens, finish_reason and score", _is_known


def _kinds_of(record: type) -> dict[str, Kind]:
    kinds: dict[Any, Kind] = {
        int: COUNT,
        float: NUMBER,
        str: TEXT,
        float | None: ("a number or null", lambda v: v is None or _is_number(v)),
    }
    return {field.name: kinds[field.type] for field in dataclasses.fields(record)}


# Required fields of each event besides `event` and `time_s`, as `paged.event_log` writes them.
FIELDS: dict[str, dict[str, Kind]] = {
    "engine": {"config": OBJECT, "model": OBJECT, "dtype": DTYPE},
    "arrival": {
        "round": COUNT, "request_id": TEXT, "prompt_tokens": COUNT, "prompt": COUNTS,
        "sampling": OBJECT, "stream": TRUTH, "cache_salt": TEXT, "adapter": NAME,
        "known": _list_of(KNOWN),
    },
    "adapter": {
        "round": COUNT, "name": TEXT, "folder": TEXT, "content_hash": TEXT, "rank": COUNT,
    },
    "load": {
        "adapter": TEXT, "content_hash": TEXT, "slot": COUNT, "pages": COUNTS,
        "evicted": _list_of(TEXT),
    },
    "loaded": {"round": COUNT, "adapter": TEXT, "content_hash": TEXT, "error": NAME},
    "abort": {"round": COUNT, "request_id": TEXT},
    "pin": {"round": COUNT, "prompt": COUNTS, "cache_salt": TEXT, "adapter": NAME},
    "failure": {"round": COUNT},
    "preempt": {"request_id": TEXT},
    "admit": {"request_id": TEXT, "slots": COUNTS},
    "schedule": {
        "step": COUNT, "slots": COUNTS, "starts": COUNTS, "counts": COUNTS, "sources": COUNTS,
        "moves": OBJECT, "pages": PAGES,
    },
    "step": _kinds_of(StepRecord) | {
        "tokens": _list_of(_list_of(INTEGER)), "report": ANYTHING,
    },
    "beams": {
        "step": COUNT, "request_id": TEXT, "before": COUNTS, "candidates": _list_of(COUNTS),
        "candidate_logprobs": _list_of(_list_of(NUMBER)), "parents": COUNTS, "slots": COUNTS,
    },
    "finish": _kinds_of(RequestRecord),
    "pages": {"pages": PAGES},
}  # fmt: skip
END = {"event": TEXT, "events": COUNT, "complete": TRUTH}


class EventLog(list[dict]):
    """The events of a log file. complete: False if the run was interrupted.

    Construction raises ValueError, naming file and line, for an invalid event. Except for the place
    of `engine`, each event is checked alone; a replay detects events that no run can have written
    together.
    """

    def __init__(self, path: str | Path, events: Iterable[Any], complete: bool = True):
        super().__init__(events)
        self.path, self.complete = path, complete
        for number, event in enumerate(self):
            with self.at(number):
                _check_fields(event)
        with self.at(0):
            if not self or self[0]["event"] != "engine":
                raise ValueError("the log does not begin with the event 'engine'")
        for number, event in enumerate(self[1:], 1):
            if event["event"] == "engine":
                with self.at(number):
                    raise ValueError("engine: a log has one, its first event")

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """A context in which a ValueError names file and line of event `number`, from 0. Other
        errors that an invalid log can cause become ValueErrors too."""
        where = f"{self.path}:{number + 1}"
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{where}: no run can have written this log ({error!r})") from error


def write_log(
    output_dir: str | Path, name: str, events: Sequence[Event], complete: bool = True
) -> Path:
    """Write the events of a run and the end line; returns the path of the file.

    complete: False if the run was interrupted.
    """
    end = {"event": "end", "events": len(events), "complete": complete}
    return write_json_lines(output_dir, name, [*events, end])


def read_log(path: str | Path) -> EventLog:
    """The events of a file that `write_log` wrote. Raises ValueError, naming file and line, for an
    invalid log."""
    values = [parse_json_line(line, path, i) for i, line in enumerate(read_lines(path), 1)]
    where, end = f"{path}:{max(1, len(values))}", values[-1] if values else None
    if not isinstance(end, dict) or end.get("event") != "end":
        raise ValueError(f"{where}: the log is cut short: its last line is no event 'end'")
    try:
        _check_kinds(end, END)
        if end["events"] != len(values) - 1:
            raise ValueError(f"{len(values) - 1} events precede it, not {end['events']}")
    except ValueError as error:
        raise ValueError(f"{where}: end: {error}") from None
    return EventLog(path, values[:-1], end["complete"])


def _check_fields(event: Any) -> None:
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError(f"an event is an object with a text 'event', not {shown(event)}")
    kind = event["event"]
    if kind not in FIELDS:
        raise ValueError(f"unknown event {shown(kind)}; allowed: {', '.join(FIELDS)}")
    try:
        _check_kinds(event, {"event": TEXT, "time_s": NUMBER} | FIELDS[kind])
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None


def _check_kinds(event: Event, kinds: Mapping[str, Kind]) -> None:
    for name in sorted(event.keys() ^ kinds.keys()):
        if name not in event:
            raise ValueError(f"it lacks {name!r}")
        raise ValueError(f"it has an unknown field {shown(name)}")
    for name, (words, test) in kinds.items():
        if not test(event[name]):
            raise ValueError(f"{name} must be {words}, not {shown(event[name])}")
