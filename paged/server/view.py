"""An engine from inside, for people who watch it: who runs, and who owns which KV memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.engine import Engine
from paged.kv_cache.dense import DenseHost
from paged.kv_cache.diffkv.host import DiffKVHost
from paged.kv_cache.lserve.host import LServeHost
from paged.kv_cache.orca import ReservingHost
from paged.kv_cache.policy import HostPolicy
from paged.requests.sequence import SequenceGroup

FREE, SHARED, CACHED = -1, -2, -3  # cells without one owner
MOST_CELLS = 4096  # of a pool; of a larger one, a cell stands for several units
MOST_ROWS = 64  # requests that are told one by one


@dataclass(frozen=True)
class PoolMap:
    """Who owns the units of a pool of KV memory. cells: slots, or FREE, SHARED or CACHED (kept for
    later prompts), int16 [at most MOST_CELLS], each of `units_per_cell` units."""

    name: str
    units_per_cell: int
    cells: np.ndarray


@dataclass(frozen=True)
class View:
    """An engine between two steps. requests: those that run, then those that wait, in their order,
    MOST_ROWS at most."""

    requests: list[dict[str, Any]]
    pools: list[PoolMap]


def view(engine: Engine) -> View:
    """Called by the engine's owner; what it gives is a copy."""
    scheduler = engine.scheduler
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    known = scheduler.slots.known
    return View(
        [_request(group, known) for group in (running + waiting)[:MOST_ROWS]],
        [_pool_map(name, cells) for name, cells in _owners(engine.host_policy).items()],
    )


def _request(group: SequenceGroup, known: np.ndarray) -> dict[str, Any]:
    slots = [sequence.slot for sequence in group.sequences if sequence.slot >= 0]
    lengths = [int(known[s.slot]) if s.slot >= 0 else len(s.tokens) for s in group.sequences]
    state = "running" if slots else "swapped" if group.swapped is not None else "waiting"
    return {
        "id": group.request_id,
        "state": state,
        "adapter": None if group.adapter is None else group.adapter.name,
        "slots": slots,
        "prompt_tokens": group.num_prompt_tokens,
        "output_tokens": sum(lengths) - len(lengths) * group.num_prompt_tokens,
        "limit": group.limit,
        "cached_tokens": group.num_cached_tokens,
        "preemptions": group.num_preemptions,
    }


def _owners(policy: HostPolicy) -> dict[str, np.ndarray]:
    """The owner of each unit, by pool; nothing of a policy that is not known here."""
    match policy:
        case LServeHost():
            both = _owners(policy.dense)
            if streaming := policy.streaming:
                tables = _of_tables(streaming.blocks, streaming.pool.refcounts)
                both[policy.pools[1].name] = tables
            return both
        case DenseHost():
            owners = _of_tables(policy.block_tables.blocks, policy.pool.refcounts)
            if policy.pool.cache:
                owners[np.fromiter(policy.pool.cache.idle, np.int64) - 1] = CACHED
            return {policy.pools[0].name: owners}
        case ReservingHost():
            return {
                policy.pools[0].name: _of_tables(policy.blocks, np.zeros(policy.pools[0].num_units))
            }
        case DiffKVHost():  # the device knows which pages; the host, how many
            held = policy.pages_held()
            owners = np.full(policy.capacity, FREE, np.int16)
            owners[: held.sum()] = np.repeat(np.arange(len(held)), held)
            return {policy.pools[0].name: owners}
    return {}


def _of_tables(tables: np.ndarray, refcounts: np.ndarray) -> np.ndarray:
    """Of units 1 to the last. tables: of each slot, int32 [slots, M], 0 where there is none."""
    owners = np.full(len(refcounts), FREE, np.int16)
    slots, columns = np.nonzero(tables)
    owners[tables[slots, columns]] = slots
    owners[refcounts > 1] = SHARED
    return owners[1:]


def _pool_map(name: str, owners: np.ndarray) -> PoolMap:
    units = -(-len(owners) // MOST_CELLS)
    return PoolMap(name, units, owners[::units])
