"""The attention of every policy and preset on 2, 4 and 8 devices equals that on one device, for
models with 1, 2 and 4 KV heads.

A process fixes its number of devices once. So this file also runs as a program, in a process with
eight devices, and prints the differences that the tests check. The sweeps cover all cases, the
other tests two of them.
"""

import json
import sys

import numpy as np
import pytest

from experiments.lib.presets import PRESETS, model_of
from tests.paged.devices import printed_with_devices
from tests.paged.kv_cache.attention_driver import Driver, random_qkv

LENGTHS, PROMPTS = (58, 46), [41, 30]
# Both prompts in one step, because DiffKV's presets need whole prompts; then decode steps.
STEPS = [[(0, 41), (1, 30)]] + [[(0, 1), (1, 1)]] * 16 + [[(0, 1)]]
# Four shards share the one KV head under lserve; under diffkv_streaming, two share each of two.
SOME = [("lserve", 1, 4), ("diffkv_streaming", 2, 4)]
ALL = [(name, K, size) for name in PRESETS for K in (1, 2, 4) for size in (2, 4, 8)]


def attention(name: str, num_kv_heads: int, size: int) -> list[np.ndarray]:
    """The attention [L, n, H, D] of each sequence."""
    model = model_of(num_kv_heads)
    config = PRESETS[name].engine_config(
        model, tensor_parallel=size, max_num_seqs=2, max_num_batched_tokens=80
    )
    return Driver(model, config, random_qkv(model, LENGTHS, (2, 2, 2)), PROMPTS).run(STEPS, 72, 2)


def differences(cases) -> dict[str, float]:
    """The largest difference of each case from one device."""
    alone: dict[tuple[str, int], list[np.ndarray]] = {}
    found = {}
    for name, K, size in cases:
        if (name, K) not in alone:
            alone[name, K] = attention(name, K, 1)
        pairs = zip(attention(name, K, size), alone[name, K], strict=True)
        found[f"{name} {K} {size}"] = max(float(np.abs(a - b).max()) for a, b in pairs)
        print(f"{name} {K} {size}", found[f"{name} {K} {size}"], file=sys.stderr, flush=True)
    return found


# Slow: another process compiles each case.
@pytest.mark.parametrize(
    "which",
    [pytest.param("some", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.sweep)],
)
def test_attention_is_that_of_one_device(which):
    """A shard that selected other pages, or kept other tokens, would differ by far more."""
    found = printed_with_devices("tests.paged.kv_cache.test_presets_on_devices", 8, which)
    assert len(found) == len({"some": SOME, "all": ALL}[which])
    assert max(found.values()) < 1e-4, found


if __name__ == "__main__":
    print(json.dumps(differences({"some": SOME, "all": ALL}[sys.argv[1]])))
