"""W4A8: products of 4-bit weights with 8-bit activations (LServe §4.2; QServe).

Weights are quantised twice. Each output channel becomes integers from -119 to 119 with a scale in
float32; these, in groups of 128 inputs, become codes of 4 bits with a zero point of 4 bits and a
scale that is a small integer itself:

    w ~ scale * (group_scale * (code - zero))

With 119, what a group gives stays within 8 bits, whichever way it is rounded (QServe's protective
range). So products are those of W8A8 with the integers in brackets: exact, and activations are
quantised as there. QServe's rotations and smoothing, which make weights easier to quantise, are not
applied.
"""

from collections.abc import Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from models import w8a8
from models.w8a8 import Int8Weights

GROUP = 128  # inputs
LARGEST = 119  # of the integers that groups are made of
MOST = 15  # the largest code


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int4Weights:
    """codes: [out, g, GROUP / 2] uint8, of each group the first half in the low four bits and the
    second half in the others.  groups: [out, g, 2] int8, each group's scale and zero point.  scale:
    [out] float32. Stacked, they have an axis of layers first."""

    codes: jax.Array
    groups: jax.Array
    scale: jax.Array

    def in_8_bits(self) -> Int8Weights:
        """The same weights, the integers of all groups side by side."""
        halves = self.codes & MOST, self.codes >> 4
        codes = jnp.concatenate(halves, axis=-1).astype(jnp.int8)
        scale, zero = jnp.split(self.groups, 2, axis=-1)
        values = scale * (codes - zero)
        return Int8Weights(values.reshape(*values.shape[:-2], -1), self.scale)


def rounded(w) -> Int4Weights:
    """Of w [out, in], with whole groups of inputs."""
    w = w.astype(jnp.float32)
    scale = jnp.abs(w).max(-1) / LARGEST
    whole = jnp.round(w / jnp.where(scale > 0, scale, 1)[:, None]).astype(jnp.int32)
    whole = whole.reshape(len(w), -1, GROUP)
    least = jnp.minimum(whole.min(-1, keepdims=True), 0)
    most = jnp.maximum(whole.max(-1, keepdims=True), 0)
    step = jnp.maximum(_quotient(most - least, MOST), 1)
    zero = jnp.clip(_quotient(-least, step), 0, MOST)
    codes = jnp.clip(_quotient(whole, step) + zero, 0, MOST).astype(jnp.uint8)
    low, high = jnp.split(codes, 2, axis=-1)
    groups = jnp.concatenate([step, zero], -1).astype(jnp.int8)
    return Int4Weights(low | high << 4, groups, scale)


def _quotient(x, by):
    """x / by of integers, rounded, halves up."""
    return (2 * x + by) // (2 * by)


def quantize(params, projections: Collection[str]):
    """As `w8a8.quantize`, with `Int4Weights`. Raises ValueError for a projection of which a shard
    has no whole groups of inputs."""
    return w8a8.quantize(params, projections, _weights)


def _weights(w) -> Int4Weights:
    inputs = w.sharding.shard_shape(w.shape)[1]
    if inputs % GROUP:
        raise ValueError(f"w4a8 needs whole groups of {GROUP} inputs, not {inputs} on a device")
    weights = jax.jit(rounded)(w)
    if not isinstance(w.sharding, NamedSharding):
        return weights
    mesh, (rows, columns, *_) = w.sharding.mesh, (*w.sharding.spec, None, None)

    def placed(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    codes, groups = (placed(x, rows, columns) for x in (weights.codes, weights.groups))
    return Int4Weights(codes, groups, placed(weights.scale, rows))
