"""Plans of attention: each tile is read once, thread blocks have equal parts, parts are merged."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import ragged
from pallas_kernels.attention import schedule
from pallas_kernels.paged_attention import prefill_sm90

TILE = 64
decode_schedule = functools.partial(jax.jit, static_argnums=(1, 2, 3))(schedule.decode_schedule)
TILES = (TILE,)
prefill_schedule = functools.partial(jax.jit, static_argnums=tuple(range(2, 8)))(
    schedule.prefill_schedule
)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 63, 64, 65, 700, 5000]), min_size=6, max_size=6),
    window=st.sampled_from([None, 1, 100]),
    blocks=st.sampled_from([1, 4, 50]),
)
def test_decode_items_cover_each_row_once_and_partial_results_are_merged(lengths, window, blocks):
    plan = decode_schedule([np.array(lengths, np.int32).reshape(3, 2)], TILES, window, blocks)
    items, block_items, merges = map(np.asarray, (plan.items, plan.block_items, plan.merges))
    assert block_items[0] == 0 and (np.diff(block_items) >= 0).all()
    items = items[: block_items[-1]]
    assert (items[:, 0][1:] >= items[:, 0][:-1]).all()
    split = {row: (first, end) for row, first, end in merges if row >= 0}
    places = []
    for row, length in enumerate(lengths):
        mine = items[items[:, 0] == row]
        first = max(length - window, 0) // TILE if window else 0
        expected = np.arange(first, -(-length // TILE))
        read = [np.arange(begin, end) for _, begin, end, _, _ in mine]
        np.testing.assert_array_equal(np.concatenate(read), expected)
        assert (mine[:, 4] == length).all()
        if len(mine) == 1:
            assert mine[0, 3] == -1 and row not in split
        else:
            assert (mine[:, 2] > mine[:, 1]).all()
            np.testing.assert_array_equal(mine[:, 3], np.arange(*split.pop(row)))
            places += list(mine[:, 3])
    assert not split
    assert places == list(range(len(places))) and len(places) <= 2 * blocks


def _work(lengths, blocks):
    plan = decode_schedule([np.asarray(lengths, np.int32)], TILES, None, blocks)
    items, ends = np.asarray(plan.items), np.asarray(plan.block_items)
    tiles = items[:, 2] - items[:, 1]
    return np.array([tiles[a:b].sum() for a, b in itertools.pairwise(ends)]), items[:, 3].max() + 1


@pytest.mark.parametrize(
    ("lengths", "has_partials"),
    [
        ([4096] * 64, False),
        ([512] * 256, False),
        ([131072] + [1024] * 63, True),
        ([4096], True),
        ([131072], True),
    ],
)
@pytest.mark.parametrize("blocks", [264, 216])
def test_thread_blocks_have_equal_parts(lengths, has_partials, blocks):
    """Lengths of Llama-3-8B's eight KV heads, on GPUs of 132 and 108 multiprocessors."""
    work, partials = _work(np.repeat(np.array(lengths)[:, None], 8, 1), blocks)
    assert (work == 0).mean() <= 0.05
    # No part is smaller than a tile.
    assert work.max() <= max(1.2 * work.mean(), np.ceil(work.mean()))
    assert has_partials or partials == 0 or blocks == 216


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.sampled_from([0, 1, 7, 64, 129]), st.sampled_from([0, 1, 127, 4095])),
        min_size=1, max_size=4,
    ),
    program=st.sampled_from(
        [(None, 1, 132, 0), (1, 3, 7, 200), (300, 4, 132, 0), (None, 16, 1, 200), (None, 4, 7, 0)]
    ),
)  # fmt: skip
def test_prefill_items_cover_each_row_and_what_it_sees(chunks, program):
    (window, G, blocks, padding), K, tile = program, 2, prefill_sm90.KV_TILE
    chunks += [(0, 0)] * (4 - len(chunks))  # Four chunks in all examples: few shapes compile.
    counts = [n for n, _ in chunks]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    lengths = np.array([n + cached for n, cached in chunks], np.int32)
    T = prefill_sm90.padded_rows(520 + padding, G)
    rows = 2 * prefill_sm90.queries_of_warpgroup(prefill_sm90.packed_heads(G, T))
    plan = prefill_schedule(starts, lengths, T, K, rows, tile, window, blocks)
    items, merges = np.asarray(plan.items), np.asarray(plan.merges)
    live = items[items[:, 4] > items[:, 3]]
    first_items = {items[item, :5].tobytes() for item, _, _ in merges if item >= 0}
    for head in range(K):
        mine = live[live[:, 1] == head]
        covered = np.zeros(T, int)
        for key in {item[:5].tobytes() for item in mine}:
            parts = sorted((i for i in mine if i[:5].tobytes() == key), key=lambda i: i[7])
            s, _, base, lo, hi, position, length, begin, _, place = parts[0]
            assert 0 <= base <= T - rows and base % ragged.ALIGNMENT == 0
            covered[base + lo : base + hi] += 1
            assert all(a[8] == b[7] for a, b in itertools.pairwise(parts))
            assert (len(parts) > 1) == (place >= 0) == (key in first_items)
            if base + lo < starts[-1]:
                assert position + hi <= length == lengths[s]
                assert position + (starts[s] - base) == length - counts[s]
                oldest = max(position + lo + 1 - window, 0) if window else 0
                assert (begin, parts[-1][8]) == (oldest // tile, -(-(position + hi) // tile))
        assert (covered == 1).all()
    for item, first, end in merges[merges[:, 0] >= 0]:
        same = (items[:, :7] == items[item, :7]).all(1) & (items[:, 9] >= 0)
        assert sorted(items[same, 9]) == list(range(first, end))
        assert end <= 2 * len(merges)


def test_a_short_chunk_over_a_long_history_is_spread_over_the_gpu():
    starts, lengths = jnp.array([0, 128]), jnp.array([131072])
    plan = prefill_schedule(starts, lengths, 128, 8, 32, 128, None, 132)
    items = np.asarray(plan.items)
    work = (items[:, 8] - items[:, 7])[items[:, 4] > items[:, 3]]
    assert 120 <= len(work) <= 132 and work.max() <= 1.05 * work.mean()


@pytest.mark.parametrize("blocks", [1, 3, 11])
def test_an_odd_number_of_thread_blocks_has_places_for_all_partial_results(blocks):
    """One tile of rows has all thread blocks of its heads: 132 // 12 = 11 if G = 12."""
    work = jnp.array([schedule.MIN_TILES * blocks])
    zero = jnp.zeros(1, jnp.int32)
    fields = [zero, zero, zero, zero + 16, work * 128 - 16, work * 128]
    plan = schedule.split_items(fields, zero, zero, work, blocks)
    assert int(plan.items[:, 9].max()) < 2 * len(plan.merges)
    parts = int((plan.items[:, 4] > plan.items[:, 3]).sum())
    assert parts == blocks


@pytest.mark.slow
def test_a_search_among_many_rows_finds_what_comparing_all_finds(monkeypatch):
    def plans(most):
        monkeypatch.setattr(ragged, "MOST_COMPARED", most)

        @jax.jit
        def both(starts, lengths):
            decode = schedule.decode_schedule([lengths[:, None]], TILES, blocks=7)
            return decode, schedule.prefill_schedule(starts, lengths, 208, 2, 32, TILE, blocks=9)

        return jax.tree.leaves(both(jnp.array([0, 70, 70, 200]), jnp.array([900, 3, 130])))

    for searched, compared in zip(plans(0), plans(2**24), strict=True):
        np.testing.assert_array_equal(searched, compared)
