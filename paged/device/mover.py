"""Moves units of a pool, and the state of slots, on the device and between device and host."""

import itertools
import math
import mmap
import operator
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.policy import DevicePolicy, SlotStateDevice
from paged.tensor_parallel import REPLICATED, SPLIT, SPLIT_UNITS, Shards, shared

SLOTS_PER_CALL = 8
# Python 3.12 lacks the constant; this is Linux's value.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _reserved(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose memory is allocated as it is written, because the swap space of all slots may
    exceed the machine's memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=flags)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


class _Landing:
    """Transfers to arrays in the host's memory. The first transfer creates the arrays."""

    def __init__(self, num_units: int):
        self._num_units = num_units
        self._memory: Any = None
        self._on_its_way: list[tuple[np.ndarray, Any]] = []  # (host units, content)

    def send(self, units: np.ndarray, content) -> None:
        for leaf in jax.tree.leaves(content):
            leaf.copy_to_host_async()
        self._on_its_way.append((units, content))

    def land(self) -> None:
        """Wait for all transfers. Padding is written to unit 0."""
        for units, content in self._on_its_way:
            if self._memory is None:
                self._memory = jax.tree.map(
                    lambda x: _reserved((self._num_units, *x.shape[1:]), x.dtype), content
                )
            memory, arrived = jax.tree.leaves(self._memory), jax.tree.leaves(content)
            for array, part in zip(memory, arrived, strict=True):
                array[units] = part
        self._on_its_way.clear()

    def read(self, units: np.ndarray):
        self.land()
        return jax.tree.map(operator.itemgetter(units), self._memory)

    def forget(self) -> None:
        self._on_its_way.clear()


class UnitMover:
    """Moves the units of one pool. `warm_up`, `copy` and `bring` donate the cache and return the
    new cache. `export` only reads it."""

    def __init__(self, shards: Shards, policy: DevicePolicy, pool: Pool):
        self._pool = pool
        self.copy_program, self.export_program, self.import_program = _unit_programs(
            shards, policy, pool.name
        )
        self._host = _Landing(pool.num_host_units)

    def reset(self) -> None:
        self._host.forget()

    def warm_up(self, cache):
        null = self._pool.null_unit
        for size in self._pool.copy_sizes:
            cache = self.copy(cache, [(null, null)] * size)
        if self._pool.num_host_units > 1:
            self.export(cache, [(null, 0)])
            cache = self.bring(cache, [(0, null)])
        return cache

    def copy(self, cache, pairs: list[tuple[int, int]]):
        """Copy pairs (source, destination). A few pairs are padded to a small program's size."""
        sizes = self._pool.copy_sizes
        size = next((size for size in sizes if size >= len(pairs)), sizes[-1])
        null = self._pool.null_unit
        for part in _parts(pairs, size, (null, null)):
            cache = self.copy_program(cache, part[:, 0].copy(), part[:, 1].copy())
        return cache

    def export(self, cache, pairs: list[tuple[int, int]]) -> None:
        """Swap out pairs (unit, host unit)."""
        self._host.land()
        for part in _parts(pairs, self._pool.units_per_call, (self._pool.null_unit, 0)):
            self._host.send(part[:, 1], self.export_program(cache, part[:, 0].copy()))

    def bring(self, cache, pairs: list[tuple[int, int]]):
        """Swap in pairs (host unit, unit)."""
        for part in _parts(pairs, self._pool.units_per_call, (0, self._pool.null_unit)):
            content = self._host.read(part[:, 0])
            cache = self.import_program(cache, part[:, 1].copy(), content)
        return cache


