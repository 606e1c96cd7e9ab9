"""W8A8: products of 8-bit weights with 8-bit activations (LServe §4.1; QServe, SmoothQuant).

A weight matrix has one scale for each output channel, computed once. An activation has one scale
for each token, computed at run time, so that a token's product does not depend on the rest of the
batch. Both quantisations are symmetric: x ~ scale * codes with codes from -127 to 127. Embeddings,
the head, norms and biases are not quantised.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

LARGEST = 127  # the largest code; -128 would have no opposite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weights:
    """Quantised weights. In stacked weights the first axis is layers.

    codes: [out, in] int8.
    scale: [out] float32.
    """

    codes: jax.Array
    scale: jax.Array


def rounded(x, reduce_max=lambda largest: largest):
    """x [..., n] as codes [..., n] int8, with one scale [...] float32 per vector of n elements.

    reduce_max: largest absolute values [...] on this shard -> their maximum over all shards;
        needed if shards split the last axis.
    """
    x = x.astype(jnp.float32)
    scale = reduce_max(jnp.abs(x).max(-1)) / LARGEST
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1)[..., None])
    return codes.astype(jnp.int8), scale


def linear(x, w: Int8Weights, dtype, reduce_max=lambda largest: largest):
    """The product of x [T, in] and w [out, in]: [T, out] in `dtype`. Sums of codes are exact.

    reduce_max: as in `rounded`; needed if shards split `in`.
    """
    codes, scale = rounded(x, reduce_max)
    sums = jax.lax.dot_general(
        codes, w.codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return (sums.astype(jnp.float32) * scale[:, None] * w.scale).astype(dtype)


def quantize(params, projections: Collection[str], of: Callable | None = None):
    """The parameters with each weight w of `projections` replaced by `of(w)`, by default
    `Int8Weights`, on the same devices. Scales do not depend on the sharding.

    params: placed on devices, with layers as a list.
    """
    of = of or _weights
    layers = [
        {name: of(x) if name in projections else x for name, x in layer.items()}
        for layer in params["layers"]
    ]
    return params | {"layers": layers}


def _weights(w) -> Int8Weights:
    codes, scale = jax.jit(rounded)(w)
    if isinstance(w.sharding, NamedSharding):
        rows, *_ = (*w.sharding.spec, None)
        codes = jax.device_put(codes, w.sharding)
        scale = jax.device_put(scale, NamedSharding(w.sharding.mesh, PartitionSpec(rows)))
    return Int8Weights(codes, scale)
