"""Programs and calls in processes of their own, with real signals."""

import os
import signal
import time
from pathlib import Path

import pytest

from experiments.lib.processes import call_apart, run_apart


def program(folder: Path, name: str) -> int:
    """A task that ends at once, is killed, or sleeps until it is interrupted, as `name` has it."""
    try:
        (folder / name).touch()
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if name.startswith("long"):
            time.sleep(60)
    except KeyboardInterrupt:
        (folder / f"{name} interrupted").touch()
        raise
    return len(name)


def test_each_ends_with_a_status_of_its_own(tmp_path):
    cases = [(tmp_path, "abc"), (tmp_path, "killed"), (tmp_path, "fives")]
    assert sorted(run_apart(program, cases, 2)) == [(0, 3), (1, 128 + 9), (2, 5)]


def test_who_stops_ends_what_runs_and_begins_nothing_more(tmp_path):
    cases = [(tmp_path, name) for name in ("long one", "a", "long two", "never")]
    running = run_apart(program, cases, 2)
    assert next(running) == (1, 1)
    began = time.monotonic()
    while not (tmp_path / "long one").exists():
        assert time.monotonic() < began + 60
        time.sleep(0.05)
    running.close()
    assert (tmp_path / "long one interrupted").exists() and not (tmp_path / "never").exists()


def nothing() -> None:
    pass


def die_by(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_call_apart_ends_with_its_result_whatever_its_process_does():
    assert call_apart(nothing, 60, divmod, 7, 3) == (2, 1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: "):
        call_apart(nothing, 60, divmod, 1, 0)
    with pytest.raises(ImportError, match="no_such_module"):
        call_apart(nothing, 60, __import__, "no_such_module")
    with pytest.raises(RuntimeError, match="the process ended with status -11"):
        call_apart(nothing, 60, die_by, signal.SIGSEGV)
    with pytest.raises(TimeoutError, match="no result after 1 s"):
        call_apart(nothing, 1, time.sleep, 600)
