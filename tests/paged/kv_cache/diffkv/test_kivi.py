"""KIVI's tokens and attention against a loop in NumPy, and the sizes of its pages."""

from typing import Any

import numpy as np
import pytest

from paged.config import EngineConfig
from paged.kv_cache import POLICIES
from paged.kv_cache.diffkv.layout import layout_of
from paged.kv_cache.diffkv.options import Options
from paged.kv_cache.diffkv.snapshot import snapshot
from paged.kv_cache.policy import ShardedModel
from tests.paged.kv_cache.attention_driver import Driver
from tests.paged.kv_cache.diffkv.kivi_oracle import kivi_attention
from tests.paged.tiny import TINY

L, H, K = 2, 4, 2
KIVI: dict[str, Any] = {"prompt_rule": "kivi", "generation_rule": "kivi"}


def config_of(options, **changes) -> EngineConfig:
    sizes: dict[str, Any] = dict(
        max_num_seqs=3, max_num_batched_tokens=96, max_prefills_per_step=2, max_model_len=80,
        page_size=3, kv_cache_tokens=400, policy="diffkv", chunked_prefill=False,
    )  # fmt: skip
    return EngineConfig(**sizes | changes, policy_options=KIVI | options)


@pytest.mark.parametrize(
    ("low", "group", "rest", "parts", "dim"),
    [
        ("K4V4", 8, 16, 1, 8),
        pytest.param("K2V2", 16, 16, 2, 32, marks=pytest.mark.slow),
        pytest.param("K4V2", 8, 24, 1, 16, marks=pytest.mark.slow),
    ],
)
def test_attention_is_that_of_a_loop(low, group, rest, parts, dim):
    """Prompts end within a group, within the residual, and at the end of a group. In the first two
    sequences, decode steps then write each place of the residual twice."""
    model = TINY.replace(num_layers=L, num_heads=H, num_kv_heads=K, head_dim=dim)
    options = {"high": "auto", "low": low, "window": rest, "key_group": group, "groups": parts}
    config = config_of(options)
    rng, prompts = np.random.default_rng(7), [rest + 2 * group - 3, 3, 2 * rest]
    lengths = [prompts[0] + 2 * rest + 1, 3 + 2 * rest, 2 * rest + 4]
    # A few channels are large, as in real keys.
    large = np.where(np.arange(dim) % 7 == 3, 6.0, 1.0)
    qkv = [
        [
            np.float64(np.float32(x * rng.normal(size=(L, n, h, dim))))
            for h, x in ((H, 1.0), (K, large), (K, 1.0))
        ]
        for n in lengths
    ]
    driver = Driver(model, config, qkv, prompts)
    left = [n - prompt for n, prompt in zip(lengths, prompts)]
    steps = [[(0, prompts[0]), (1, 3)], [(1, 1), (2, prompts[2])]]
    left[1] -= 1
    while any(left):
        steps.append([(slot, 1) for slot in range(3) if left[slot]])
        left = [max(0, x - 1) for x in left]
    host: Any = driver.host
    Tp = sum(prompts[:2]) + 2

    def what_the_host_reckons_with_is_exact() -> None:
        driver.observe()
        assert host._held.tolist() == host.layout.worst(driver.computed).tolist()

    found = driver.run(steps, max(Tp, prompts[2]), 3, what_the_host_reckons_with_is_exact)
    assert driver._run._cache_size() == 1

    (state,) = snapshot(host.layout, driver.cache)
    bits = int(low[1]), int(low[3])
    for slot, (n, prompt) in enumerate(zip(lengths, prompts)):
        ours = found[slot].reshape(L, n, K, H // K, dim)
        for layer, head in np.ndindex(L, K):
            q, k, v = (x[layer].reshape(n, K, -1, dim)[:, head] for x in qkv[slot])
            expected = kivi_attention(q, k[:, 0], v[:, 0], prompt, rest, group, bits, parts)
            # A scale very near to a 16-bit float may round to it or to the next, and one here does.
            np.testing.assert_allclose(ours[layer, :, head], expected, atol=5e-4)
            high, lower = state.heads[slot][layer * K + head]
            assert sorted(high.positions) == list(range(n - rest, n))
            assert lower.positions == list(range(n - rest))


def test_a_page_has_the_bytes_of_codes_and_scales_alone():
    """With head dim 128, a token of 2 bits takes 64 bytes of codes, 16 of key scales and 16 of
    value scales. A token of 16 bits takes 512 bytes. A page holds 64 tokens of 2 bits or 12 tokens
    of 16 bits."""
    options = Options(high="K16V16", low="K2V2", key_group=32, groups=4, window=128, **KIVI)
    high, low = options.formats(12, 128, "float16")
    assert (high.token_bytes, low.token_bytes) == (512, 64 + 16 + 16)
    assert (high.tokens, low.tokens) == (12, 64) and 4 * low.words == 64 * low.token_bytes
    model = ShardedModel.split(TINY.replace(num_heads=4, num_kv_heads=2, head_dim=128))
    config = config_of(
        vars(options), page_size=12, max_model_len=1024, max_num_batched_tokens=1024,
        kv_cache_tokens=4000,
    )  # fmt: skip
    layout = layout_of(config, model)
    # Each of four heads has 11 pages of the residual and 14 of the 896 tokens before it.
    assert int(layout.worst(1024)) == layout.max_pages == 4 * (11 + 14)
    assert layout.table_width == 25
    assert layout.worst(100) == 4 * 9
    assert layout.uncompressed(np.array([100, 1024])).tolist() == [[400, 0], [4 * 128, 4 * 896]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "KIVI needs prompt_rule=kivi, generation_rule=kivi and a key_group above 0"),
        ({"key_group": 8, "generation_rule": "paper"}, "above 0, not kivi, paper and 8"),
        ({"key_group": 24}, r"window \(64\) must be whole groups of key_group \(24\)"),
        ({"key_group": 8, "top": "auto"}, r"KIVI keeps and reads all tokens .* unset top"),
        ({"key_group": 8, "read_pages": 4}, r"unset read_pages \(4\)"),
        ({"key_group": -8}, "key_group must be at least 0"),
    ],
)
def test_what_kivi_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_group": 16, "low": "K4V4"}, r"a head dim \(8\) of whole groups of 16 tokens"),
        ({"key_group": 8, "low": "auto"}, "keys by channel need scales"),
        ({"key_group": 8, "low": "K8V8", "high": "K8V8"}, "a group of 8 tokens does not fit"),
    ],
)
def test_pages_that_hold_no_group_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        POLICIES["diffkv"].check(config_of(options), TINY)
