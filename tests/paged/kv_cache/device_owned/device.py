"""Device half: a stack of free pages and the page tables of all slots lie in the cache."""

from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged.kv_cache import dense
from paged.kv_cache.policy import CacheConfig, ShardedModel

PAGES = "pages"  # the name of the pool, whose unit slot * M + k is the k-th page of a slot
NULL_PAGE = 0  # never free: what unused entries of tables name


def pages_of_slot(config: CacheConfig) -> int:
    """M, the pages that a slot can hold."""
    return -(-config.max_model_len // config.page_size)


def num_pages(config: CacheConfig, model: ShardedModel) -> int:
    """N, the pages of a shard, of which one is the null page. With the free stack, the tables and
    the counts of pages they take no more memory than kv_cache_tokens of the dense policy."""
    token_bytes = model.kv_token_bytes(config.kv_dtype) // model.num_shards
    table_bytes = 4 * (config.max_num_seqs * (pages_of_slot(config) + 1) + 1)
    room = config.kv_cache_tokens * token_bytes - table_bytes
    return room // (config.page_size * token_bytes + 4)


@flax.struct.dataclass
class OwnedCache:
    """pages: the dense policy's pools. free [N] int32: of which the first num_free [1] are free
    pages. tables [num_slots, M]: the pages of each slot, held [num_slots] of them."""

    pages: dense.DenseCache
    free: jax.Array
    num_free: jax.Array
    tables: jax.Array
    held: jax.Array


def snapshot(cache: OwnedCache) -> list[tuple[list[int], list[list[int]]]]:
    """Of each shard the free pages, and those of each slot in the order of its tokens."""
    leaves = cache.free, cache.num_free, cache.tables, cache.held
    shards = zip(*(np.split(np.asarray(leaf), len(cache.num_free)) for leaf in leaves))
    return [
        (free[: num[0]].tolist(), [table[:n].tolist() for table, n in zip(tables, held)])
        for free, num, tables, held in shards
    ]


@dataclass(frozen=True)
class OwnedDevice:
    dense: dense.DensePolicy
    num_slots: int
    most: int  # pages of a slot

    def init(self, dtype, shard) -> OwnedCache:
        # Each shard takes its pages in an order of its own.
        places = jnp.arange(self.dense.num_blocks, dtype=jnp.int32)
        capacity = self.dense.num_blocks - 1
        return OwnedCache(
            self.dense.init(dtype),
            free=1 + (places + shard) % capacity,
            num_free=jnp.full(1, capacity, jnp.int32),
            tables=jnp.full((self.num_slots, self.most), NULL_PAGE, jnp.int32),
            held=jnp.zeros(self.num_slots, jnp.int32),
        )

    def _held(self, cache: OwnedCache, slots):
        """Pages of slots [C]; none of padding."""
        return cache.held.at[slots].get(mode="fill", fill_value=0)

    def _tables(self, cache: OwnedCache, slots):
        """[C, M], with the null page beyond those that are held."""
        tables = cache.tables.at[slots].get(mode="clip")
        return jnp.where(jnp.arange(self.most) < self._held(cache, slots)[:, None], tables, 0)

    def _allocate(self, cache: OwnedCache, slots, wanted) -> OwnedCache:
        """Let slots [C] hold `wanted` [C] pages each, if they do not hold more."""
        held = self._held(cache, slots)
        more = jnp.where(slots < self.num_slots, jnp.maximum(wanted - held, 0), 0)
        first, k = jnp.cumsum(more) - more, jnp.arange(self.most)
        top = cache.num_free - 1 - (first - held)[:, None] - k  # where the k-th page comes from
        new = cache.free.at[top].get(mode="clip")
        grows = (k >= held[:, None]) & (k < (held + more)[:, None])
        tables = jnp.where(grows, new, self._tables(cache, slots))
        return replace(
            cache,
            tables=cache.tables.at[slots].set(tables, mode="drop"),
            held=cache.held.at[slots].add(more, mode="drop"),
            num_free=cache.num_free - more.sum(),
        )

    def begin_step(self, cache: OwnedCache, inputs):
        # Only tokens say which rows compute: forks and padding have lengths too, and a fork has no
        # pages before its copy.
        nobody = jnp.zeros_like(inputs.lengths)
        ends = nobody.at[inputs.token_rows].max(inputs.positions + 1, mode="drop")
        cache = self._allocate(cache, inputs.slots, -(-ends // self.dense.page_size))
        tables, lengths = self._tables(cache, inputs.slots), jnp.where(ends > 0, inputs.lengths, 0)
        seen = replace(inputs, tables=tables, lengths=lengths)
        _, plan = self.dense.begin_step(cache.pages, seen)
        return cache, plan

    def attend(self, layer, q_TxHxD, k_TxKxD, v_TxKxD, cache: OwnedCache, plan, inputs):
        out, pages = self.dense.attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache.pages, plan, inputs)
        return out, replace(cache, pages=pages)

    def end_step(self, cache: OwnedCache, plan, inputs) -> OwnedCache:
        return cache

    def report(self, cache: OwnedCache) -> dict[str, jax.Array]:
        return {"free": cache.num_free, "held": cache.held}

    def _pages(self, cache: OwnedCache, units):
        places = units // self.most, units % self.most
        return cache.tables.at[places].get(mode="fill", fill_value=NULL_PAGE)

    def export_units(self, cache: OwnedCache, pool: str, units):
        return self.dense.export_units(cache.pages, pool, self._pages(cache, units))

    def import_units(self, cache: OwnedCache, pool: str, units, content) -> OwnedCache:
        pages = self._pages(cache, units)
        return replace(cache, pages=self.dense.import_units(cache.pages, pool, pages, content))

    def copy_units(self, cache: OwnedCache, pool: str, sources, destinations) -> OwnedCache:
        pages = self._pages(cache, sources), self._pages(cache, destinations)
        return replace(cache, pages=self.dense.copy_units(cache.pages, pool, *pages))

    def release_slots(self, cache: OwnedCache, slots) -> OwnedCache:
        held, k = self._held(cache, slots), jnp.arange(self.most)
        first = cache.num_free + jnp.cumsum(held) - held
        nowhere = len(cache.free)
        places = jnp.where(k < held[:, None], first[:, None] + k, nowhere)
        return replace(
            cache,
            free=cache.free.at[places].set(self._tables(cache, slots), mode="drop"),
            num_free=cache.num_free + held.sum(),
            tables=cache.tables.at[slots].set(NULL_PAGE, mode="drop"),
            held=cache.held.at[slots].set(0, mode="drop"),
        )

    def copy_slots(self, cache: OwnedCache, parents, children) -> OwnedCache:
        cache = self._allocate(cache, children, self._held(cache, parents))
        pairs = self._tables(cache, parents), self._tables(cache, children)
        return replace(
            cache,
            pages=self.dense.copy_units(cache.pages, PAGES, *(x.reshape(-1) for x in pairs)),
        )

    def export_slots(self, cache: OwnedCache, slots) -> jax.Array:
        return self._held(cache, slots)[:, None]

    def import_slots(self, cache: OwnedCache, slots, content) -> OwnedCache:
        return self._allocate(cache, slots, content[:, 0])
