"""On-demand loading of adapters: residency and the next loads, no tensors (Punica §5.2)."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from paged.requests.adapter import Adapter
from paged.requests.sequence import SequenceGroup


@dataclass
class Resident:
    """An adapter's place on the device.

    pages: its rank pages, in order.
    ready: whether its weights have arrived.
    pins: number of running groups that use it.
    """

    slot: int
    pages: list[int]
    ready: bool = False
    pins: int = 0


@dataclass(frozen=True)
class Load:
    """A load of an adapter to a slot and pages. evicted: the adapters that made room."""

    adapter: Adapter
    slot: int
    pages: list[int]
    evicted: list[Adapter] = field(default_factory=list)


class AdapterStore:
    """The slots and rank pages of the device. `admits` holds back requests whose adapter is absent.

    Running groups pin their adapter. `plan` keeps the pinned adapters, then the adapters of waiting
    requests in queue order, as many as fit. It evicts other adapters, the least recently used
    first. It plans from scratch in every round, so no reservation can leak.

    num_loads: loads begun so far.
    """

    def __init__(self, num_slots: int, num_pages: int):
        self.num_slots, self.num_pages = num_slots, num_pages
        # The least recently used first.
        self.residents: OrderedDict[Adapter, Resident] = OrderedDict()
        self._pinned: dict[Adapter, None] = {}
        self.num_loads = 0
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._free_pages = list(range(num_pages - 1, -1, -1))

    @property
    def ready(self) -> list[str]:
        """The names of the adapters whose weights have arrived."""
        return [adapter.name for adapter, resident in self.residents.items() if resident.ready]

    @property
    def loading(self) -> bool:
        """Whether a load is in progress."""
        return any(not resident.ready for resident in self.residents.values())

    def admits(self, group: SequenceGroup) -> bool:
        if group.adapter is None:
            return True
        resident = self.residents.get(group.adapter)
        return resident is not None and resident.ready

    def adapter_slot_of(self, group: SequenceGroup) -> int:
        """The adapter slot of a group, which `admits` must admit; -1 without an adapter."""
        return -1 if group.adapter is None else self.residents[group.adapter].slot

    def enter(self, group: SequenceGroup) -> None:
        """The group starts to run; its adapter stays on the device until `leave`."""
        if group.adapter is not None:
            resident = self.residents[group.adapter]
            assert resident.ready, f"adapter {group.adapter.name!r} is not there"
            resident.pins += 1
            self._pinned[group.adapter] = None
            self.residents.move_to_end(group.adapter)

    def leave(self, group: SequenceGroup) -> None:
        if group.adapter is not None:
            resident = self.residents[group.adapter]
            resident.pins -= 1
            if not resident.pins:
                del self._pinned[group.adapter]
            self.residents.move_to_end(group.adapter)

    def plan(self, waiting: Iterable[Adapter | None]) -> list[Load]:
        """Loads to begin now. waiting: adapters of waiting requests, in queue order."""
        wanted = dict(self._pinned)
        pages = sum(adapter.num_pages for adapter in wanted)
        for adapter in waiting:
            if adapter is None or adapter in wanted:
                continue
            pages += adapter.num_pages
            if len(wanted) == self.num_slots or pages > self.num_pages:
                break
            wanted[adapter] = None
        loads = []
        for adapter in wanted:
            if adapter not in self.residents:
                evicted = self._make_room(adapter.num_pages, wanted)
                if evicted is None:
                    break
                resident = self._place(adapter)
                loads.append(Load(adapter, resident.slot, resident.pages, evicted))
        return loads

    def _make_room(self, num_pages: int, wanted: dict[Adapter, None]) -> list[Adapter] | None:
        """Evict adapters until one slot and `num_pages` are free. Pinned adapters, wanted adapters
        and adapters that are being loaded stay. If these leave too little room, returns None and
        evicts nothing."""
        slots, pages = len(self._free_slots), len(self._free_pages)
        victims = []
        for adapter, resident in self.residents.items():
            if slots and pages >= num_pages:
                break
            if resident.ready and not resident.pins and adapter not in wanted:
                victims.append(adapter)
                slots, pages = slots + 1, pages + len(resident.pages)
        if not slots or pages < num_pages:
            return None
        for adapter in victims:
            self._remove(adapter)
        return victims

    def _place(self, adapter: Adapter) -> Resident:
        pages = [self._free_pages.pop() for _ in range(adapter.num_pages)]
        self.residents[adapter] = resident = Resident(self._free_slots.pop(), pages)
        self.num_loads += 1
        return resident

    def _remove(self, adapter: Adapter) -> None:
        resident = self.residents.pop(adapter)
        assert not resident.pins
        self._free_slots.append(resident.slot)
        self._free_pages.extend(reversed(resident.pages))

    def arrive(self, adapter: Adapter) -> Resident:
        """Record that an adapter's load has finished."""
        resident = self.residents[adapter]
        assert not resident.ready
        resident.ready = True
        return resident

    def fail(self, adapter: Adapter) -> None:
        """Record that an adapter's load has failed."""
        assert not self.residents[adapter].ready
        self._remove(adapter)

    def check(self) -> None:
        """Assert that each slot and each page is free or owned by one adapter."""
        slots = [resident.slot for resident in self.residents.values()]
        assert sorted([*self._free_slots, *slots]) == [*range(self.num_slots)], "a slot is lost"
        pages = [page for resident in self.residents.values() for page in resident.pages]
        assert sorted([*self._free_pages, *pages]) == [*range(self.num_pages)], "a page is lost"
        for adapter, resident in self.residents.items():
            assert len(resident.pages) == adapter.num_pages
            assert bool(resident.pins) == (adapter in self._pinned)
            assert resident.ready or not resident.pins, f"{adapter.name!r} runs and is not there"
