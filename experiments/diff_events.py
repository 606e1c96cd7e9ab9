"""Report the first difference between the event logs of two runs, ignoring times.

    python -m experiments.diff_events results/a/events.jsonl results/b/events.jsonl

Prints the event that differs, its step or request, the field and both values. For a difference in
the slots, starts, counts or tokens of a step, also prints the slot and request of the row. Fields
that end in _s are times. Log-probabilities are ignored too. Exit status: 0 if all other fields are
equal, 1 for a difference, 2 for any error, such as an invalid or truncated log.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.lib.event_log import Event, EventLog, read_log
from experiments.lib.program import Program, refusals
from experiments.lib.run_record import plain
from experiments.lib.typed_flags import Flags, arguments, flag

ABSENT = "nothing"  # shown as the value of a field that an event lacks
# Array of a step -> its axis of rows.
ROW_INDEX = {"slots": 0, "starts": 0, "counts": 0, "tokens": 1}


@dataclass(frozen=True)
class DiffFlags(Flags):
    logs: tuple[str, ...] = arguments("two event logs")
    context: int = flag(3, "events to show before the difference", least=0)


@dataclass(frozen=True)
class Difference:
    """The first difference of two logs.

    number: index of the event, from 0.
    events: both logs' events at `number`; None for a log that has ended.
    field: path of the field that differs, as "counts[2]" or "config.page_size"; empty if a log has
        ended.
    values: both values of the field.
    slot, request_id: slot and request of the row that differs; None if unknown.
    """

    number: int
    events: tuple[dict | None, dict | None]
    field: str = ""
    values: tuple[Any, Any] = (None, None)
    slot: int | None = None
    request_id: str | None = None

    def describe(self, first: str = "A", second: str = "B") -> str:
        """The difference in one line. first, second: names of the logs."""
        where = f"event {self.number} (line {self.number + 1})"
        a, b = self.events
        if a is None or b is None:
            ended, other, extra = (first, second, b) if a is None else (second, first, a)
            assert extra is not None
            return f"{where}: {ended} has ended, {other} goes on with {_label(extra)}"
        if self.field == "event":
            return f"{where}: {_label(a)} in {first}, {_label(b)} in {second}"
        owner = [f"slot {self.slot}"] * (self.slot is not None)
        owner += [str(self.request_id)] * (self.request_id is not None)
        row = f" ({', '.join(owner)})" if owner else ""
        values = [_short(_text(value), 60) for value in self.values]
        return (
            f"{where}, {_label(a)}: {self.field}{row} is {values[0]} in {first}, "
            f"{values[1]} in {second}"
        )


def untimed(event: Event) -> dict[str, Any]:
    """The event as JSON values, without times and log-probabilities. The rounding of these depends
    on the machine."""
    return {
        name: plain(value)
        for name, value in event.items()
        if not name.endswith(("_s", "_logprobs"))
    }


def first_difference(a: Sequence[Event], b: Sequence[Event]) -> Difference | None:
    """The first difference of the logs in `untimed` events; None if there is none."""
    for number, events in enumerate(zip(a, b)):
        first, second = map(untimed, events)
        if first != second:
            field, indices, values = _inside(first, second)
            row = ROW_INDEX.get(field.partition("[")[0], len(indices))
            owner = _row_owner(a, number, indices[row]) if row < len(indices) else (None, None)
            return Difference(number, (first, second), field, values, *owner)
    number = min(len(a), len(b))
    ends = [untimed(log[number]) if number < len(log) else None for log in (a, b)]
    return Difference(number, (ends[0], ends[1])) if len(a) != len(b) else None


def _inside(a: Any, b: Any) -> tuple[str, tuple[int, ...], tuple[Any, Any]]:
    """The first difference of unequal JSON values: (path, its list indices, both values)."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            values = a.get(key, ABSENT), b.get(key, ABSENT)
            if values[0] != values[1]:
                path, indices, values = _inside(*values)
                return f"{key}{'' if path[:1] in ('', '[') else '.'}{path}", indices, values
    if isinstance(a, list) and isinstance(b, list):
        for i, values in enumerate(zip(a, b)):
            if values[0] != values[1]:
                path, indices, values = _inside(*values)
                return f"[{i}]{'' if path[:1] in ('', '[') else '.'}{path}", (i, *indices), values
        return "[length]", (), (len(a), len(b))
    return "", (), (a, b)


def _row_owner(log: Sequence[Event], number: int, row: int) -> tuple[int | None, str | None]:
    """(slot, request id) of a row in the step of event `number`; None for an unknown value."""
    owners: dict[int, str] = {}
    for event in log[: number + 1]:
        if event["event"] == "admit":
            owners |= {int(slot): event["request_id"] for slot in event.get("slots", [])}
        elif event["event"] == "schedule" and event["step"] == log[number].get("step"):
            slot = int(event["slots"][row]) if row < len(event["slots"]) else None
            return slot, None if slot is None else owners.get(slot)
    return None, None


def _label(event: Event) -> str:
    """An event's name in a message."""
    kind = str(event["event"])
    if "step" in event:
        return f"{kind} {event['step']}" if kind == "step" else f"{kind} of step {event['step']}"
    if "request_id" not in event:
        return kind
    reason = f" ({event['finish_reason']})" if "finish_reason" in event else ""
    return f"{kind} of {event['request_id']}{reason}"


def _text(value: Any) -> str:
    return ABSENT if value is ABSENT else json.dumps(value, ensure_ascii=False)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def report(
    a: Sequence[Event], difference: Difference, first: str, second: str, context: int = 3
) -> str:
    """The difference in a line, up to `context` events of log `a` before it, and both events."""
    number = difference.number
    before = range(max(0, number - context), number)
    rows = [(" ", i, untimed(a[i])) for i in before]
    rows += [(sign, number, e) for sign, e in zip("<>", difference.events) if e is not None]
    lines = [f"  {sign} {i} {_short(_text(event), 160)}" for sign, i, event in rows]
    return "\n".join([f"first difference: {difference.describe(first, second)}", *lines])


def incomplete(log: EventLog) -> str:
    """A note on a log whose run was interrupted; empty for a complete one."""
    return "" if log.complete else f" ({log.path} ends early: its run was interrupted)"


def main(flags: DiffFlags, _: None) -> int:
    paths = flags.logs
    with refusals():
        if len(paths) != 2:
            raise ValueError(f"two event logs are compared, not {len(paths)}")
        a, b = map(read_log, paths)
    difference = first_difference(a, b)
    notes = incomplete(a) + incomplete(b)
    if difference is None:
        print(f"same schedule, page operations and tokens: {len(a)} events{notes}")
        return 0
    print(report(a, difference, paths[0], paths[1], flags.context) + notes)
    return 1


PROGRAM = Program(main, DiffFlags, None, error_status=2)

if __name__ == "__main__":
    PROGRAM.run()
