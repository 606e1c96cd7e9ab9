"""A policy whose device half owns the pages, as DiffKV's does, over the attention of the dense one.

A stack of free pages and a page table for each slot lie in the cache. Pages are taken by prefix
sums over what the rows of an iteration need, and given back when a slot is released; a fork copies
its parent's. The host half sees no page: it knows how many each slot held in the last report, and
that n tokens more need at most ceil(n / page_size) pages more. It cannot recompute.
"""

from dataclasses import dataclass, replace

from models.config import ModelConfig
from paged.kv_cache import dense
from paged.kv_cache.policy import CacheConfig, Capabilities, Policy, ShardedModel
from tests.paged.kv_cache.device_owned.device import (
    OwnedCache,
    OwnedDevice,
    num_pages,
    pages_of_slot,
    snapshot,
)
from tests.paged.kv_cache.device_owned.host import OwnedHost, OwnedSlots

__all__ = ["DEVICE_OWNED", "Options", "OwnedCache", "OwnedDevice", "OwnedHost", "snapshot"]


@dataclass(frozen=True)
class Options:
    """host_pages: pages of the host's memory; 0 stands for as many as all slots can hold."""

    host_pages: int = 0


def check(config: CacheConfig, model: ModelConfig | None) -> None:
    """Raises ValueError for host memory that not all slots' pages fit, as nothing can be computed
    again, and for a cache that its tables fill."""
    most, worst = config.policy_options.host_pages, config.max_num_seqs * pages_of_slot(config)
    if 0 < most < worst:
        raise ValueError(f"host_pages ({most}) must be 0 or at least {worst}: all that slots hold")
    dense.VLLM.check(config, model)
    if model and num_pages(config, ShardedModel.split(model, config.tensor_parallel)) < 2:
        raise ValueError(f"kv_cache_tokens ({config.kv_cache_tokens}) hold page tables alone")


def device(
    config: CacheConfig, model: ShardedModel, implementation: str | None = None
) -> OwnedDevice:
    pages = replace(
        dense.device(config, model, implementation), num_blocks=num_pages(config, model)
    )
    return OwnedDevice(pages, config.max_num_seqs, pages_of_slot(config))


CAPABILITIES = Capabilities(fork="computed", swap=True, chunked_prefill=True, slot_state=True)
DEVICE_OWNED = Policy(
    lambda config: CAPABILITIES, OwnedHost, device, check, Options, simulated=OwnedSlots
)
