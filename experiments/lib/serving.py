"""Serving that a signal or a failure may cut short. Results up to then are still written."""

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
    """Serve until the end, or the first signal or failure; then write and print the results.
    Returns the exit status.

    serve: (stop_requested) -> None. stop_requested: returns whether to stop.
    write: (cause of an interruption, or None) -> (text to print, errors of files that could not be
        written).
    files: message that names the written files.
    """
    error: Exception | None = None
    with Stop() as stop:
        try:
            serve(stop.requested)
        except BrokenProcessPool as raised:  # a signal to the process group ended workers
            error = None if stop.requested() else raised
        except Exception as raised:
            error = raised
        except KeyboardInterrupt:  # a second signal; results are still written
            pass
        cause = f"{type(error).__name__}: {error}" if error else stop.cause
        text, failures = write(cause)
        print(text)
        for failure in failures:
            print(f"error: {told(failure)}", file=sys.stderr)
        if not failures:
            print(files)
    if error:
        if isinstance(error, OSError):  # a full disk is not a bug, so no traceback
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
    """Counts of the requests that an interruption left unfinished, for report.json. None without an
    interruption, or if every request has ended.

    requests: number of all requests.
    reasons: finish reasons of the requests that had arrived.
    """
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
    """The line on missing requests below a table; empty if none are missing."""
    if not partial:
        return ""
    return (
        f"\nPARTIAL       {partial['interrupted_by']}: of {partial['requests']} requests "
        f"{partial['ended']} ended, {partial['cut_off']} were cut off and "
        f"{partial['not_served']} not served"
    )
