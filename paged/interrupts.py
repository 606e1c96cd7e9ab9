"""No Ctrl-C is lost.

Ctrl-C raises KeyboardInterrupt wherever Python code runs. In code that nobody called, callbacks of
weak references and of the garbage collector (JAX has one) and finalizers, Python can only print
what is raised, and goes on as if nothing had been.
"""

import signal
import sys
import threading

AGAIN_S = 0.01
# The signal of each exception that must not be lost, itself and not its subclasses.
SIGNALS: dict[type[BaseException], int] = {KeyboardInterrupt: signal.SIGINT}


def keep_interrupts() -> None:
    """From now on an interrupt that Python would drop is sent again, as a signal, to end waits
    too."""
    before = sys.unraisablehook
    if getattr(before, "keeps_interrupts", False):
        return

    def hook(unraisable) -> None:
        if (number := SIGNALS.get(unraisable.exc_type)) is None:
            before(unraisable)
        else:  # later, as what is raised here would be lost too
            main = threading.main_thread().ident
            threading.Timer(AGAIN_S, signal.pthread_kill, (main, number)).start()

    hook.keeps_interrupts = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
