"""Sensitivity of results to a simulated clock's constants: times of attention and host ±20 %.

A verdict that changes within ±20 % depends on constants that were not measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.lib.typed_flags import flag
from experiments.study import Values

CHANGES = {
    "attention -20 %": {"attention_knob": 0.8},
    "attention +20 %": {"attention_knob": 1.2},
    "host -20 %": {"host_knob": 0.8},
    "host +20 %": {"host_knob": 1.2},
}
# Factor on attention's time, by name of the change, for results without host time.
OF_ATTENTION = {"": 1.0} | {
    name: change["attention_knob"] for name, change in CHANGES.items() if "attention_knob" in change
}
# (factor on attention's time, factor on the host's time), by name.
FACTORS = {
    "": (1.0, 1.0), "attention_0.8": (0.8, 1.0), "attention_1.2": (1.2, 1.0),
    "host_0.8": (1.0, 0.8), "host_1.2": (1.0, 1.2),
}  # fmt: skip
TURNS = "knobs_that_turn_the_claim"


def knobs_flag() -> bool:
    """A field of `Flags`: whether results include CHANGES."""
    return flag(True, "also at ±20 % of attention's and of the host's time")


def varied[Case](case: Case, asked: bool = True) -> dict[str, Case]:
    """change -> the case with that change; empty if `asked` is False. The case's class has the
    fields `attention_knob` and `host_knob`."""
    if not asked:
        return {}
    return {name: replace(case, **factor) for name, factor in CHANGES.items()}  # type: ignore[type-var]


def values[R](
    rows: Sequence[R], of: Callable[[Sequence[R]], Values],
    holds: Callable[[Mapping[str, float]], bool],
) -> Values:  # fmt: skip
    """Values by name:

    NAME: a value of the unchanged rows.
    'NAME, CHANGE': the value of the rows with this change.
    TURNS: number of changes under which the claim's verdict differs. In this verdict, a value that
        is missing under the change is taken from the unchanged rows.

    rows: each has a field `change`, empty for an unchanged row. Rows with a change outside CHANGES
        are ignored.
    of: rows with equal `change` -> their values.
    holds: values -> whether the claim holds.
    """
    by_change = {
        name: [row for row in rows if row.change == name]  # type: ignore[attr-defined]
        for name in ("", *CHANGES)
    }
    plain = of(by_change[""])
    numbers = dict(plain)
    changed = {name: of(found) for name, found in by_change.items() if name and found}
    for name, found in changed.items():
        numbers |= {f"{value}, {name}": number for value, number in found.items()}
    verdicts = [_verdict(holds, {**plain, **found}) for found in changed.values()]
    if verdicts and None not in verdicts:
        verdict = _verdict(holds, plain)
        numbers[TURNS] = sum(each is not verdict for each in verdicts)
    return numbers


def _verdict(holds: Callable[[Mapping[str, float]], bool], found: Mapping[str, Any]) -> bool | None:
    """Whether the claim holds; None if a value that the rule needs is missing."""
    try:
        return bool(holds({name: value for name, value in found.items() if value is not None}))
    except (KeyError, ValueError):
        return None
