"""Counts every XLA compilation of this process, in any code."""

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _on_event(event: str, duration_secs: float, **_) -> None:
    global _count
    if event == _COMPILE_EVENT:
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


def count() -> int:
    """Programs compiled, or taken from the persistent cache, since this module was imported."""
    return _count
