"""DiffKV's performance figures: managers on the host, numbers, refusals; no times."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers.diffkv import fig13_compaction as compaction
from experiments.papers.diffkv import kernels_on_cpu as kernel_speed
from experiments.papers.diffkv.host_managers import Case, ThreadedManager, Twin, is_exact
from pallas_kernels.quantized_attention import mixed_precision_attention
from pallas_kernels.specs import Heads


def numbers(rows):
    return kernel_speed.values(kernel_speed.KernelFlags(), rows)


def test_the_managers_of_the_host_agree_page_by_page():
    rng, slots, heads, allocated, width = np.random.default_rng(0), 3, 5, 6, 9
    twin = Twin(120, slots, heads)
    threaded = ThreadedManager(120, slots, heads, width, threads=2)
    high = rng.integers(0, 4, (slots, heads))
    low = rng.integers(0, 3, (slots, heads))
    twin.prompts(allocated, high, low)
    threaded.prompts(allocated, high, low)
    for _ in range(3):
        kind = rng.integers(0, 3, (slots, heads))
        twin.grow(kind == 1, kind == 2)
        threaded.grow(kind == 1, kind == 2)

    def same() -> bool:
        m = threaded
        return twin.equals(m.free_list, m.start, m.free, m.tables, m.high, m.low)

    assert same()
    owned = [page for kind in (twin.high, twin.low) for slot in kind for h in slot for page in h]
    assert sorted([*owned, *twin.free]) == list(range(120))
    threaded.tables[1, 2, 0] += 1  # of high precision, unless it has none
    threaded.free_list[threaded.start] += 1
    assert not same()


@pytest.mark.slow  # programs compile
def test_the_device_is_exact_at_the_heads_of_8b():
    case = Case(1, seed=0)
    assert is_exact(case, threads=2, steps=18)
    # Some heads have grown in that time: a page has room for 16 tokens of high precision.
    assert case.to_high.any() and not case.to_high.all()


@pytest.mark.slow  # programs compile
@pytest.mark.parametrize("name", kernel_speed.FORMATS)
def test_formats_read_the_same_pool(name):
    """What is timed is attention: it is that of the reference."""
    pool, tokens = kernel_speed.Pool(Heads(4, 2, 32), 2, 40, seed=0), 33
    formats, counts = kernel_speed.formats_of(name, 32), pool.counts(name, tokens)
    out, lse, _ = kernel_speed.attend(formats, pool.q, pool.words, pool.tables_of(name), counts)
    expected = mixed_precision_attention(
        pool.q, pool.words, pool.tables_of(name), counts, formats, implementation="reference"
    )
    np.testing.assert_allclose(out, expected[0], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-4)
    assert jnp.isfinite(out).all()


def test_bytes_are_those_of_codes_and_scales():
    pool = kernel_speed.Pool(Heads(4, 2), 3, 32, seed=0)
    of_token = {"K8V8": 264, "K8V4": 200, "K4V4": 136, "K4V2": 104, kernel_speed.MIXED: 152}
    for name, size in of_token.items():
        assert pool.bytes(name, 32) == 3 * 2 * 32 * size


def test_the_summary_is_of_the_rows_that_it_names():
    def kernel(format, tokens, over_dense):
        return kernel_speed.Row(format, tokens, 1.0, 0.1, over_dense, 1, 4.0)

    rows = [kernel("K4V2", 512, 0.7), kernel("K4V2", 4096, 0.8), kernel("K8V4", 512, 0.95)]
    assert numbers(rows) == {"decode_over_dense": 0.8}


def test_what_was_not_measured_is_null():
    assert numbers([]) == {"decode_over_dense": None}


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        (kernel_speed, {"tokens": (0,)}, "--tokens must be whole numbers, each at least 1"),
        (
            kernel_speed, {"tokens": (9, 10**20)},
            "--tokens and --batch would take .* GiB; this machine has",
        ),
        (kernel_speed, {"formats": ("K3V3",)}, "--formats must be texts, each one of K8V8"),
        (compaction, {"sequences": ()}, "--sequences must name at least one"),
    ],
)  # fmt: skip
def test_bad_flags_are_refused(module, flags, message):
    with pytest.raises(ValueError, match=message):
        module.STUDY.check(module.STUDY.flags(**flags))
