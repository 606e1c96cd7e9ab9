"""Event logs as files: a line for each event of `Engine.events`, and one that says it is the end.

The last line is {"event": "end", "events": N, "complete": true}: N events are above it. A run that
was interrupted writes false there; a log without this line was cut short.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.lib.run_record import write_json_lines
from experiments.lib.text_files import parse_json_line, read_lines, shown
from models.checkpoint import DTYPES
from paged.metrics import NO_TOKEN, RequestRecord, StepRecord

Event = Mapping[str, Any]
Kind = tuple[str, Callable[[Any], bool]]  # what a value must be, in words and as a test


def _list_of(kind: Kind) -> Kind:
    words, test = kind
    return f"a list, each {words}", lambda v: isinstance(v, list) and all(map(test, v))


def _is_integer(value: Any) -> bool:
    return type(value) is int


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
INTEGER: Kind = "a whole number", _is_integer
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


# The fields of each event, all of them needed, as `paged.event_log` writes them.
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
    """The events of a log file. complete: whether the run came to its end.

    Construction raises ValueError, naming file and line, for events that no run can have written.
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
            run = _Run(self[0])
        for number, event in enumerate(self[1:], 1):
            with self.at(number):
                run.go_on(event)

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Let a ValueError say that it is about event `number`, counted from 0."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.path}:{number + 1}: {error}") from error


def write_log(
    output_dir: str | Path, name: str, events: Sequence[Event], complete: bool = True
) -> Path:
    """Write the events of a run and its end; the path of the file.

    complete: False if the run was interrupted.
    """
    end = {"event": "end", "events": len(events), "complete": complete}
    return write_json_lines(output_dir, name, [*events, end])


def read_log(path: str | Path) -> EventLog:
    """The events of a file of `write_log`; ValueError, naming file and line, if it is none."""
    values = [parse_json_line(line, path, i) for i, line in enumerate(read_lines(path), 1)]
    where, end = f"{path}:{max(1, len(values))}", values[-1] if values else None
    if not isinstance(end, dict) or end.get("event") != "end":
        raise ValueError(f"{where}: the log is cut short: its last line is no event 'end'")
    try:
        _check_kinds(end, END)
        if end["events"] != len(values) - 1:
            raise ValueError(f"{end['events']} events are to be above, not {len(values) - 1}")
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


