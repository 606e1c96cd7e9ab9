"""Loads of adapter weights (Punica §5.2): the interface, simulated loads, loads of a recorded run.

Loads to a device are in `device.py`; `store.py` decides which adapters to load and to evict.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from paged.clock import VirtualClock
from paged.requests.adapter import Adapter

MOST_WAIT_S = 0.01


class AdapterLoads(Protocol):
    """Loads adapters to the device while steps run. No load waits for a step. A step waits only for
    `install` of an adapter that has not arrived."""

    def begin(self, adapter: Adapter) -> None:
        """Start to load an adapter. An unfinished earlier load of the same adapter is dropped."""
        ...

    def finished(self, round_: int) -> list[tuple[Adapter, str | None]]:
        """Loads that ended since the last call, as (adapter, error or None).
        round_: `EngineLoop.round`."""
        ...

    def install(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        """Put an adapter into a slot and pages, between steps.

        Raises ValueError if it cannot be loaded.
        """
        ...

    def wait(self) -> None:
        """Wait until a load ends, at most `MOST_WAIT_S` seconds, so that requests can arrive or be
        aborted in between."""
        ...


class SimulatedLoads:
    """Loads that take simulated time: one after the other, `page_s` seconds for each rank page.

    page_s: the default is for a whole adapter of rank 16 over PCIe Gen4, about 2 ms (Punica §5.2).
    pages: number of rank pages of the adapter in each slot.
    """

    def __init__(self, clock: VirtualClock, page_s: float = 2e-3):
        self._clock, self._page_s = clock, page_s
        self.pages: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        self._free_s = 0.0
        self.pages.clear()
        self._coming: dict[Adapter, float] = {}

    def begin(self, adapter: Adapter) -> None:
        start = max(self._clock.now(), self._free_s)
        self._free_s = self._coming[adapter] = start + self._page_s * adapter.num_pages

    def finished(self, round_: int) -> list[tuple[Adapter, str | None]]:
        done = [adapter for adapter, when in self._coming.items() if when <= self._clock.now()]
        for adapter in done:
            del self._coming[adapter]
        return [(adapter, None) for adapter in done]

    def install(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        self.pages[slot] = len(pages)

    def wait(self) -> None:
        self._clock.wait_until(min(self._clock.now() + MOST_WAIT_S, *self._coming.values()))


class RecordedLoads:
    """Loads that end or fail in the same rounds as in the run of `events`, however long they take.

    The recorded end of a load that has not begun is ignored. The replay then differs from the run.

    known: the adapters by name and content hash.
    waited: whether the last round waited, with no input since. The caller clears it when it replays
        another input.
    """

    def __init__(
        self, loads: AdapterLoads, events: Iterable[Mapping[str, Any]],
        known: Mapping[tuple[str, str], Adapter],
    ):  # fmt: skip
        self._loads, self._known = loads, known
        self._begun: set[Adapter] = set()
        self.waited = False
        self._events: dict[int, list[Mapping[str, Any]]] = {}
        for event in events:
            if event["event"] == "loaded":
                self._events.setdefault(event["round"], []).append(event)

    def begin(self, adapter: Adapter) -> None:
        self._begun.add(adapter)
        self._loads.begin(adapter)

    def finished(self, round_: int) -> list[tuple[Adapter, str | None]]:
        if self.waited and round_ not in self._events:
            raise ValueError(f"round {round_} needs an adapter, and none is 'loaded' in it")
        self.waited, came = False, []
        for event in self._events.get(round_, ()):
            adapter = self._known.get((event["adapter"], event["content_hash"]))
            if adapter in self._begun:
                self._begun.remove(adapter)
                came.append((adapter, event["error"]))
        return came

    def install(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        self._loads.install(adapter, slot, pages)

    def wait(self) -> None:
        """Note the wait. The recorded run waited until a load ended, so the next `finished` raises
        ValueError if no load of the log ends in its round."""
        self.waited = True
