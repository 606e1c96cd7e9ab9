"""Products with quantised tokens in plain jnp. Codes are unpacked into planes, a fast order.

A byte holds n = 8 / bits elements. To unpack bytes in channel order, XLA on CPUs writes each
element separately, which takes longer than attention. So codes are unpacked in planes: for each
group first the first element of all bytes, then the second element of all bytes, and so on.
Elements are masked and not shifted, so an element of plane i is 2 ** (i * bits) times as large as
its code. Queries are permuted from channel order to planes, and sums of values from planes to
channel order. Unquantised elements stay in channel order.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantization.format import KVFormat
from pallas_kernels.quantization.quantizer import split, unpack

# With at most this many queries, a product is faster with tokens as its rows.
FEW_QUERIES = 16


class Queries(NamedTuple):
    """Queries for the keys of a format.

    planes: [..., R, D] float32, the queries in planes, divided by the planes' factors.
    sums: [..., R, g] float32, the sum of a query's channels in each group.
    """

    planes: jax.Array
    sums: jax.Array


def in_planes(q, format: KVFormat) -> Queries:
    """Queries [..., R, D] for the keys of a format."""
    q = q.astype(jnp.float32)
    sums = q.reshape(*q.shape[:-1], format.groups, -1).sum(-1)
    return Queries(_to_planes(q, format) / plane_factors(format), sums)


def out_of_planes(sums, format: KVFormat):
    """The sums [..., D] of `Codes.weighted_sum`, in the order of channels."""
    return _from_planes(sums / plane_factors(format), format)


@dataclass(frozen=True)
class Codes:
    """Unpacked tokens of pages.

    codes: [..., T, D] float32, in planes; unquantised elements in channel order.
    scale, zero: [..., T, g] float32.
    """

    codes: jax.Array
    scale: jax.Array
    zero: jax.Array
    format: KVFormat

    @classmethod
    def unpacked(cls, words, scales, format: KVFormat) -> "Codes":
        """The tokens of packed words [..., T, C] with scales [..., T, g]. Unquantised tokens have
        scale 1."""
        if format.scaled:
            # Without the barrier XLA would convert a scale to float32 again for each query.
            scale, zero = jax.lax.optimization_barrier(split(scales))
            return cls(_planes(words, format), scale, zero, format)
        one = jnp.ones((*words.shape[:-1], 1), jnp.float32)
        return cls(unpack(words, format), one, jnp.zeros_like(one), format)

    def products(self, queries: Queries):
        """Products q·x [..., R, T] float32 of queries and tokens."""
        parts, products = jnp.split(queries.planes, self.scale.shape[-1], axis=-1), jnp.float32(0)
        for i, (part, (codes, scale, zero)) in enumerate(zip(parts, self._groups())):
            scaled = _dots(part, codes) * scale[..., None, :]
            products += scaled + queries.sums[..., i, None] * zero[..., None, :]
        return products

    def weighted_sum(self, weights):
        """Sums [..., R, D] float32, in planes, of the tokens weighted by [..., R, T] float32."""
        sums = [
            jnp.einsum("...rt,...td->...rd", weights * scale[..., None, :], codes)
            for codes, scale, _ in self._groups()
        ]
        of_zeros = jnp.einsum("...rt,...tg->...rg", weights, self.zero)
        of_zeros = jnp.repeat(of_zeros, self.codes.shape[-1] // self.zero.shape[-1], axis=-1)
        return jnp.concatenate(sums, axis=-1) + of_zeros * plane_factors(self.format)

    def only(self, held) -> "Codes":
        """The tokens, with zeros where they are not `held` [..., T]. Codes must be finite."""
        scale, zero = (jnp.where(held[..., None], x, 0) for x in (self.scale, self.zero))
        return replace(self, scale=scale, zero=zero)

    def _groups(self):
        """(codes [..., T, D / g], scale [..., T], zero [..., T]), one tuple per group. An axis of
        groups would make XLA on CPUs twice as slow."""
        scales, zeros = (jnp.unstack(x, axis=-1) for x in (self.scale, self.zero))
        return zip(jnp.split(self.codes, len(scales), axis=-1), scales, zeros)


@dataclass(frozen=True)
class ByChannel:
    """Keys with a scale and a zero point for each channel and group of t tokens (KIVI).

    codes: `Codes` with swapped axes, [..., P / t, D, t]: channels instead of tokens, and tokens
        instead of channels. So q·k is a sum of D channels, weighted by the query's elements.
    """

    codes: Codes

    def products(self, q):
        """q·k [..., R, P] float32 of queries [..., R, D] in channel order."""
        sums = out_of_planes(self.codes.weighted_sum(q[..., None, :, :]), self.codes.format)
        products = jnp.moveaxis(sums, -3, -2)
        return products.reshape(*products.shape[:-2], -1)


def _dots(q, codes):
    """q·c [..., R, T] of queries [..., R, D] and codes [..., T, D]."""
    if q.shape[-2] > FEW_QUERIES:
        return jnp.einsum("...rd,...td->...rt", q, codes)
    return jnp.einsum("...td,...rd->...tr", codes, q).swapaxes(-1, -2)


def _per_byte(format: KVFormat) -> int:
    return max(1, 8 // format.bits)


def _planes(words, format: KVFormat):
    """Words [..., C] as codes [..., D] in planes, float32."""
    *rest, C = words.shape
    octets = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*rest, format.groups, 1, -1)
    masks = format.most << np.arange(0, 8, format.bits, dtype=np.int32)[:, None]
    # On CPUs, one instruction converts signed integers to floats.
    return (octets.astype(jnp.int32) & masks).astype(jnp.float32).reshape(*rest, format.head_dim)


def _to_planes(x, format: KVFormat):
    """Elements [..., D], permuted from channel order to the order of `_planes`.

    From outer to inner, the axes are (byte of a word, element of a byte, word) in channel order,
    and (element, word, byte) in planes.
    """
    if not format.scaled:
        return x
    parts = x.reshape(*x.shape[:-1], format.groups, 4, _per_byte(format), -1)
    return jnp.moveaxis(parts, -3, -1).reshape(x.shape)


def _from_planes(x, format: KVFormat):
    if not format.scaled:
        return x
    words = format.code_words // format.groups
    parts = x.reshape(*x.shape[:-1], format.groups, _per_byte(format), words, 4)
    return jnp.moveaxis(parts, -1, -3).reshape(x.shape)


def channels_in_planes(format: KVFormat):
    """[D] int32, the channel of each element in planes."""
    return _to_planes(jnp.arange(format.head_dim), format)


def plane_factors(format: KVFormat) -> np.ndarray:
    """[D] float32, the factor by which each element in planes is larger than its code."""
    if _per_byte(format) == 1:
        return np.ones(format.head_dim, np.float32)
    of_planes = 2.0 ** np.arange(0, 8, format.bits)
    of_group = np.repeat(of_planes, format.head_dim // format.groups // len(of_planes))
    return np.tile(of_group, format.groups).astype(np.float32)
