"""What the page at `/` asks for: the engines at the moment, told when somebody looks."""

import asyncio
import time
from pathlib import Path
from typing import Any

from paged.server.errors import dumps
from paged.server.service import Service
from paged.stats import EngineStats

PAGE = Path(__file__).with_suffix(".html")
FRESH_S = 0.5  # a state so old is good enough for the next who looks


class Live:
    """Asks the engines at most every FRESH_S, however many look."""

    def __init__(self, service: Service):
        self._service, self._lock = service, asyncio.Lock()
        self._told, self._asked_s = b"", -FRESH_S

    async def state(self) -> bytes:
        """JSON."""
        async with self._lock:
            if time.monotonic() - self._asked_s >= FRESH_S:
                self._told = dumps(await self._ask())
                self._asked_s = time.monotonic()
        return self._told

    async def _ask(self) -> dict[str, Any]:
        service, owner = self._service, self._service.owner
        stats, seen = await asyncio.gather(
            asyncio.wrap_future(owner.stats()), asyncio.wrap_future(owner.view())
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
            "runners": [_plain(*runner) for runner in stats.runners.items()],
            "view": None if seen is None else {
                "requests": seen.requests,
                "pools": [vars(pool) | {"cells": pool.cells.tolist()} for pool in seen.pools],
            },
        }  # fmt: skip


def _plain(name: str, engine: EngineStats) -> dict[str, Any]:
    return {"name": name, **vars(engine), "adapters": sorted(engine.adapters)}
