"""How the programs of this folder start and end.

Exit status: 0; 1 for what the user can mend, told in a line that begins with 'error: '; 130 and 143
after SIGINT (Ctrl-C) and SIGTERM. Anything else is a fault of the program, and shows its traceback.
Until `run` is called, while Python imports the modules, a signal ends it as it ends any program.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from absl import app


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a program as Ctrl-C does."""


def run(main: Callable[[Sequence[str]], None], define_flags: Callable[[], list[str]]) -> None:
    """Define the flags, read the command line, and `call` main with the flags' names."""
    with interrupts():
        names = define_flags()
        app.run(lambda argv: call(main, argv, names))


@contextmanager
def interrupts() -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM end the program with a line and their exit statuses."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        sys.exit(128 + number)


def call(main: Callable[[Sequence[str]], None], argv: Sequence[str], names: Sequence[str]) -> None:
    """main(names), with the exit status of errors; argv: the command line without flags."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags are --name=value")
    # Not every terminal can show every character of a prompt.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        main(names)
        sys.stdout.flush()
    except OSError as error:
        _give_up_broken_stdout()
        sys.exit(f"error: {told(error)}")


def _give_up_broken_stdout() -> None:
    """What a full disk or a closed pipe did not take would be tried, and complained about, again at
    exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def refusals() -> Iterator[None]:
    """While the input is checked: a ValueError ends the program, and its message is all it says."""
    try:
        yield
    except ValueError as error:
        sys.exit(f"error: {error}")


def told(error: OSError) -> str:
    """An error of the system in words: which file, and what is wrong."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


class Stop:
    """Within its `with`, the first SIGINT or SIGTERM is only noted: whoever works asks `requested`
    now and then, and ends in good order. The next one interrupts as ever."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        self.signal = signal.Signals(number)
        self.__exit__()

    def requested(self) -> bool:
        return self.signal is not None

    @property
    def cause(self) -> str | None:
        """The name of the signal, if one came."""
        return None if self.signal is None else self.signal.name


def _terminate(number, frame):
    raise Terminated
