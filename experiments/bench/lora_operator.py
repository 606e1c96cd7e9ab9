"""The LoRA operator x·A·B alone: SGMV and what Punica compares it with (§7.1), and what each costs.

All of a batch size and a rank run on the same weights, an adapter for each token; popularity says
which of them the tokens use. The peers have their weights in the layout that suits them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lora import PAGE_RANKS, Segments, sgmv, sgmv_expand
from pallas_kernels.lora.specs import segment_lengths
from pallas_kernels.specs import Cost

# In the order in which they are timed and drawn. `base` is the projection that LoRA adds to.
IMPLEMENTATIONS = ("sgmv", "loop", "gather_bmm", "ragged_dot", "base")


@dataclass(frozen=True)
class Case:
    """One call. rank: of all adapters. Widths are those of the projection."""

    popularity: str
    batch: int
    rank: int
    inputs: int
    outputs: int
    dtype: str = "float32"

    @property
    def lengths(self) -> list[int]:
        return segment_lengths(self.popularity, self.batch)

    def sgmv_cost(self, inputs: int, outputs: int) -> Cost:
        """Of one SGMV, by the paper's formulas (§7.1); 16 bits there, this case's dtype here."""
        moved = self.batch * (inputs + outputs) + len(self.lengths) * inputs * outputs
        return Cost(
            bytes=moved * jnp.dtype(self.dtype).itemsize,
            flops=2 * self.batch * inputs * outputs,
        )

    @property
    def expand_cost(self) -> Cost:
        return self.sgmv_cost(self.rank, self.outputs)

    @property
    def cost(self) -> Cost:
        """Of the operator, which is two SGMVs."""
        shrink, expand = self.sgmv_cost(self.inputs, self.rank), self.expand_cost
        return Cost(shrink.bytes + expand.bytes, shrink.flops + expand.flops)


@dataclass(frozen=True)
class Weights:
    """Of `batch` adapters of one rank, and x. Pages are as `sgmv` has them; the peers' weights are
    a [batch, I, rank] and b [batch, rank, O]."""

    x: jax.Array
    base: jax.Array
    a_pages: jax.Array
    b_pages: jax.Array
    rank_pages: jax.Array
    num_rank_pages: jax.Array
    a: jax.Array
    b: jax.Array

    @classmethod
    def draw(cls, case: Case, seed: int) -> "Weights":
        n, Q = case.batch, -(-case.rank // PAGE_RANKS)
        keys = jax.random.split(jax.random.key(seed), 5)
        a = jax.random.normal(keys[0], (n, case.inputs, case.rank)) * case.inputs**-0.5
        b = jax.random.normal(keys[1], (n, case.rank, case.outputs)) * case.rank**-0.5
        missing = ((0, 0), (0, Q * PAGE_RANKS - case.rank), (0, 0))
        order = np.asarray(jax.random.permutation(keys[2], n * Q))

        def paged(rows):
            pages = jnp.pad(rows, missing).reshape(n * Q, PAGE_RANKS, -1)
            return jnp.zeros_like(pages).at[order].set(pages)[None]

        base = jax.random.normal(keys[3], (case.inputs, case.outputs)) * case.inputs**-0.5
        x = jax.random.normal(keys[4], (case.batch, case.inputs))
        x, base, a_pages, b_pages, a, b = (
            z.astype(case.dtype) for z in (x, base, paged(a.swapaxes(1, 2)), paged(b), a, b)
        )
        return cls(
            x, base, a_pages, b_pages, jnp.asarray(order.reshape(n, Q), jnp.int32),
            jnp.full(n, Q, jnp.int32), a, b,
        )  # fmt: skip


def segments_of(case: Case) -> Segments:
    """The adapters' tokens lie side by side; one program serves all popularities."""
    lengths = np.array(case.lengths)
    ends = np.cumsum(lengths)

    def padded(numbers):
        return jnp.asarray(np.pad(numbers, (0, case.batch - len(lengths))), jnp.int32)

    count = jnp.array([len(lengths)], jnp.int32)
    return Segments(padded(np.arange(len(lengths))), padded(ends - lengths), padded(ends), count)


@jax.jit
def _sgmv(w: dict[str, Any], segments):
    return sgmv(
        w["x"], w["a_pages"], w["b_pages"], jnp.int32(0), segments, w["rank_pages"],
        w["num_rank_pages"],
    )  # fmt: skip


@jax.jit
def _expand(v, w: dict[str, Any], segments):
    return sgmv_expand(
        v, w["b_pages"], jnp.int32(0), segments, w["rank_pages"], w["num_rank_pages"]
    )


@functools.partial(jax.jit, static_argnames="length")
def _one_adapter(x, a, b, start, length):
    return jax.lax.dynamic_slice_in_dim(x, start, length) @ a @ b


@jax.jit
def _gather_bmm(x, a, b, adapter_of_token):
    v = jnp.einsum("ti,tir->tr", x, a[adapter_of_token])
    return jnp.einsum("tr,tro->to", v, b[adapter_of_token])


@jax.jit
def _ragged_dot(x, a, b, sizes):
    return jax.lax.ragged_dot(jax.lax.ragged_dot(x, a, sizes), b, sizes)


def programs(case: Case, weights: Weights) -> dict[str, Callable[[], jax.Array]]:
    """What gives x·A·B, by the names of `IMPLEMENTATIONS`, and x·W as 'base'.

    sgmv: as this machine has it. loop: a program for each adapter, one dispatched after the other.
    gather_bmm: the weights of each token are gathered and multiplied in one batch. ragged_dot:
    JAX's own product of segments.
    """
    w, segments = vars(weights), segments_of(case)
    x, a, b = weights.x, weights.a, weights.b
    lengths = case.lengths
    adapter_of_token = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths), jnp.int32)
    sizes = jnp.asarray(np.pad(lengths, (0, case.batch - len(lengths))), jnp.int32)
    starts = np.cumsum(lengths) - lengths
    # Views of the stacks, which other frameworks have for nothing.
    parts = [
        (jnp.int32(start), length, a[i], b[i])
        for i, (start, length) in enumerate(zip(starts, lengths))
    ]

    def loop():
        rows = [_one_adapter(x, a, b, start, length) for start, length, a, b in parts]
        return jnp.concatenate(rows) if len(rows) > 1 else rows[0]

    product = jax.jit(jnp.matmul)
    return {
        "sgmv": lambda: _sgmv(w, segments),
        "loop": loop,
        "gather_bmm": lambda: _gather_bmm(x, a, b, adapter_of_token),
        "ragged_dot": lambda: _ragged_dot(x, a, b, sizes),
        "base": lambda: product(x, weights.base),
    }


def expand_program(case: Case, weights: Weights) -> Callable[[], jax.Array]:
    """One SGMV alone, rank to outputs: what the paper's roofline shows (Fig. 7)."""
    width = weights.rank_pages.shape[1] * PAGE_RANKS
    v = weights.x[:, :width] if case.inputs >= width else jnp.ones((case.batch, width), case.dtype)
    segments = segments_of(case)
    w = vars(weights)
    return lambda: _expand(v, w, segments)


def cases(
    popularities: Sequence[str], batches: Sequence[int], ranks: Sequence[int], like: Case
) -> list[Case]:
    """Those of one batch size and rank, which share weights, follow each other."""
    return [
        replace(like, popularity=popularity, batch=batch, rank=rank)
        for batch in batches
        for rank in ranks
        for popularity in popularities
    ]
