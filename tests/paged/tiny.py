"""A model that is small enough to compile and run in tests; its parameters are random."""

import jax

from experiments.lib.presets import TINY as TINY
from models import llama
from models import params as parameters
from models.config import ModelConfig
from paged.device.buckets import Buckets
from paged.engine import Engine


def random_params(model: ModelConfig = TINY):
    params = parameters.init(llama.declare(model), jax.random.key(1))
    # Larger embeddings give varied continuations instead of one token forever.
    return params | {"embed": params["embed"] * 50}


def padded(engine: Engine) -> Engine:
    """`engine`, with every step padded to the largest size that is declared.

    Two programs are compiled then, where all sizes would be many; `test_engine.py` runs them all.
    """
    sizes = engine.loop._buckets
    engine.loop._buckets = Buckets(sizes.prefill[-1:], sizes.decode[-1:], sizes.mixed[-1:])
    return engine
