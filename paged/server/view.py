"""An engine from inside, for people who watch it: who runs, and who owns which KV memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.engine import Engine
from paged.requests.sequence import SequenceGroup

MOST_CELLS = 4096  # of a pool; of a larger one, a cell stands for several units
MOST_ROWS = 64  # requests that are told one by one


@dataclass(frozen=True)
class PoolMap:
    """Who owns the units of a pool of KV memory. cells: `HostPolicy.owners`, int32 [at most
    MOST_CELLS], each of `units_per_cell` units."""

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
        [_pool_map(name, cells) for name, cells in engine.host_policy.owners().items()],
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


def _pool_map(name: str, owners: np.ndarray) -> PoolMap:
    units = -(-len(owners) // MOST_CELLS)
    return PoolMap(name, units, owners[::units])
