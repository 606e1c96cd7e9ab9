"""Programs that run side by side, each in a process and a process group of its own."""

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from typing import Any

from experiments.lib.signals import interrupts


def run_apart(
    program: Callable[..., int], cases: Sequence[tuple[Any, ...]], jobs: int
) -> Generator[tuple[int, int]]:
    """(index of the case, exit status) of `program(*case)`, as they end, `jobs` at once; 128 and
    the signal's number if one ended it.

    program: a function of a module. A terminal's Ctrl-C reaches only this process, which ends the
    others in good order, as it does if the iterator is closed; a second one kills them.
    """
    context, waiting = get_context("spawn"), deque(enumerate(cases))
    running: dict[int, tuple[int, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, case = waiting.popleft()
                process = context.Process(target=_run, args=(program, case))
                process.start()
                running[process.sentinel] = index, process
            for sentinel in connection.wait(list(running)):
                assert isinstance(sentinel, int)
                index, process = running.pop(sentinel)
                process.join()
                assert process.exitcode is not None
                yield index, process.exitcode if process.exitcode >= 0 else 128 - process.exitcode
    finally:
        left = [process for _, process in running.values()]
        try:
            for process in left:
                _send(process, signal.SIGINT)
            for process in left:
                process.join()
        finally:
            for process in left:
                if process.is_alive():
                    _send(process, signal.SIGKILL)


def _run(program: Callable[..., int], case: tuple[Any, ...]) -> None:
    os.setpgrp()
    # A shell starts its background jobs, and so what they start, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with interrupts():
        sys.exit(program(*case))


def _send(process: SpawnProcess, number: signal.Signals) -> None:
    """To its group, which it does not have while Python starts."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
