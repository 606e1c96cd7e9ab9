"""The engine's decode step at a real model's shapes, with random weights.

Apart from experiments.gpu.check because it needs the engine's packages, and not JAX alone.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.floors import Work, step_work
from models import checkpoint
from models import params as parameters
from models.config import ModelConfig
from models.families import family
from paged.config import EngineConfig
from paged.device.step import StepProgram
from paged.device.step_inputs import StepInputs
from paged.device.tensor_parallel import Shards

LLAMA = Path(__file__).parents[2] / "configs" / "models" / "llama-3-8b"
PAGE_SIZE = 16
STEPS = 20  # dispatched one after the other, waited for at the end


def time_decode_step(small: bool) -> tuple[str, float, Work]:
    """What is timed, the seconds of a step, and what it cannot do without."""
    model, decodes, context = (
        (checkpoint.load_config("bundled"), 2, 64)
        if small
        else (checkpoint.load_config(LLAMA), 64, 4096)
    )
    name = f"{'bundled' if small else LLAMA.name}, {decodes} sequences of {context} tokens"
    return name, *_seconds_and_work(model, decodes, context, jnp.bfloat16)


def _seconds_and_work(model: ModelConfig, decodes: int, context: int, dtype) -> tuple[float, Work]:
    config = EngineConfig(
        max_num_seqs=decodes,
        max_num_batched_tokens=decodes,
        max_model_len=context,
        page_size=PAGE_SIZE,
        kv_cache_tokens=decodes * context + PAGE_SIZE,
        watermark=0.0,
    )
    program = StepProgram.declare(config, Shards(model))
    declared = family(model).declare(model)
    params = parameters.init(declared, jax.random.key(0), dtype)
    cache, state = program.init(dtype)()
    inputs = program.empty_inputs((0, decodes))
    _fill(inputs, context)
    compiled = program.compile((0, decodes), params, None, cache, state)

    def run(steps, cache, state):
        for _ in range(steps):
            cache, state, _ = compiled(params, None, cache, state, inputs.packed)
        return jax.block_until_ready((cache, state))

    cache, state = run(2, cache, state)
    start = time.perf_counter()
    run(STEPS, cache, state)
    seconds = (time.perf_counter() - start) / STEPS
    work = step_work(model, [context] * decodes, bytes_per_number=jnp.dtype(dtype).itemsize)
    return seconds, work


def _fill(inputs: StepInputs, context: int) -> None:
    """Rows whose last token is computed, over blocks in no order."""
    S, M = np.shape(inputs.tables)
    inputs.tokens[:] = 1
    inputs.positions[:] = context - 1
    inputs.token_rows[:] = inputs.last_tokens[:] = inputs.slots[:] = np.arange(S)
    inputs.lengths[:] = context
    inputs.samples[:] = inputs.iterations[:] = 1
    # Block 0 is nobody's.
    blocks = 1 + np.random.default_rng(0).permutation(S * -(-context // PAGE_SIZE))
    inputs.tables[:, : -(-context // PAGE_SIZE)] = blocks.reshape(S, -1)
