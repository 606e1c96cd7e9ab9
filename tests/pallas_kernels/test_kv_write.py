"""Every implementation of the KV write and the page copy against numpy loops."""

from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.kv_write import copy_pages, write_kv
from tests.pallas_kernels.interpreted import assert_in_place, run

N, P, K, D = 6, 4, 2, 8
every_implementation = pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic_gpu"])


@every_implementation
def test_write_kv_puts_each_token_at_its_slot_and_drops_padding(implementation):
    rng = np.random.default_rng(0)
    pools = [rng.normal(size=(N, P, D)).astype(np.float32) for _ in range(2)]
    new = [rng.normal(size=(5, K, D)).astype(np.float32) for _ in range(2)]
    slots = rng.permutation(N * P)[: 5 * K].reshape(5, K).astype(np.int32)
    slots[3] = N * P + np.arange(K)
    written = run(write_kv, *pools, *new, slots, implementation=implementation)
    for pool, tokens, result in zip(pools, new, written, strict=True):
        for t in (0, 1, 2, 4):
            for k in range(K):
                pool[slots[t, k] // P, slots[t, k] % P] = tokens[t, k]
        np.testing.assert_array_equal(result, pool)


@every_implementation
def test_copy_pages_copies_real_pairs_and_drops_padding(implementation):
    pool = np.random.default_rng(1).normal(size=(N, P, D)).astype(np.float32)
    sources, destinations = np.array([0, 2, 0], np.int32), np.array([1, 5, N], np.int32)
    result = run(copy_pages, pool, sources, destinations, implementation=implementation)
    pool[1], pool[5] = pool[0], pool[2]
    np.testing.assert_array_equal(result, pool)


def test_write_kv_into_donated_pools_needs_no_second_pool():
    pool = jax.ShapeDtypeStruct((1024, 16, 64), np.float32)
    new = jax.ShapeDtypeStruct((8, K, 64), np.float32)
    slots = jax.ShapeDtypeStruct((8, K), np.int32)
    assert_in_place(write_kv, pool, pool, new, new, slots, donated=2)


@pytest.mark.parametrize(
    ("P", "D", "message"),
    [
        (16, 264, r"at most 256 elements along an axis, not \(16, 264\)"),
        (264, 64, r"at most 256 elements along an axis, not \(264, 64\)"),
        (256, 256, "at most 231424 bytes, not 262144"),
    ],
)
def test_pages_too_large_for_a_kernel_are_refused_and_copied_as_xla(P, D, message):
    pool = np.random.default_rng(2).normal(size=(3, P, D)).astype(np.float32)
    one = np.ones(1, np.int32)
    with pytest.raises(ValueError, match=message):
        copy_pages(pool, 0 * one, one, implementation="mosaic_gpu")
    copied = jax.jit(copy_pages)(pool, 0 * one, one)
    np.testing.assert_array_equal(copied[1], pool[0])


@pytest.mark.parametrize(("heads", "D"), [(2, 264), (264, 8)])
def test_tokens_too_large_for_a_kernel_are_refused_and_written_as_xla(heads, D):
    pool = np.zeros((heads, 1, D), np.float32)
    new = np.random.default_rng(3).normal(size=(1, heads, D)).astype(np.float32)
    slots = np.arange(heads, dtype=np.int32)[None]
    with pytest.raises(
        ValueError, match=rf"at most 256 elements along an axis, not \({heads}, {D}"
    ):
        write_kv(pool, pool, new, new, slots, implementation="mosaic_gpu")
    k_pages, _ = jax.jit(write_kv)(pool, pool, new, new, slots)
    np.testing.assert_array_equal(k_pages[:, 0], new[0])


def test_bad_arguments_are_refused():
    pool, new, slots = np.zeros((N, P, D)), np.zeros((5, K, D)), np.zeros((5, K), np.int32)
    pages = np.zeros(2, np.int32)
    for call, message in [
        (partial(write_kv, pool, pool[:2], new, new, slots), r"v_pages must be \[N, P, D\]"),
        (partial(write_kv, pool, pool, new, new[:2], slots), r"v must be \[T, K, D\] = \[5, "),
        (
            partial(write_kv, pool, pool, new, new, slots[:2]),
            r"slot_mapping must be \[T, K\] = \[5, ",
        ),
        (partial(copy_pages, pool, pages, pages[:1]), r"destinations must be \[C\] = \[2\]"),
        (
            partial(copy_pages, pool[..., :1], pages, pages, implementation="mosaic_gpu"),
            "multiple of 16 bytes, not 8",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
