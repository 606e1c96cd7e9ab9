"""Serving that a signal or a failure may cut short. What was served is written anyway."""

import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from experiments.lib.program import Refused, told
from experiments.lib.report import COMPLETE
from experiments.lib.signals import Stop


def serve_and_write(
    serve: Callable[[Callable[[], bool]], Any],
    write: Callable[[str | None], tuple[str, list[OSError]]],
    files: str,
) -> int:
    """Serve, until the end or the first signal or failure, then write and tell what was served; the
    exit status.

    serve: gets what says whether to stop. write: gets what has cut it short, None if nothing has;
    returns what to print, and what could not be written. files: where and what they are, in words.
    """
    error: Exception | None = None
    with Stop() as stop:
        try:
            serve(stop.requested)
        except BrokenProcessPool as raised:  # a signal to the terminal's group ends workers too
            error = None if stop.requested() else raised
        except Exception as raised:
            error = raised
        except KeyboardInterrupt:  # the second signal: what was served is written all the same
            pass
        cause = f"{type(error).__name__}: {error}" if error else stop.cause
        text, failures = write(cause)
        print(text)
        for failure in failures:
            print(f"error: {told(failure)}", file=sys.stderr)
        if not failures:
            print(files)
    if error:
        if isinstance(error, OSError):  # a full disk is no fault of the program
            cause = told(error)
        elif isinstance(error, Refused):
            cause = str(error)
        else:
            traceback.print_exception(error)
        print(f"error: {cause}", file=sys.stderr)
        return 1
    return 128 + stop.signal if stop.signal else int(bool(failures))


def missing(
    cause: str | None, requests: int, reasons: Collection[str | None]
) -> dict[str, Any] | None:
    """What an interrupt or a failure, if there was a cause, left out, for report.json; None if
    every request has ended. reasons: why requests ended, of those that had arrived."""
    ended = sum(reason in COMPLETE for reason in reasons)
    if cause is None or ended == requests:
        return None
    return {
        "interrupted_by": cause,
        "requests": requests,
        "ended": ended,
        "cut_off": len(reasons) - ended,
        "not_served": requests - len(reasons),
    }


def partial_line(partial: Mapping[str, Any] | None) -> str:
    """What a table adds of what is missing."""
    if not partial:
        return ""
    return (
        f"\nPARTIAL       {partial['interrupted_by']}: of {partial['requests']} requests "
        f"{partial['ended']} ended, {partial['cut_off']} were cut off and "
        f"{partial['not_served']} not served"
    )
