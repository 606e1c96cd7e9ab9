"""W4A8: products of 4-bit weights with 8-bit activations (LServe §4.1; QServe).

Weights are quantised twice. First each output channel is quantised to integers from -119 to 119
with a float32 scale. Then each group of 128 of these integers, along the inputs, is quantised to
4-bit codes with a 4-bit zero point and a small integer as scale:

    w ~ scale * (group_scale * (code - zero))

Because of the limit 119, group_scale * (code - zero) fits 8 bits however the codes are rounded
(QServe's protective range). So these integers are exact, and are the codes of a W8A8 product.
Activations are quantised as in W8A8. QServe's rotations and smoothing, which make weights easier to
quantise, are not applied.
"""

from collections.abc import Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from models import w8a8
from models.w8a8 import Int8Weights

GROUP = 128  # inputs of a group
LARGEST = 119  # the largest integer after the first quantisation
MOST = 15  # the largest code


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int4Weights:
    """Weights in g groups of inputs. In stacked weights the first axis is layers.

    codes: [out, g, GROUP / 2] uint8. The low four bits hold the first half of a group, and the high
        four bits hold the second half.
    groups: [out, g, 2] int8, each group's scale and zero point.
    scale: [out] float32.
    """

    codes: jax.Array
    groups: jax.Array
    scale: jax.Array

    def in_8_bits(self) -> Int8Weights:
        """The same weights in 8 bits. Codes are the integers of all groups, concatenated."""
        halves = self.codes & MOST, self.codes >> 4
        codes = jnp.concatenate(halves, axis=-1).astype(jnp.int8)
        scale, zero = jnp.split(self.groups, 2, axis=-1)
        values = scale * (codes - zero)
        return Int8Weights(values.reshape(*values.shape[:-2], -1), self.scale)


def rounded(w) -> Int4Weights:
    """The quantised weights of w [out, in]; `in` is a multiple of GROUP."""
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
    """x / by for integers, rounded to the nearest integer, halves up."""
    return (2 * x + by) // (2 * by)


def quantize(params, projections: Collection[str]):
    """As `w8a8.quantize`, with `Int4Weights`. Raises ValueError if a device's part of a projection
    has a number of inputs that is no multiple of GROUP."""
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
