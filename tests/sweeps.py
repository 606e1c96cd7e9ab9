"""Marks for the cases of a test that are slow or belong to the sweeps."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow(names: Iterable[str], chosen: Collection[str]) -> list[Any]:
    """The cases of these names; the `chosen` ones are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in chosen)) for name in names]


def swept(cases: Sequence[Any], first: int) -> list[Any]:
    """The cases; all but the `first` run in the sweeps alone."""
    plain = [getattr(case, "values", case) for case in cases]
    names = [getattr(case, "id", None) for case in cases]
    return [
        pytest.param(*(values if isinstance(values, tuple) else (values,)), id=name,
                     marks=[pytest.mark.sweep] * (number >= first))
        for number, (values, name) in enumerate(zip(plain, names, strict=True))
    ]  # fmt: skip