class SlotMover:
    """Moves the state of slots, for policies with `slot_state`. In the host's memory a slot's state
    has a key, which is not negative."""

    def __init__(self, shards: Shards, policy: DevicePolicy, num_slots: int):
        self._nowhere = num_slots
        self._release, self._copy, self._export, self._import = _slot_programs(shards, policy)
        self._exported: dict[int, Any] = {}  # the state of one slot by key
        self._on_its_way: list[tuple[list[int], Any]] = []  # (keys, content) of each call

    def reset(self) -> None:
        self._exported.clear()
        self._on_its_way.clear()

    def warm_up(self, cache):
        nowhere = self._nowhere
        cache = self.copy(cache, [(nowhere, nowhere)])
        return self.before(
            cache,
            Moves(slot_exports=[(nowhere, 0)], released=[nowhere], slot_imports=[(0, nowhere)]),
        )

    def before(self, cache, moves: Moves):
        """Export, release and import slot states, in this order. Then delete the host's copies of
        imported and dropped states."""
        if moves.slot_exports:
            self._land()  # so that earlier exports leave the device
        for part in _parts(moves.slot_exports, SLOTS_PER_CALL, (self._nowhere, -1)):
            content = self._export(cache, part[:, 0].copy())
            for leaf in jax.tree.leaves(content):
                leaf.copy_to_host_async()
            self._on_its_way.append((part[:, 1].tolist(), content))
        released = [(slot, slot) for slot in moves.released]
        for part in _parts(released, SLOTS_PER_CALL, (self._nowhere, self._nowhere)):
            cache = self._release(cache, part[:, 0].copy())
        some_key = moves.slot_imports[0][0] if moves.slot_imports else 0
        for part in _parts(moves.slot_imports, SLOTS_PER_CALL, (some_key, self._nowhere)):
            cache = self._import(cache, part[:, 1].copy(), self._content(part[:, 0].tolist()))
        if gone := [*moves.dropped, *(key for key, _ in moves.slot_imports)]:
            self._land()
            for key in gone:
                del self._exported[key]
        return cache

    def _land(self) -> None:
        """Wait for all exports in progress."""
        for keys, content in self._on_its_way:
            arrived = jax.tree.map(np.asarray, content)
            for place, key in enumerate(keys):
                if key >= 0:
                    self._exported[key] = jax.tree.map(lambda x, i=place: x[i].copy(), arrived)
        self._on_its_way.clear()

    def _content(self, keys: list[int]):
        """The states under these keys, stacked as one export returns them."""
        self._land()
        return jax.tree.map(lambda *leaves: np.stack(leaves), *(self._exported[k] for k in keys))

    def copy(self, cache, pairs: list[tuple[int, int]]):
        """Copy the states of pairs (parent, child)."""
        for part in _parts(pairs, SLOTS_PER_CALL, (self._nowhere, self._nowhere)):
            cache = self._copy(cache, part[:, 0].copy(), part[:, 1].copy())
        return cache


@shared
def _unit_programs(shards: Shards, policy: DevicePolicy, pool: str):
    """The jitted programs of copy, export and import."""

    def copy(cache, sources, destinations):
        return policy.copy_units(cache, pool, sources, destinations)

    def export(cache, units):
        return policy.export_units(cache, pool, units)

    def bring(cache, units, content):
        return policy.import_units(cache, pool, units, content)

    moved = SPLIT, REPLICATED
    return (
        shards.jit(copy, (SPLIT, REPLICATED, REPLICATED), SPLIT, donate_argnums=0),
        shards.jit(export, moved, SPLIT_UNITS),
        shards.jit(bring, (*moved, SPLIT_UNITS), SPLIT, donate_argnums=0),
    )


@shared
def _slot_programs(shards: Shards, policy: DevicePolicy):
    """The jitted programs of release, copy, export and import."""
    device: Any = policy
    slots: SlotStateDevice = device
    moved = SPLIT, REPLICATED
    return (
        shards.jit(slots.release_slots, moved, SPLIT, donate_argnums=0),
        shards.jit(slots.copy_slots, (SPLIT, REPLICATED, REPLICATED), SPLIT, donate_argnums=0),
        shards.jit(slots.export_slots, moved, SPLIT_UNITS),
        shards.jit(slots.import_slots, (*moved, SPLIT_UNITS), SPLIT, donate_argnums=0),
    )


def _parts(
    pairs: Iterable[tuple[int, int]], size: int, padding: tuple[int, int]
) -> Iterator[np.ndarray]:
    """The pairs as arrays [size, 2] int32, the last one padded."""
    for part in itertools.batched(pairs, size):
        padded = np.full((size, 2), padding, np.int32)
        padded[: len(part)] = part
        yield padded
