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
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn, TextIO, cast

from absl import app, flags

from experiments.lib import run_record, shipped
from experiments.lib.help import OWN, Help, group
from experiments.lib.signals import interrupts

flags.disclaim_key_flags()  # --help lists the flags as the program's own
Options = SimpleNamespace  # the values of a program's flags, by name


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
class Program:
    """A program of one function, `main`. It gets the values of the flags that `define_flags` has
    defined, and returns the exit status, None for 0.

    output_dir: the default of --output_dir; None for a program without one. The folder is made
    before `main` is called, and refused if it takes no files, if a folder stands where report.json,
    summary.json or one of `files` would. Unless --overwrite is given, no run replaces one with
    other flags. Where the default is empty, nothing need be written.
    takes_arguments: what is no flag is in `options.arguments`; otherwise it is refused.
    error_status: of every error, where status 1 has another meaning.
    asked: the flags as report.json has them.
    """

    main: Callable[[Options], int | None]
    define_flags: Callable[[], None]
    output_dir: str | None = None
    files: tuple[str, ...] = ()
    output_help: str = "where the report goes"
    takes_arguments: bool = False
    error_status: int = 1
    asked: Callable[[Options], Any] = vars

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
        with group(OWN):
            self.define_flags()
        if self.output_dir is not None:
            with group("output"):
                flags.DEFINE_string("output_dir", self.output_dir, self.output_help)
                flags.DEFINE_bool(
                    "overwrite",
                    False,
                    "replace a run with other flags in --output_dir; without it such a folder is "
                    "refused, or numbered if it is the default one",
                )
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
            status = self.main(self._checked(arguments, names))
            sys.stdout.flush()
            return status
        except Refused as error:
            self._fail(str(error))
        except OSError as error:
            _give_up_broken_stdout()
            self._fail(told(error))

    def _checked(self, arguments: Sequence[str], names: Sequence[str]) -> Options:
        options = Options(**{name: flags.FLAGS[name].value for name in names})
        if self.takes_arguments:
            options.arguments = arguments
        elif arguments:
            raise Refused(f"unexpected argument {arguments[0]!r}: flags are --name=value")
        if self.output_dir is not None and (self.output_dir or options.output_dir):
            with refusals():
                if not options.overwrite:
                    options.output_dir = _free_folder(options, self.asked(options))
                run_record.check_output_dir(options.output_dir, *self.files)
        return options

    def _fail(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(self.error_status)


def _free_folder(options: Options, asked: Any) -> str:
    """The folder that --output_dir names, or, where that is the default and holds a run with other
    flags, the first of FOLDER-2, FOLDER-3, … that does not. Raises ValueError for a named one that
    does."""
    folder, number = options.output_dir, 1
    while differs := run_record.other_flags(folder, asked):
        if not flags.FLAGS["output_dir"].using_default_value:
            raise ValueError(
                f"{folder} holds a run with other flags ({differs}): name another --output_dir, or "
                "let --overwrite replace it"
            )
        number += 1
        folder = f"{options.output_dir}-{number}"
    if number > 1:
        print(f"{options.output_dir} holds another run: this one is in {folder}")
    return folder


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
