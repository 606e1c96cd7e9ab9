"""Loads adapters to the device: from the disk, through the host's memory, into the pool.

A thread reads an adapter and copies it to the device; the engine's thread only installs its pages.
"""

from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

import jax
import numpy as np

from models import lora, peft
from models.families import family
from models.params import is_param
from paged.adapters.loads import MOST_WAIT_S
from paged.adapters.pool import AdapterPool, Pages, ResidentAdapters, install
from paged.requests.adapter import Adapter
from paged.tensor_parallel import REPLICATED, Shards

HostPages = list[dict[str, dict[str, np.ndarray]]]


class DeviceAdapters:
    """The adapter pool of a device, or of several shards, and the loads in progress.

    resident: the arrays that a step reads. `reset` creates them, and steps never donate them.
    host_bytes: bytes of the host tier, which keeps the most recently used adapters in the host's
        memory. All adapters are on disk.
    """

    resident: ResidentAdapters

    def __init__(self, shards: Shards, pool: AdapterPool, dtype, host_bytes: int):
        self._shards, self._pool, self._dtype, self._host_bytes = shards, pool, dtype, host_bytes
        self._model = shards.sharded.whole
        self._names = family(self._model).PROJECTIONS
        self._page = lora.declare(self._model)
        specs = shards.declared_specs(lora.declare(self._model, pool.num_pages))
        page_specs = shards.declared_specs(self._page)
        self._empty = shards.jit(lambda: pool.empty(shards.model, dtype), (), specs)
        self._install = shards.jit(
            install, (specs, REPLICATED, page_specs), specs, donate_argnums=0
        )
        # Page content for projections that an adapter does not change.
        self._zeros: Pages = jax.tree.map(
            lambda param: shards.place_layers(param, np.zeros(param.shape, dtype)), self._page,
            is_leaf=is_param,
        )  # fmt: skip
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._device = jax.config.jax_default_device  # default of the constructing thread
        # The host tier by content hash, least recently used first. Only the loading thread uses it.
        self._host: OrderedDict[str, HostPages] = OrderedDict()
        self._coming: dict[Adapter, Future[list[Pages]]] = {}

    def reset(self) -> None:
        """Start afresh with an empty pool; an interrupted call may have lost the old one."""
        for future in self._coming.values():
            future.cancel()
        self._coming = {}
        self._announced: set[Adapter] = set()
        pool = self._pool
        self._rank_pages = np.zeros((pool.num_slots, pool.max_pages), np.int32)
        self._num_rank_pages = np.zeros((len(self._names), pool.num_slots), np.int32)
        self.resident = None  # type: ignore[assignment]  # frees the old arrays first
        self.resident = ResidentAdapters(self._empty(), *self._tables())

    def _tables(self) -> tuple[jax.Array, jax.Array]:
        # Copies, because JAX may read the arrays after the next `install` has changed them.
        whole = self._shards.place_whole
        return whole(self._rank_pages.copy()), whole(self._num_rank_pages.copy())

    def warm_up(self) -> None:
        """Compile the program that installs a page."""
        self._set(self._pool.num_pages, self._zeros)  # a page beyond the last, as all may be in use

    def _set(self, number: int, content: Pages) -> None:
        pages = self._install(self.resident.pages, np.int32(number), content)
        self.resident = replace(self.resident, pages=pages)

    def begin(self, adapter: Adapter) -> None:
        self._announced.discard(adapter)
        self._coming[adapter] = self._thread.submit(self._bring, adapter)

    def finished(self, round_: int) -> list[tuple[Adapter, str | None]]:
        done: list[tuple[Adapter, str | None]] = []
        for adapter, future in list(self._coming.items()):
            if not future.done() or adapter in self._announced:
                continue
            error, why = future.exception(), None
            if error is None:
                self._announced.add(adapter)
            else:
                why = str(error) or type(error).__name__
                del self._coming[adapter]  # frees the pages that the failed future holds
            done.append((adapter, why))
        return done

    def install(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        try:
            content = self._coming.pop(adapter).result()
        except Exception as error:
            raise ValueError(f"adapter {adapter.name!r} cannot be loaded: {error}") from error
        for number, page in zip(pages, content, strict=True):
            self._set(number, self._zeros | page)
        self._rank_pages[slot, : len(pages)] = pages
        self._num_rank_pages[:, slot] = [
            sum(name in page for page in content) for name in self._names
        ]
        rank_pages, num_rank_pages = self._tables()
        self.resident = replace(self.resident, rank_pages=rank_pages, num_rank_pages=num_rank_pages)

    def wait(self) -> None:
        coming = [f for a, f in self._coming.items() if a not in self._announced]
        wait(coming, MOST_WAIT_S, FIRST_COMPLETED)

    def _bring(self, adapter: Adapter) -> list[Pages]:
        """Copy the adapter's pages to the device, in the loading thread."""
        key = adapter.content_hash
        if key not in self._host:
            self._host[key] = self._read(adapter)
        self._host.move_to_end(key)
        pages = self._host[key]
        while self._host and sum(map(_bytes_of, self._host.values())) > self._host_bytes:
            self._host.popitem(last=False)
        place = self._shards.place_layers
        with jax.default_device(self._device):
            placed = [
                {
                    name: {key: place(self._page[name][key], x) for key, x in matrices.items()}
                    for name, matrices in page.items()
                }
                for page in pages
            ]
            return jax.block_until_ready(placed)

    def _read(self, adapter: Adapter) -> HostPages:
        weights, content_hash = peft.load(adapter.folder, self._model)
        if content_hash != adapter.content_hash:
            raise ValueError(f"{adapter.folder} has changed since the adapter was added")
        pages = range(adapter.num_pages)
        return [lora.page(weights, self._model, number, self._dtype) for number in pages]


def _bytes_of(pages: HostPages) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(pages))
