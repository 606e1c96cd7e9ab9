"""The live page at `/`, and its state: the engines' figures, and one engine between two steps."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paged.engine import Engine
from paged.requests.sequence import SequenceGroup
from paged.server.openai_format import dumps
from paged.server.service import Service

PAGE = Path(__file__).with_suffix(".html")
FRESH_S = 0.5  # age in seconds at which the state is rebuilt
MAX_CELLS = 4096  # cells of a pool; in a larger pool a cell stands for several units
MAX_REQUESTS = 64  # requests shown one by one


@dataclass(frozen=True)
class PoolMap:
    """The owners of a pool's units of KV memory.

    units_per_cell: number of units that a cell represents.
    cells: the owner (`HostPolicy.owners`) of each cell's first unit, int32 [MAX_CELLS at most].
    """

    name: str
    units_per_cell: int
    cells: np.ndarray


@dataclass(frozen=True)
class View:
    """A copy of an engine's requests and memory between two steps.

    requests: running requests, then waiting ones, in the scheduler's order; MAX_REQUESTS at most.
    """

    requests: list[dict[str, Any]]
    pools: list[PoolMap]


def view(engine: Engine) -> View:
    """The engine's view. Must be called by the thread that drives the engine."""
    groups = [*engine.scheduler.running, *engine.scheduler.waiting]
    lengths = engine.scheduler.slots.known
    return View(
        [_request(group, lengths) for group in groups[:MAX_REQUESTS]],
        [
            PoolMap(name, units := -(-len(owners) // MAX_CELLS), owners[::units])
            for name, owners in engine.host_policy.owners().items()
        ],
    )


def _request(group: SequenceGroup, slot_lengths: np.ndarray) -> dict[str, Any]:
    slots = [sequence.slot for sequence in group.sequences if sequence.slot >= 0]
    lengths = [int(slot_lengths[s.slot]) if s.slot >= 0 else len(s.tokens) for s in group.sequences]
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


class Live:
    """The page's state, rebuilt at most every FRESH_S seconds, however many clients poll it."""

    def __init__(self, service: Service):
        self._service, self._lock = service, asyncio.Lock()
        self._state, self._made_s = b"", -FRESH_S

    async def state(self) -> bytes:
        """The state as JSON."""
        async with self._lock:
            if time.monotonic() - self._made_s >= FRESH_S:
                self._state = dumps(await self._make())
                self._made_s = time.monotonic()
        return self._state

    async def _make(self) -> dict[str, Any]:
        service, client = self._service, self._service.client
        stats, seen = await asyncio.gather(
            asyncio.wrap_future(client.stats()), asyncio.wrap_future(client.ask(view))
        )
        return {
            "model": service.name,
            "policy": service.config.policy,
            "page_size": service.config.page_size,
            "time_s": time.time(),
            "started_s": service.started_s,
            "draining": service.draining,
            "pending": service.pending,
            "served_adapters": list(service.adapters.names),
            "totals": vars(stats.totals),
            "runners": [
                {"name": name, **vars(engine), "adapters": sorted(engine.adapters)}
                for name, engine in stats.runners.items()
            ],
            "view": None if seen is None else {
                "requests": seen.requests,
                "pools": [vars(pool) | {"cells": pool.cells.tolist()} for pool in seen.pools],
            },
        }  # fmt: skip
