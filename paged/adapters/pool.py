"""The device's pool of rank pages, which all layers of a step read (Punica §4, §5.2)."""

from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp

from models import lora
from models.common import Adapters
from models.config import ModelConfig
from models.families import family
from paged.config import EngineConfig
from paged.step_inputs import StepInputs
from paged.tensor_parallel import REPLICATED, Shards
from pallas_kernels import backend
from pallas_kernels.lora import Segments, plan_sgmv, sgmv

Pages = dict[str, dict[str, jax.Array]]


@flax.struct.dataclass
class ResidentAdapters:
    """The arrays of the adapters on the device.

    pages: {projection: {'a': [L, N, 16, in], 'b': [L, N, 16, out]}}, split as the base weights.
    rank_pages: [A, Q] int32, the pages of the adapter in each slot.
    num_rank_pages: [projections, A] int32, number of these pages that each projection uses.
    """

    pages: Pages
    rank_pages: jax.Array
    num_rank_pages: jax.Array


@dataclass(frozen=True)
class AdapterPool:
    """Sizes of the pool: A slots, N pages, at most Q pages for one adapter.

    implementation: implementation of the ops, as in `StepProgram.declare`.
    """

    num_slots: int
    num_pages: int
    max_pages: int
    implementation: str | None = None

    @classmethod
    def declare(cls, config: EngineConfig, implementation: str | None) -> "AdapterPool | None":
        """The pool of an engine; None without adapters."""
        if not config.adapter_slots:
            return None
        most = lora.num_pages(config.max_adapter_rank)
        return cls(config.adapter_slots, config.num_adapter_pages, most, implementation)

    def empty(self, model: ModelConfig, dtype) -> Pages:
        """Pages of zeros, for a whole model or a shard's part."""
        return {
            name: {key: jnp.zeros(param.shape, dtype) for key, param in matrices.items()}
            for name, matrices in lora.declare(model, self.num_pages).items()
        }

    def abstract(self, shards: Shards, dtype) -> ResidentAdapters:
        """A step's adapter arrays as `ShapeDtypeStruct`s, to compile without weights."""
        model = shards.sharded.whole
        tables = (self.num_slots, self.max_pages), (len(family(model).PROJECTIONS), self.num_slots)
        rank_pages, num_rank_pages = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in tables)
        return ResidentAdapters(
            shards.abstract_declared(lora.declare(model, self.num_pages), dtype),
            shards.abstract(rank_pages, REPLICATED),
            shards.abstract(num_rank_pages, REPLICATED),
        )

    def hook(self, model: ModelConfig, adapters: ResidentAdapters, inputs: StepInputs) -> Adapters:
        """The model's hook, which adds each token's LoRA product to every projection."""
        names = family(model).PROJECTIONS
        segments = Segments(
            inputs.segment_slots, inputs.segment_starts, inputs.segment_ends, inputs.num_segments
        )
        schedule = plan_sgmv(segments, len(inputs.tokens), implementation=self.implementation)

        def add(name: str, layer, x, y):
            delta = sgmv(
                x, adapters.pages[name]["a"], adapters.pages[name]["b"], layer, segments,
                adapters.rank_pages, adapters.num_rank_pages[names.index(name)],
                schedule=schedule, implementation=self.implementation,
            )  # fmt: skip
            return y + delta.astype(y.dtype)

        def add_if_any(name: str, layer, x, y):
            any_adapter = inputs.num_segments[0] > 0
            return jax.lax.cond(any_adapter, lambda: add(name, layer, x, y), lambda: y)

        # A step without adapters should cost as much as in an engine without a pool. On a GPU a
        # condition would cost more than it saves.
        kernels = backend.current_gpu() or backend.runs_kernels(self.implementation)
        return add if kernels else add_if_any


def install(pages: Pages, number, content: Pages) -> Pages:
    """The pool with page `number`, an int32 scalar, replaced in all projections; unchanged if there
    is no such page."""
    return jax.tree.map(
        lambda pool, page: pool.at[:, number].set(page, mode="drop"), pages, content
    )
