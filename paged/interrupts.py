"""Interrupts that Python drops are sent again, so that no Ctrl-C is lost.

Ctrl-C raises KeyboardInterrupt in whatever Python code runs. In finalizers, and in callbacks of
weak references and of the garbage collector (JAX has one), Python only prints the exception, and
continues.
"""

import signal
import sys
import threading
import time
import traceback
from types import CodeType

AGAIN_S = 0.01
# The signal to send again, by class of the exception. Subclasses need entries of their own.
SIGNALS: dict[type[BaseException], int] = {KeyboardInterrupt: signal.SIGINT}


def keep_interrupts() -> None:
    """Install a hook that sends each dropped interrupt again as a signal, which ends blocking
    waits."""
    before = sys.unraisablehook
    if getattr(before, "keeps_interrupts", False):
        return

    def hook(unraisable) -> None:
        if (number := SIGNALS.get(unraisable.exc_type)) is None:
            before(unraisable)
        else:
            threading.Thread(target=_send, args=(number, hook.__code__), daemon=True).start()

    hook.keeps_interrupts = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def _send(number: int, hook: CodeType) -> None:
    """Send the signal to the main thread once it has left the hook, because an exception raised in
    the hook would be lost too."""
    main = threading.main_thread().ident
    assert main is not None
    inside = True
    while inside:
        time.sleep(AGAIN_S)
        walk = traceback.walk_stack(sys._current_frames().get(main))
        inside = any(frame.f_code is hook for frame, _ in walk)
    signal.pthread_kill(main, number)
