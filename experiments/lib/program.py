"""How the programs of `experiments` start and end.

Exit status: 0; 1 for what the user can mend, told in a line that begins with 'error: '; 130 and 143
after SIGINT (Ctrl-C) and SIGTERM. Anything else is a fault of the program, and shows its traceback.
Until `Program.run` is called, while Python imports the modules, a signal ends it as it ends any
program.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TextIO, cast

from absl import app, flags

from experiments.lib import run_record, shipped
from experiments.lib.flags import Help, define_fields, define_typed, group, typed
from experiments.lib.signals import interrupts
from experiments.lib.typed_flags import Flags, Output

flags.disclaim_key_flags()  # --help lists the flags as the program's own


class Refused(ValueError):
    """What the user can mend: its message is all that a program says of it."""


@contextmanager
def refusals() -> Iterator[None]:
    """While the input is checked: a ValueError is what the user can mend."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


class Unfailing:
    """A stream whose errors do not end the program: progress and messages are dropped if its disk
    is full or its reader has gone."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@dataclass(frozen=True)
class Program[F: Flags, O: Output | None]:
    """A program of one function, `main`. It gets the flags and where to write, and returns the exit
    status, None for 0.

    output: where to write by default; None for a program that writes nowhere. The folder is made
    before `main` is called, and refused if it takes no files, if a folder stands where report.json,
    summary.json or one of `files` would. Unless --overwrite is given, no run replaces one with
    other flags. Where the default is empty, nothing need be written.
    error_status: of every error, where status 1 has another meaning.
    """

    main: Callable[[F, O], int | None]
    flags: type[F]
    output: O
    files: tuple[str, ...] = ()
    error_status: int = 1

    def run(self) -> None:
        """Run it as the command line says, and exit."""
        # transformers would advise at every start to install torch, which nothing here needs.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        # absl's log would show JAX looking for TPUs.
        logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
        # Where the descriptor is closed, sys.stderr is None. The stream is open until the end.
        sys.stderr = cast(TextIO, Unfailing(sys.stderr or open(os.devnull, "w")))  # noqa: SIM115
        with interrupts():
            self.start(self.define())

    def define(self) -> list[str]:
        """Define the flags; their names."""
        before = set(flags.FLAGS)
        define_typed(self.flags)
        if self.output is not None:
            with group("output"):
                define_fields(self.output)
        return [name for name in flags.FLAGS if name not in before]

    def start(self, names: Sequence[str], argv: list[str] | None = None) -> None:
        """Run it with the flags of these names, read from argv (None: the command line)."""
        try:
            app.run(lambda rest: self._call(rest[1:], names), argv, flags_parser=self._parse)
        except Exception:
            traceback.print_exc()
            sys.exit(self.error_status)

    def _parse(self, argv: list[str]) -> list[str]:
        flags.DEFINE_flag(Help())
        try:
            return flags.FLAGS(_with_flagfiles_found(argv))
        except (flags.Error, UnicodeDecodeError) as error:  # the second: a flagfile that is no text
            self._fail(f"{error}; --help lists the flags")
        except OSError as error:
            _give_up_broken_stdout()
            self._fail(told(error))
        except SystemExit:  # absl's other help flags exit after showing help
            sys.exit()

    def _call(self, arguments: Sequence[str], names: Sequence[str]) -> int | None:
        # Not every terminal can show every character of a prompt.
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            with refusals():
                status_of = self._checked(arguments, names)
            status = status_of()
            sys.stdout.flush()
            return status
        except Refused as error:
            self._fail(str(error))
        except OSError as error:
            _give_up_broken_stdout()
            self._fail(told(error))

    def _checked(self, arguments: Sequence[str], names: Sequence[str]) -> Callable[[], int | None]:
        """`main` with what it gets. Raises ValueError for what cannot be."""
        values = {name: flags.FLAGS[name].value for name in names}
        given = typed(self.flags, values, arguments)
        if self.output is None:
            return partial(self.main, given, self.output)
        output = typed(type(self.output), values)
        if self.output.output_dir or output.output_dir:
            if not output.overwrite:
                output = replace(output, output_dir=_free_folder(output.output_dir, given))
            run_record.check_output_dir(output.output_dir, *self.files)
        return partial(self.main, given, output)

    def _fail(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(self.error_status)


def _free_folder(output_dir: str, asked: Flags) -> str:
    """The folder, or, where that is the default and holds a run with other flags, the first of
    FOLDER-2, FOLDER-3, … that does not. Raises ValueError for a named one that does."""
    folder, number = output_dir, 1
    while differs := run_record.other_flags(folder, asked):
        if not flags.FLAGS["output_dir"].using_default_value:
            raise ValueError(
                f"{folder} holds a run with other flags ({differs}): name another --output_dir, or "
                "let --overwrite replace it"
            )
        number += 1
        folder = f"{output_dir}-{number}"
    if number > 1:
        print(f"{output_dir} holds another run: this one is in {folder}")
    return folder


@contextmanager
def extra(name: str) -> Iterator[None]:
    """A context for imports that need the extra of pyproject.toml: if one is missing, the program
    ends with a line that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: this program needs {error.name}: pip install 'paged-jax[{name}]' brings it, "
            f"or in a checkout pip install -e '.[{name}]'"
        )


def _with_flagfiles_found(argv: Sequence[str]) -> list[str]:
    found: list[str] = []
    for argument in argv:
        name, _, path = argument.partition("=")
        if name in ("--flagfile", "-flagfile"):
            argument = f"{name}={shipped.found(path)}" if path else argument
        elif found and found[-1] in ("--flagfile", "-flagfile"):
            argument = shipped.found(argument)
        found.append(argument)
    return found


def told(error: OSError) -> str:
    """An error of the system in words: which file, and what is wrong."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _give_up_broken_stdout() -> None:
    """What a full disk or a closed pipe did not take would be tried, and complained about, again at
    exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
