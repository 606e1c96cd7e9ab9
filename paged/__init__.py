"""The serving engine: a host loop of plain integers over jitted step functions."""

from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sequence import SamplingParams

__all__ = ["Engine", "EngineConfig", "SamplingParams"]
