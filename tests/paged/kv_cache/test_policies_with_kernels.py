"""Policies with the kernels for Hopper, in Pallas's interpreter."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.engine import EngineConfig
from paged.kv_cache import POLICIES
from paged.kv_cache.policy import ShardedModel
from tests.paged.kv_cache.attention_driver import Driver, random_qkv
from tests.paged.tiny import TINY

MODEL = replace(TINY, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64)
# Layer 0 has no streaming heads, and its dense heads select nothing. In layer 1 the second head
# streams, in layer 2 the first.
OPTIONS = {
    "budget": 48, "logical_page": 4, "sink": 16, "local": 16, "dense_layers": 1,
    "gates": ((0.9, 0.9), (0.9, 0.1), (0.1, 0.9)), "streaming_share": 1 / 3,
}  # fmt: skip
LENGTHS, PROMPTS = (90, 60), [70, 50]


class KernelDriver(Driver):
    """After `run_kernels`, steps run the kernels, one op and one layer at a time. Inside of one
    program, the threads of interpreted kernels may wait for each other for ever."""

    dtype = "float32"  # of the kernels' inputs

    def run_kernels(self) -> None:
        policy, sharded = POLICIES[self.config.policy], ShardedModel.split(self._model)
        self.device = policy.device(self.config, sharded, "mosaic_gpu")
        self._run = self._attend_each

    def _attend_each(self, cache, inputs, *qkv):
        inputs = jax.tree.map(jnp.asarray, inputs)
        cache, plan = jax.jit(self.device.begin_step)(cache, inputs)
        outs = []
        for layer in range(self._model.num_layers):
            q, k, v = (jnp.asarray(x[layer], self.dtype) for x in qkv)
            out, cache = self.device.attend(jnp.int32(layer), q, k, v, cache, plan, inputs)
            outs.append(out)
        return self.device.end_step(cache, plan, inputs), jnp.stack(outs)


@pytest.mark.slow
def test_lserves_attention_of_kernels_is_that_of_xla():
    """A chunk and a decode that reads selected pages, in layers of each kind."""
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=128, max_prefills_per_step=2, max_model_len=96,
        page_size=16, kv_cache_tokens=640, kv_dtype="float16", policy="lserve",
        policy_options=OPTIONS,
    )  # fmt: skip
    qkv = random_qkv(MODEL, LENGTHS)
    xla, kernels = (KernelDriver(MODEL, config, qkv, PROMPTS) for _ in range(2))
    for driver in (xla, kernels):
        driver.step([(0, 70), (1, 33)], Tp=112, Sd=2)
        if driver is kernels:
            driver.run_kernels()
    expected, found = (driver.step([(0, 1), (1, 17)], Tp=17, Sd=2) for driver in (xla, kernels))
    for slot in (0, 1):
        np.testing.assert_allclose(found[slot], expected[slot], atol=5e-3)


@pytest.mark.sweep
def test_diffkvs_attention_of_kernels_is_that_of_xla():
    """Prompts, whose scores decide which tokens are kept, and decodes that demote tokens."""
    model = replace(MODEL, num_layers=1)
    options = {"alpha_h": 1.0, "alpha_l": 0.3, "low": "K4V4", "window": 8}
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=256, max_prefills_per_step=2, max_model_len=96,
        page_size=32, kv_cache_tokens=2560, chunked_prefill=False, policy="diffkv",
        policy_options=options,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    qkv = [[rng.normal(size=(1, n, h, 64)).astype(np.float16) for h in (4, 2, 2)] for n in LENGTHS]
    xla, kernels = (KernelDriver(model, config, qkv, PROMPTS) for _ in range(2))
    kernels.dtype = "float16"
    kernels.run_kernels()
    for chunks, Tp in (([(0, 70), (1, 50)], 128), ([(0, 1), (1, 1)], 0)):
        expected, found = (driver.step(chunks, Tp=Tp, Sd=2) for driver in (xla, kernels))
        for slot, _ in chunks:
            np.testing.assert_allclose(found[slot], expected[slot], atol=5e-3)
        kept, kept_by_xla = (
            np.asarray(driver.device.report(driver.cache)["kept"]) for driver in (kernels, xla)
        )
        np.testing.assert_array_equal(kept, kept_by_xla)
    assert (kept.sum(1) < np.array([71, 51]) * 2).all()
