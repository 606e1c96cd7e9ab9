"""Shards that share a KV head. test_presets_on_devices.py tests their collectives on several
devices."""

import pytest

from experiments.lib.presets import model_of
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.shared_heads import ALONE, SharedHeads


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "copies"),
    [(4, 1, 1), (4, 4, 1), (8, 2, 1), (4, 8, 2), (2, 8, 4), (1, 2, 2)],
)
def test_shards_share_a_head_where_there_are_fewer_heads(num_kv_heads, size, copies):
    shared = SharedHeads.of(ShardedModel.split(model_of(num_kv_heads), size))
    assert (shared.num_shards, shared.copies) == (size, copies)


def test_nothing_travels_where_no_head_is_shared():
    """Neither for one shard nor for four with a KV head each. Without a mesh a collective fails."""
    x = object()
    for shared in (ALONE, SharedHeads(num_shards=4)):
        assert all(f(x) is x for f in (shared.gather, shared.own, shared.largest))
