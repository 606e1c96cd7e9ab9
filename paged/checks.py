"""Help texts and bounds of fields, and checks of values, for frozen dataclasses that users fill."""

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)  # above 0: a device may flush smaller numbers to 0
LONGEST_SHOWN = 80  # characters of a refused value


def described[T](
    default: T, help: str, *, least: float | None = None, above: float | None = None,
    most: float | None = None, below: float | None = None,
) -> T:  # fmt: skip
    """A dataclass field with this default and a help text, for readers and users.

    least, above, most, below: bounds of a number, which `require_bounds` checks.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata={"help": help} | given)


def help_of(dataclass) -> dict[str, str]:
    """Help texts by field name, for fields that have one."""
    fields = dataclasses.fields(dataclass)
    return {field.name: field.metadata["help"] for field in fields if "help" in field.metadata}


def is_bool(value) -> bool:
    return isinstance(value, bool | np.bool_)


def is_whole(value) -> bool:
    """Whether `value` is a Python or numpy integer, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def is_real(value) -> bool:
    """Whether `value` is a number within the range of float32."""
    if isinstance(value, float | np.floating):
        return abs(float(value)) <= LARGEST
    # An integer that is too large for a float can still be compared with a float.
    return is_whole(value) and abs(int(value)) <= LARGEST


def is_text(value) -> bool:
    """Whether `value` is a string that UTF-8 can encode, without half a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# type: (names of its values in messages, test of a value, conversion to Python's type)
_TYPES: dict[Any, tuple[tuple[str, ...], Callable[[Any], bool], Callable[[Any], Any]]] = {
    bool: (("True", "False"), is_bool, bool),
    int: (("a whole number",), is_whole, int),
    float: (("a finite number",), is_real, float),
    str: (("a text",), is_text, str),
    types.NoneType: (("None",), lambda value: value is None, lambda value: None),
}


def make_plain(config, unbounded: Collection[str] = ()) -> None:
    """Check a frozen dataclass, and convert numpy values of its fields to plain Python values.

    Covers fields declared as a bool, int, float, str, None, a literal or a union of these. Raises
    ValueError for a value of another type.

    unbounded: float fields that may be inf or nan.
    """
    cls: Any = type(config)
    for name, exact, kinds in _plain_fields(cls):
        value = getattr(config, name)
        if type(value) not in exact and not (name in unbounded and type(value) is float):
            object.__setattr__(config, name, _plain(name, value, kinds))


def _plain(name: str, value, kinds: tuple):
    for kind in kinds:
        if get_origin(kind) is Literal:
            if is_text(value) and value in get_args(kind):
                return str(value)
        elif _TYPES[kind][1](value):
            return _TYPES[kind][2](value)
    raise refusal(name, _described(kinds), value)


@functools.cache
def _plain_fields(cls: type) -> list[tuple[str, set[type], tuple]]:
    """(name, types of values that may stay as they are, declared types) of each field to check."""
    fields = []
    for name, hint in get_type_hints(cls).items():
        union = get_origin(hint) in (Union, types.UnionType)
        kinds = get_args(hint) if union else (hint,)
        if all(kind in _TYPES or get_origin(kind) is Literal for kind in kinds):
            fields.append((name, {k for k in kinds if k in _TYPES and k is not float}, kinds))
    return fields


def _described(kinds: tuple) -> str:
    named = (
        map(repr, get_args(kind)) if get_origin(kind) is Literal else _TYPES[kind][0]
        for kind in kinds
    )
    *before, last = (part for parts in named for part in parts)
    return f"{', '.join(before)} or {last}" if before else last


def require_bounds(config) -> None:
    """Raise ValueError for the first field of a dataclass whose number is outside its bounds."""
    for field in dataclasses.fields(config):
        allowed = outside(field.metadata, value := getattr(config, field.name))
        if allowed is not None:
            raise refusal(field.name, allowed, value)


def outside(bounds: Mapping[str, Any], value) -> str | None:
    """The numbers that `bounds` allow, in words, if `value` is outside them; else None. A `value`
    of None is inside all bounds."""
    least, above, most, below = map(bounds.get, ("least", "above", "most", "below"))
    if value is None or (
        (least is None or value >= least) and (above is None or value > above)
        and (most is None or value <= most) and (below is None or value < below)
    ):  # fmt: skip
        return None
    if least is not None and most is not None:
        return f"from {least} to {most}"
    words = {"at least": least, "above": above, "at most": most, "below": below}
    return " and ".join(
        f"{word} {_exponent(bound) if word == 'below' else bound}"
        for word, bound in words.items()
        if bound is not None
    )


def _exponent(bound: float) -> str:
    """A number as text. Large powers of two are written like 2^31."""
    power = int(bound).bit_length() - 1
    return f"2^{power}" if power >= 15 and bound == 2**power else str(bound)


def require(config, conditions: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ValueError for the first field whose condition does not hold.

    conditions: field → (whether its value is allowed, the allowed values in words).
    """
    for name, (good, allowed) in conditions.items():
        if not good:
            raise refusal(name, allowed, getattr(config, name))


def refusal(name: str, allowed: str, value) -> ValueError:
    """The error for a field whose value is not allowed."""
    return ValueError(f"{name} must be {allowed}, not {shown(value)}")


def shown(value) -> str:
    """A value as an error message shows it: in one line, and cut if it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"
