"""The timer, on a clock that the test advances."""

from functools import partial

import pytest

from experiments import timing
from experiments.timing import Case


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, as a list of one number."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_cases_take_turns_and_medians_leave_out_the_first(clock):
    calls, seconds = [], {"a": iter([9, 1, 2, 30]), "b": iter([9, 5, 5, 5])}

    def work(name):
        calls.append(name)
        clock[0] += next(seconds[name])

    found = timing.medians_s({name: partial(work, name) for name in "ab"}, rounds=3)
    assert found == {"a": 2, "b": 5} and calls == ["a", "b"] * 4


def test_what_prepares_is_not_timed(clock):
    def prepare():
        clock[0] += 100
        return 3

    def work(argument):
        clock[0] += argument

    assert timing.medians_ms({"a": Case(work, prepare)}, rounds=2) == {"a": 3000}
