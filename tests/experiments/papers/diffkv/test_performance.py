"""The host code that DiffKV's page manager is timed against holds the same pages; no times."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers.diffkv.host_managers import Case, ThreadedManager, is_exact, same_pages
from paged.kv_cache.diffkv import page_manager


def test_the_host_agrees_page_by_page():
    rng, slots, heads, allocated, width = np.random.default_rng(0), 3, 5, 6, 9
    host = ThreadedManager(120, slots, heads, width, threads=2)
    kept = np.stack([rng.integers(0, most, (slots, heads)) for most in (4, 3)], -1)
    at = jnp.arange(slots, dtype=jnp.int32)
    pages = page_manager.init(120, slots, heads, width)
    pages = page_manager.allocate_prompts(pages, at, jnp.full(slots, allocated, jnp.int32))
    pages = page_manager.plan_prompts(pages, at, jnp.asarray(kept, jnp.int32))
    host.prompts(allocated, *np.moveaxis(kept, -1, 0))
    assert same_pages(pages, host)
    for _ in range(3):
        needs = rng.integers(0, 3, (slots, heads))[..., None] == np.array([1, 2])
        pages = page_manager.grow(pages, at, jnp.asarray(needs))
        host.grow(*np.moveaxis(needs, -1, 0))
    assert same_pages(pages, host)
    assert host.high.any() and host.low.any()
    for array in (host.free_list, host.tables, host.high):
        before = array.copy()
        array += 1
        assert not same_pages(pages, host)
        array[:] = before


@pytest.mark.slow  # programs compile
def test_the_device_is_exact_at_the_heads_of_8b():
    case = Case(1, seed=0)
    assert is_exact(case, threads=2, steps=18)
    # Some heads add tokens of high precision, the others of low: in 18 steps most of the former
    # outgrow a page, which holds 20 such tokens.
    assert case.to_high.any() and not case.to_high.all()
