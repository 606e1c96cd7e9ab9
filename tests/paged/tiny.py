"""A model that is small enough to compile and run in tests; its parameters are random."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib.presets import TINY as TINY
from experiments.lib.presets import padded as padded
from models import llama
from models import params as parameters
from models.config import ModelConfig
from models.full_attention import causal_attend
from paged.engine import Engine, EngineConfig
from paged.requests.sequence import RequestOutput
from paged.simulator.executor import SimulatedExecutor

# Tests with this configuration share compiled programs.
SMALL = EngineConfig(
    max_num_seqs=6, max_num_batched_tokens=32, max_prefills_per_step=2, max_model_len=128,
    page_size=4, kv_cache_tokens=640,
)  # fmt: skip


def random_params(model: ModelConfig = TINY):
    params = parameters.init(llama.declare(model), jax.random.key(1))
    # Larger embeddings give varied continuations instead of one token forever.
    return params | {"embed": params["embed"] * 50}


@jax.jit
def _logits(params, tokens):
    attend, positions = causal_attend(TINY), jnp.arange(len(tokens))
    hidden, _ = llama.forward(params, TINY, tokens, positions, attend)
    return llama.logits(params, TINY, hidden)


def recomputed(params, tokens) -> np.ndarray:
    """Logits [n, V] of n tokens, 128 at most, computed in one piece by `models/` alone."""
    padded = np.zeros(128, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(params, padded))[: len(tokens)]


def simulated(config: EngineConfig) -> Engine:
    """An engine that samples made-up tokens. None is special, so outputs reach their limits."""
    return Engine(TINY, config, SimulatedExecutor(vocab_size=TINY.vocab_size, first_token=3))


def drained(engine: Engine) -> list[RequestOutput]:
    """The outputs of all further steps."""
    outputs: list[RequestOutput] = []
    for _ in range(5000):
        if not engine.has_unfinished():
            return outputs
        outputs += engine.step()
    raise AssertionError("it never ends")
