"""How the weights of adapters come to a device, real or simulated, or came in a recorded run."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from paged.clock import VirtualClock
from paged.requests.adapter import Adapter

MOST_WAIT_S = 0.01


class AdapterLoads(Protocol):
    """Brings adapters to the device while steps run. Nothing here waits for a step, and no step
    for anything here but `install` of what has not come yet."""

    def begin(self, adapter: Adapter) -> None:
        """Start to bring it near; an earlier start that has not been finished is forgotten."""
        ...

    def finished(self, round_: int) -> list[tuple[Adapter, str | None]]:
        """What has come since the last call, or failed, with the error; round_: the engine's."""
        ...

    def install(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        """Put it into a slot and pages, between steps.

        Raises ValueError if it cannot be had.
        """
        ...

    def wait(self) -> None:
        """Until one more has come or failed, but no longer than `MOST_WAIT_S` seconds: requests may
        come that need not wait, and aborts of those that do."""
        ...


class SimulatedLoads:
    """Loads that take simulated time: one after the other, `page_s` seconds for each rank page.

    The default is that of a model of rank 16 over PCIe Gen4 (Punica §5.2: about 2 ms).
    pages: rank pages of the adapter in each slot.
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
    """Loads that come when, and fail as, they did in the run of `events`, whatever they take now.

    The adapters are those of `known`, by name and content hash. What has not begun does not come:
    the run then went another way. waited: whether the last round did, and nothing has come in
    since; whoever brings in something else says so.
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
        """The run had waited until something came, so `finished` raises ValueError if in the next
        round, should there be one, nothing does."""
        self.waited = True
