"""Device halves for host halves that own blocks. A block is one page in each of several heads."""

from dataclasses import replace
from typing import Any

import jax

from pallas_kernels.kv_write import copy_pages


class BlockDevice:
    """The methods of `DevicePolicy` that need only the pages of a block. C: number of blocks."""

    def pages_of(self, pool: str, blocks) -> jax.Array:
        """[C, heads] int32 pages of blocks [C]."""
        raise NotImplementedError

    def arrays(self, cache, pool: str) -> dict[str, Any]:
        """The fields of `cache` with page contents, by name: pytrees of arrays [N, ...]."""
        raise NotImplementedError

    def end_step(self, cache, plan, inputs) -> Any:
        return cache

    def report(self, cache) -> None:
        """Returns None: the host half owns all blocks and needs no report."""

    def export_units(self, cache, pool: str, units) -> dict[str, Any]:
        pages = self.pages_of(pool, units)
        return jax.tree.map(lambda x: x[pages], self.arrays(cache, pool))

    def import_units(self, cache, pool: str, units, content) -> Any:
        pages = self.pages_of(pool, units)

        def put(x, new):
            return x.at[pages].set(new, mode="promise_in_bounds")

        return replace(cache, **jax.tree.map(put, self.arrays(cache, pool), content))

    def copy_units(self, cache, pool: str, sources, destinations) -> Any:
        of, to = (self.pages_of(pool, units).reshape(-1) for units in (sources, destinations))

        def copied(x):
            pages = x if x.ndim == 3 else x[:, None]
            return copy_pages(pages, of, to).reshape(x.shape)

        return replace(cache, **jax.tree.map(copied, self.arrays(cache, pool)))
