"""The engine's decode step at a real model's shapes, with random weights.

A separate module, because experiments.gpu.check must also run without the engine's packages.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import shipped
from experiments.lib.engines import GPU_PAGE_SIZE
from models import checkpoint
from models import params as parameters
from models.families import family
from paged.config import EngineConfig
from paged.device.step import StepProgram
from paged.policy_driver import decode_inputs
from paged.simulator.roofline import step_cost
from paged.tensor_parallel import Shards
from pallas_kernels.specs import Cost

LLAMA = shipped.MODELS / "llama-3-8b"
STEPS = 20  # dispatched back to back; the host waits only for the last step


def time_decode_step(small: bool) -> tuple[str, float, Cost]:
    """(name of the workload, seconds of a step, least cost of a step)."""
    model, decodes, context = (
        (checkpoint.load_config("bundled"), 2, 64)
        if small
        else (checkpoint.load_config(LLAMA), 64, 4096)
    )
    name = f"{'bundled' if small else LLAMA.name}, {decodes} sequences of {context} tokens"
    dtype = jnp.bfloat16
    config = EngineConfig(
        max_num_seqs=decodes,
        max_num_batched_tokens=decodes,
        max_model_len=context,
        page_size=GPU_PAGE_SIZE,
        kv_cache_tokens=decodes * context + GPU_PAGE_SIZE,
        watermark=0.0,
    )
    shards = Shards(model)
    program = StepProgram.declare(config, shards)
    declared = family(model).declare(model)
    params = parameters.init(declared, jax.random.key(0), dtype)
    cache, state = program.init(dtype)()
    inputs = decode_inputs(config, shards.sharded, [context] * decodes)
    # Block tables of random blocks; block 0 is the null block.
    places = np.append(0, 1 + np.random.default_rng(0).permutation(config.num_blocks - 1))
    inputs.tables[:] = places[inputs.tables]
    compiled = program.compile((0, decodes), params, None, cache, state)

    def run(steps, cache, state):
        for _ in range(steps):
            cache, state, _ = compiled(params, None, cache, state, inputs.packed)
        return jax.block_until_ready((cache, state))

    cache, state = run(2, cache, state)
    start = time.perf_counter()
    run(STEPS, cache, state)
    seconds = (time.perf_counter() - start) / STEPS
    return name, seconds, step_cost(model, [context] * decodes, dtype=dtype)
