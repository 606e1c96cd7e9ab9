"""Programs and calls that run in processes of their own."""

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

END_SECONDS = 10  # for a killed process, which may wait for a device


def run_apart(
    program: Callable[..., int], cases: Sequence[tuple[Any, ...]], jobs: int
) -> Generator[tuple[int, int]]:
    """Run `program(*case)` for each case, `jobs` at once. Yields (index of the case, exit status)
    as processes end; the status is 128 plus the signal's number if a signal ended the process.

    program: a module-level function.

    Ctrl-C in a terminal does not reach programs that have begun. On Ctrl-C this process sends them
    SIGINT and waits for them. Closing the iterator does the same. A second Ctrl-C kills them.
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


def call_apart[T](
    prepare: Callable[[], None], seconds: float, function: Callable[..., T], *arguments: Any
) -> T:
    """`function(*arguments)` in a process of its own, after `prepare()` there. Several threads may
    call this at once. Once begun, the call ignores Ctrl-C; a caller that is interrupted kills it.

    prepare, function: module-level functions.

    Raises RuntimeError if the call fails or its process dies, TimeoutError after `seconds`, and
    ImportError if the call raises it.
    """
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(
        target=_answer, args=(sending, prepare, function, arguments), daemon=True
    )
    try:
        process.start()
        sending.close()  # so that the end of the process ends the pipe
        if not receiving.poll(seconds):
            raise TimeoutError(f"no result after {seconds:.0f} s")
        result = receiving.recv()
    except EOFError:
        process.join(END_SECONDS)
        raise RuntimeError(f"the process ended with status {process.exitcode}") from None
    finally:
        if process.pid is not None:
            process.kill()
            process.join(END_SECONDS)
        sending.close()
        receiving.close()
    if isinstance(result, Exception):
        raise result
    return result


def _answer(sending: connection.Connection, prepare: Callable, function: Callable, args: tuple):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        prepare()
        result = function(*args)
    except ImportError as error:
        result = ImportError(str(error))
    except Exception as error:  # The parent may be unable to load other exceptions.
        result = RuntimeError(f"{type(error).__name__}: {error}")
    sending.send(result)


def _run(program: Callable[..., int], case: tuple[Any, ...]) -> None:
    os.setpgrp()
    # A shell starts background jobs with SIGINT ignored, and their children inherit this setting.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with interrupts():
        sys.exit(program(*case))


def _send(process: SpawnProcess, number: signal.Signals) -> None:
    """Send a signal to the process's group, or to the process alone while Python starts, when the
    group does not exist yet."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