class _Run:
    """What a log has told so far, as far as it bounds what may come next."""

    def __init__(self, engine: Event):
        slots, vocab_size = engine["config"].get("max_num_seqs"), engine["model"].get("vocab_size")
        eos = engine["model"].get("eos_token_ids")
        if not _is_integer(slots) or not _is_integer(vocab_size) or not isinstance(eos, list):
            raise ValueError(
                "engine: needs whole numbers config.max_num_seqs and model.vocab_size, and a list "
                "model.eos_token_ids"
            )
        self.num_slots, self.vocab_size, self.num_eos = slots, vocab_size, len(eos)
        self.round = self.num_steps = 0
        self.unfinished: dict[str, Event] = {}  # arrivals
        self.in_flight: dict[int, int] = {}  # rows of each step whose tokens are to come
        self.last_step = -1  # whose tokens came
        self.adapters: set[tuple[str, str]] = set()  # by name and content hash
        self.loading: set[tuple[str, str]] = set()
        self.may_skip_step = False  # a failure may have hit one before it was written down

    def go_on(self, event: Event) -> None:
        """Raise ValueError if the event cannot be the next one."""
        kind = event["event"]
        if kind == "engine":
            raise ValueError("engine: a log has one, its first event")
        try:
            if "round" in event:
                if event["round"] < self.round:
                    raise ValueError(f"round {event['round']} comes after round {self.round}")
                self.round = event["round"]
            if kind == "arrival":
                self._arrive(event)
            elif "request_id" in event and event["request_id"] not in self.unfinished:
                raise ValueError(f"there is no unfinished request {shown(event['request_id'])}")
            if kind == "finish":
                del self.unfinished[event["request_id"]]
            elif kind == "failure":
                self.unfinished.clear()
                self.in_flight.clear()
                self.may_skip_step = True
                self.loading.clear()
            elif kind == "admit":
                self._check_slots(event["slots"])
            elif kind in ("adapter", "load", "loaded"):
                self._check_adapter(kind, event)
            elif kind == "schedule":
                self._schedule(event)
            elif kind == "step":
                self._take_in(event)
            elif kind == "beams":
                self._check_beams(event)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from None

    def _arrive(self, event: Event) -> None:
        if event["request_id"] in self.unfinished:
            raise ValueError(f"request {shown(event['request_id'])} is there and unfinished")
        for tokens in (event["prompt"], *(each["tokens"] for each in event["known"])):
            self._check_tokens(tokens)
        self.unfinished[event["request_id"]] = event

    def _check_adapter(self, kind: str, event: Event) -> None:
        if kind == "adapter":
            self.adapters.add((event["name"], event["content_hash"]))
            return
        which = event["adapter"], event["content_hash"]
        if which not in self.adapters:
            raise ValueError(f"there is no adapter {shown(which[0])} of that content")
        if (which in self.loading) == (kind == "load"):
            so = "already" if kind == "load" else "not"
            raise ValueError(f"adapter {shown(which[0])} is {so} being loaded")
        self.loading ^= {which}

    def _schedule(self, event: Event) -> None:
        number = event["step"]
        if number < self.num_steps or (number > self.num_steps and not self.may_skip_step):
            raise ValueError(f"step {number} is scheduled where {self.num_steps} must be")
        rows = len(event["slots"])
        self._check_slots(event["slots"])
        if not rows == len(event["starts"]) == len(event["counts"]) > 0:
            raise ValueError("slots, starts and counts must be equally many, and one at least")
        if any(row >= rows for row in event["sources"]):
            raise ValueError(f"sources must be below the number of rows, {rows}")
        self.num_steps, self.may_skip_step = number + 1, False
        self.in_flight[number] = rows

    def _take_in(self, event: Event) -> None:
        number = event["step"]
        if number != min(self.in_flight, default=None):
            raise ValueError(f"the tokens of step {number} are not those that come next")
        rows = self.in_flight.pop(number)
        self.last_step = number
        for iteration in event["tokens"]:
            if len(iteration) != rows:
                raise ValueError(f"step {number} has {rows} rows, and {len(iteration)} tokens")
            self._check_tokens(iteration, NO_TOKEN)

    def _check_beams(self, event: Event) -> None:
        if event["step"] != self.last_step:
            raise ValueError(f"step {event['step']} is not the last, which is {self.last_step}")
        before, sampling = event["before"], self.unfinished[event["request_id"]]["sampling"]
        self._check_slots(before)
        self._check_slots(event["slots"])
        width, eos = sampling.get("beam_width"), 0 if sampling.get("ignore_eos") else self.num_eos
        if not _is_integer(width) or width < 2:
            raise ValueError("its request is no beam search")
        if not len(before) == len(event["candidates"]) == len(event["candidate_logprobs"]) > 0:
            raise ValueError("before, candidates and candidate_logprobs must be equally many")
        for tokens, logprobs in zip(event["candidates"], event["candidate_logprobs"]):
            self._check_tokens(tokens)
            if not len(set(tokens)) == len(tokens) == len(logprobs) == width + eos:
                raise ValueError(f"each beam has {width + eos} distinct candidates")
            if not all(abs(logprob) < 1e9 for logprob in logprobs):
                raise ValueError("log-probabilities must be within ±1e9")
        if len(event["parents"]) != len(event["slots"]) or not set(event["parents"]) <= set(before):
            raise ValueError("parents must be slots of `before`, one for each of `slots`")

    def _check_slots(self, slots: Sequence[int]) -> None:
        if len(set(slots)) < len(slots) or any(slot >= self.num_slots for slot in slots):
            raise ValueError(f"slots must be distinct and below {self.num_slots}")

    def _check_tokens(self, tokens: Sequence[int], least: int = 0) -> None:
        for token in tokens:
            if not least <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
