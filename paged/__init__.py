"""The serving engine: a host loop of plain integers over jitted step functions."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged.config import EngineConfig
    from paged.engine import Engine
    from paged.requests.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "SamplingParams"]
_MODULES = {
    "Engine": "paged.engine",
    "EngineConfig": "paged.config",
    "SamplingParams": "paged.requests.sampling_params",
}


def __getattr__(name: str):
    """Import the engine on first use: modules such as `paged.interrupts` do not need it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
