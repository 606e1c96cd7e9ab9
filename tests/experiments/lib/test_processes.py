"""Programs in processes of their own, with real signals."""

import os
import signal
import time
from pathlib import Path

from experiments.lib.processes import run_apart


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
