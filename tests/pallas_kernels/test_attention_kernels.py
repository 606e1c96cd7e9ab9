"""Features of the kernels alone: plans, lists of key tiles, and edges of tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.schedule import prefill_schedule
from pallas_kernels.paged_attention import (
    paged_attention,
    paged_prefill_attention,
    plan_decode,
    plan_prefill,
    prefill_sm90,
    specs,
)
from pallas_kernels.specs import Attention, Heads
from tests.pallas_kernels.dense_softmax import (
    GARBAGE,
    D,
    K,
    assert_near,
    pools,
    queries,
)
from tests.pallas_kernels.interpreted import run
from tests.sweeps import swept


@pytest.mark.slow
def test_a_plan_serves_all_layers():
    """Kernels give the same bits with a plan made beforehand and without one."""
    rng = np.random.default_rng(5)
    k_pages, v_pages = pools(rng, 30, 16, "bfloat16")
    tables = rng.integers(0, 30, (2, K, 20)).astype(np.int32)
    q, lengths = queries(rng, 40, 3, "bfloat16"), np.array([300, 31], np.int32)
    per_head, starts = np.tile(lengths[:, None], (1, K)), np.array([0, 33, 40], np.int32)
    how: dict = {"implementation": "mosaic_gpu"}
    decode = plan_decode(per_head, D, "bfloat16", **how)
    prefill = plan_prefill(starts, lengths, 40, K * 3, K, **how)
    for op, schedule, arguments in [
        (paged_attention, decode, (q[:2], k_pages, v_pages, tables, per_head)),
        (paged_prefill_attention, prefill, (q, k_pages, v_pages, tables, starts, lengths)),
    ]:
        assert schedule is not None

        def planned(*arguments, op=op, schedule=schedule, **options):
            return op(*arguments, schedule=schedule, **options)

        np.testing.assert_array_equal(run(planned, *arguments, **how), run(op, *arguments, **how))
    assert plan_decode(per_head, D, "bfloat16", implementation="xla") is None


HEADS_IN_TURN = [(16, 64), (4, 128), (7, 64), (8, 128)]
# The interpreter is slow: each history and each chunk occurs, but not all pairs of short histories,
# and the long history has few heads.
PAIRS = [(0, 128), (0, 1), (1, 127), (1, 129)]
EDGES = [(*pair, *heads) for pair, heads in zip(PAIRS, HEADS_IN_TURN)] + [
    (4095, chunk, 1, 64) for chunk in (1, 127, 128, 129)
]


@pytest.mark.slow
@pytest.mark.parametrize(("history", "chunk", "G", "dim"), swept(EDGES, 1))
def test_prefill_kernel_at_the_edges_of_tiles(history, chunk, G, dim):
    """Chunks and histories end around the edges of tiles, and thread blocks split the long ones.

    Slots without a token hold NaN. Tables have 8,192 entries, repeat pages, and name no page after
    the last one.
    """
    rng = np.random.default_rng(history + chunk)
    P, N, length = 16, 40, history + chunk
    k_pages, v_pages = (
        np.array(jnp.asarray(x, "bfloat16")) for x in rng.standard_normal((2, N, P, dim))
    )
    last = (length - 1) // P
    tables = np.full((1, 1, 8192), GARBAGE, np.int32)
    tables[..., :last] = rng.integers(0, N - 1, last)
    tables[..., last] = N - 1  # No other entry names this page, as its end is NaN.
    for pages in (k_pages, v_pages):
        pages[N - 1, (length - 1) % P + 1 :] = np.nan
    q = np.asarray(jnp.asarray(rng.standard_normal((chunk, G, dim)), "bfloat16"))
    starts, lengths = np.array([0, chunk], np.int32), np.array([length], np.int32)
    arguments = q, k_pages, v_pages, tables, starts, lengths
    found = run(paged_prefill_attention, *arguments, implementation="mosaic_gpu")
    expected = run(paged_prefill_attention, *arguments, implementation="xla")
    assert_near(found, np.asarray(expected, np.float64), "bfloat16")
    per_head = lengths[:, None]
    decoded = run(
        paged_attention, q[-1:], k_pages, v_pages, tables, per_head, implementation="mosaic_gpu"
    )
    assert_near(decoded, np.asarray(expected[-1:], np.float64), "bfloat16")


@pytest.mark.slow
def test_prefill_returns_the_log_sum_exp_of_rows():
    """Rows whose tiles several thread blocks read have a log-sum-exp too; rows of padding see
    nothing."""
    shapes = Attention(Heads(2, 1, 64), 2, 1000, chunk=20, page_size=64, tokens=(1000, 30))
    arguments = specs.prefill(shapes).arguments(jax.random.key(0))
    q, k_pages, v_pages, tables, starts, lengths = arguments.values()
    padded, total = jnp.pad(q, ((0, 8), (0, 0), (0, 0))), len(q)
    rows, covered, _ = prefill_sm90.launch_shape(total + 8, 2, 1)
    schedule = prefill_schedule(starts, lengths, covered, 1, rows, prefill_sm90.KV_TILE, blocks=4)
    assert (schedule.merges >= 0).any()

    def attend(q, k_pages, v_pages, tables, *, implementation):
        return prefill_sm90.attend(
            q, k_pages, v_pages, tables, schedule, 1, page_offset=jnp.zeros(1, jnp.int32),
            scale=0.125, returns_lse=True,
        )  # fmt: skip

    out, lse = run(attend, padded, k_pages, v_pages, tables, implementation="mosaic_gpu")
    row = np.arange(total)
    visible = np.asarray(lengths)[row // 20] - 19 + row % 20
    expected, expected_lse = paged_attention(
        q, k_pages, v_pages, tables[row // 20], visible[:, None].astype(np.int32),
        return_lse=True, implementation="reference",
    )  # fmt: skip
    assert_near(out[:total], np.asarray(expected, np.float64), "bfloat16")
    np.testing.assert_allclose(lse[:, :total].T, expected_lse, atol=1e-3)
    assert (lse[:, total:] < -1e29).all()
