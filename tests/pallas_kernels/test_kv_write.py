"""Writes and copies against numpy loops."""

import jax
import numpy as np

from pallas_kernels.kv_write import copy_pages, write_kv

N, P, K, D = 6, 4, 2, 3


def test_write_kv_puts_each_token_at_its_slot_and_drops_padding():
    rng = np.random.default_rng(0)
    pools = [rng.normal(size=(N, P, D)).astype(np.float32) for _ in range(2)]
    new = [rng.normal(size=(5, K, D)).astype(np.float32) for _ in range(2)]
    slots = rng.permutation(N * P)[: 5 * K].reshape(5, K).astype(np.int32)
    slots[3] = N * P + np.arange(K)
    written = jax.jit(write_kv)(*pools, *new, slots)
    for pool, tokens, result in zip(pools, new, written, strict=True):
        for t in (0, 1, 2, 4):
            for k in range(K):
                pool[slots[t, k] // P, slots[t, k] % P] = tokens[t, k]
        np.testing.assert_array_equal(result, pool)


def test_write_kv_into_donated_pools_needs_no_second_pool():
    pool = jax.ShapeDtypeStruct((1024, 16, 64), np.float32)
    new = jax.ShapeDtypeStruct((8, K, 64), np.float32)
    slots = jax.ShapeDtypeStruct((8, K), np.int32)
    compiled = jax.jit(write_kv, donate_argnums=(0, 1)).lower(pool, pool, new, new, slots).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = 1024 * 16 * 64 * 4
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 100


def test_copy_pages_copies_real_pairs_and_drops_padding():
    pool = np.random.default_rng(1).normal(size=(N, P, D)).astype(np.float32)
    result = jax.jit(copy_pages)(pool, np.array([0, 2, 0], np.int32), np.array([1, 5, N], np.int32))
    pool[1], pool[5] = pool[0], pool[2]
    np.testing.assert_array_equal(result, pool)
