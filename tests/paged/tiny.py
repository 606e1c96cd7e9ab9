"""A model that is small enough to compile and run in tests; its parameters are random."""

import jax

from experiments.lib.presets import TINY as TINY
from experiments.lib.presets import padded as padded
from models import llama
from models import params as parameters
from models.config import ModelConfig


def random_params(model: ModelConfig = TINY):
    params = parameters.init(llama.declare(model), jax.random.key(1))
    # Larger embeddings give varied continuations instead of one token forever.
    return params | {"embed": params["embed"] * 50}
