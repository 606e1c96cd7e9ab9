"""Scale, soft cap and windows of a model's layers, under the policies that support them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig
from paged.engine import EngineConfig
from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention
from pallas_kernels.prompt_attention import prompt_attention
from tests.paged.kv_cache.attention_driver import Driver, random_qkv

L, H, K, D = 3, 4, 2, 8
MODEL = ModelConfig(
    num_layers=L, num_heads=H, num_kv_heads=K, head_dim=D, sliding_window=9, full_layers=(1,),
    query_scale=0.5, attention_cap=1.5, max_position_embeddings=64,
)  # fmt: skip
EXACT = {"high": "auto", "low": "auto", "alpha_h": 0.0, "alpha_l": 0.0}
GATES = ((0.9, 0.1), (0.1, 0.9), (0.9, 0.9))
STREAMING = EXACT | {"gates": GATES, "streaming_share": 1 / 3, "sink": 3, "local": 7}
LENGTHS, PROMPTS = (44, 30), (29, 18)


def attention(q, k, v, prompt: int, streams: bool, window: int | None) -> np.ndarray:
    """Attention [n, D] of one head in float64. In a streaming head, generated tokens see the first
    3 and the last 7 tokens, except tokens outside of the window."""
    at = np.arange(len(q))
    seen = at <= at[:, None]
    if window is not None:
        seen &= at > at[:, None] - window
    if streams:
        seen &= (at[:, None] < prompt) | (at < 3) | (at > at[:, None] - 7)
    scores = 1.5 * np.tanh(q @ k.T * 0.5 / 1.5)
    weights = np.where(seen, np.exp(scores), 0)
    return weights / weights.sum(1, keepdims=True) @ v


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("vllm", None),
        ("lserve", {"budget": 64, "logical_page": 2, "sink": 4, "local": 8}),
        ("diffkv", EXACT),
        pytest.param("diffkv", STREAMING, marks=pytest.mark.slow),
    ],
    ids=["vllm", "lserve", "diffkv", "diffkv_streaming"],
)
def test_layers_have_their_own_windows(policy, options):
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=64, max_prefills_per_step=2, max_model_len=64,
        page_size=4, kv_cache_tokens=320, policy=policy, policy_options=options,
    )  # fmt: skip
    qkv = random_qkv(MODEL, LENGTHS, seed=2)
    driver = Driver(MODEL, config, qkv, list(PROMPTS))
    streams: Any = np.zeros((L, K), bool)
    if options is STREAMING:
        streams[[0, 1], [1, 0]] = True
    both = [[(0, 1), (1, 1)]] * 12
    found = driver.run([[(0, 29)], [(1, 18)], *both, *[[(0, 1)]] * 3], 32, 2)
    for slot, (q, k, v) in enumerate(qkv):
        for layer, h in np.ndindex(L, H):
            kv = h // (H // K)
            expected = attention(
                q[layer, :, h], k[layer, :, kv], v[layer, :, kv], PROMPTS[slot],
                streams[layer, kv], None if layer == 1 else 9,
            )  # fmt: skip
            np.testing.assert_allclose(found[slot][layer, :, h], expected, atol=1e-5)


def test_kernels_refuse_in_words_what_they_do_not_mask():
    pages, table = jnp.zeros((4, 16, 64), jnp.bfloat16), jnp.zeros((1, 1, 2), jnp.int32)
    q, ones = jnp.zeros((1, 1, 64), jnp.bfloat16), jnp.ones((1, 1), jnp.int32)
    how: Any = {"implementation": "mosaic_gpu"}
    with pytest.raises(ValueError, match="reads tables from their beginning"):
        paged_attention(q, pages, pages, table, ones, first_SxK=ones, **how)
    starts = jnp.array([0, 1])
    with pytest.raises(ValueError, match="reads tables from their beginning"):
        paged_prefill_attention(q, pages, pages, table, starts, ones[0], first_T=ones[0], **how)
    with pytest.raises(ValueError, match="it has no soft_cap and no sliding_window"):
        prompt_attention(q, q, q, starts, soft_cap=2.0, sliding_window=3, **how)
