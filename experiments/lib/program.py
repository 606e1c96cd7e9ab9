"""How the programs of `experiments` start and end.

Exit status:

    0         success
    1         an error that the user can fix, printed as one line 'error: …'
    130       ended by SIGINT (Ctrl-C)
    143       ended by SIGTERM

Any other exception is a bug, and shows its traceback. Before `Program.run`, while Python imports
modules, signals have Python's default effect.
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
    """An error that the user can fix. The program prints its message without a traceback."""


@contextmanager
def refusals() -> Iterator[None]:
    """A context for checks of input: turns a ValueError into Refused."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


class Unfailing:
    """A stream whose errors do not end the program: output is dropped if the disk is full or the
    pipe is closed."""

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
    """A program.

    main: (flags, output) -> exit status; None for 0.
    flags: class of the flags.
    output: default output folder; None for a program that writes no files. If the default is empty,
        the program writes only if --output_dir is set. The folder is made before `main` is called.
        A folder is refused if it is not writable, or if report.json, summary.json or one of `files`
        is a folder there. Without --overwrite, a run never replaces a run with other flags.
    files: names of output files beside report.json and summary.json.
    error_status: exit status of every error, for programs where 1 has another meaning.
    study: the study's name in its report.json; empty for a program that is no study.
    """

    main: Callable[[F, O], int | None]
    flags: type[F]
    output: O
    files: tuple[str, ...] = ()
    error_status: int = 1
    study: str = ""

    def run(self) -> None:
        """Run the program with the flags of the command line, and exit."""
        # Otherwise transformers advises at every start to install torch, which is not needed.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        # Otherwise absl's log shows JAX's search for TPUs.
        logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
        # sys.stderr is None if its descriptor is closed. The stream stays open until exit.
        sys.stderr = cast(TextIO, Unfailing(sys.stderr or open(os.devnull, "w")))  # noqa: SIM115
        with interrupts():
            self.start(self.define())

    def define(self) -> list[str]:
        """Define the flags; returns their names."""
        before = set(flags.FLAGS)
        define_typed(self.flags)
        if self.output is not None:
            with group("output"):
                define_fields(self.output)
        return [name for name in flags.FLAGS if name not in before]

    def start(self, names: Sequence[str], argv: list[str] | None = None) -> None:
        """Run the program with the flags of these names, parsed from argv (None: the command line),
        and exit."""
        try:
            app.run(lambda rest: self._call(rest[1:], names), argv, flags_parser=self._parse)
        except Exception:
            traceback.print_exc()
            sys.exit(self.error_status)

    def _parse(self, argv: list[str]) -> list[str]:
        flags.DEFINE_flag(Help())
        try:
            return flags.FLAGS(_with_flagfiles_found(argv))
        except (flags.Error, UnicodeDecodeError) as error:  # Unicode: a binary flagfile
            self._fail(f"{error}; --help lists the flags")
        except OSError as error:
            _give_up_broken_stdout()
            self._fail(told(error))
        except SystemExit:  # absl's other help flags exit after showing help
            sys.exit()

    def _call(self, arguments: Sequence[str], names: Sequence[str]) -> int | None:
        # Some terminals cannot show every character of a prompt.
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
        """`main`, bound to its flags and output. Raises ValueError for invalid flags or folders."""
        values = {name: flags.FLAGS[name].value for name in names}
        given = typed(self.flags, values, arguments)
        if self.output is None:
            return partial(self.main, given, self.output)
        output = typed(type(self.output), values)
        if self.output.output_dir or output.output_dir:
            if not output.overwrite:
                free = _free_folder(output.output_dir, given, self.study)
                output = replace(output, output_dir=free)
            run_record.check_output_dir(output.output_dir, *self.files)
        return partial(self.main, given, output)

    def _fail(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(self.error_status)


def _free_folder(output_dir: str, asked: Flags, study: str) -> str:
    """The first of FOLDER, FOLDER-2, FOLDER-3, … that holds no run with other flags or of another
    study. Raises ValueError if --output_dir sets a folder that holds a run with other flags."""
    folder, number = output_dir, 1
    while differs := run_record.other_flags(folder, asked, study):
        if not flags.FLAGS["output_dir"].using_default_value:
            raise ValueError(
                f"{folder} holds another run ({differs}): name another --output_dir, or "
                "let --overwrite replace it"
            )
        number += 1
        folder = f"{output_dir}-{number}"
    if number > 1:
        print(f"{output_dir} holds another run: this one is in {folder}")
    return folder


@contextmanager
def extra(name: str) -> Iterator[None]:
    """A context for imports that need extra `name` of pyproject.toml. If a module is missing, the
    program exits with a line on how to install it."""
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
    """The message of an OSError: its file, and the error."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _give_up_broken_stdout() -> None:
    """Redirect stdout to devnull if it cannot be flushed. Otherwise Python would flush it again at
    exit, and print another error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
