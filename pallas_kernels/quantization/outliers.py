"""Outliers: the elements of a token farthest from its other elements. They are stored separately,
in 16 bits, so that they do not widen the scale of all other elements (QAQ, arXiv:2403.04643).

Every token has the same number of outliers: the elements farthest from their group's median. An
outlier is one word, with the float16 value in the low half and the channel in the high half. QAQ
stores a share of all elements, the largest and the smallest, as a sparse matrix (not checked
against the paper).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.quantization.codes import Codes, channels_in_planes, plane_factors
from pallas_kernels.quantization.format import KVFormat
from pallas_kernels.quantization.quantizer import LIMIT, low_half, quantize


def quantize_but(x, format: KVFormat, count: int):
    """x [..., D] as codes [..., C], scales and zero points [..., g], and outliers [..., o] with
    o = `count`. All three are uint32 words. The codes of outliers are meaningless."""
    x = x.astype(jnp.float32)
    of_groups = x.reshape(*x.shape[:-1], format.groups, -1)
    median = jnp.broadcast_to(jnp.median(of_groups, -1, keepdims=True), of_groups.shape)
    median = median.reshape(x.shape)
    _, channel = jax.lax.top_k(jnp.abs(x - median), count)
    is_outlier = (jnp.arange(x.shape[-1]) == channel[..., None]).any(-2)
    codes, scales = quantize(jnp.where(is_outlier, median, x), format)
    value = jnp.take_along_axis(jnp.clip(x, -LIMIT, LIMIT), channel, -1).astype(jnp.float16)
    bits = value.view(jnp.uint16).astype(jnp.uint32)
    return codes, scales, bits | channel.astype(jnp.uint32) << 16


def put_back(elements, words):
    """The elements [..., D] float32, with the outliers [..., o] written to their channels."""
    values, channels = _split(words)
    at = jnp.arange(elements.shape[-1])
    for i in range(words.shape[-1]):
        elements = jnp.where(at == channels[..., i, None], values[..., i, None], elements)
    return elements


def as_codes(codes: Codes, words, held) -> Codes:
    """`codes` with the outliers [..., T, o] of `held` tokens [..., T] as codes. The code of an
    outlier is not an integer."""
    if not words.shape[-1]:
        return codes
    values, channels = _split(words)
    scale, D = jnp.where(codes.scale > 0, codes.scale, 1), codes.codes.shape[-1]
    of_channel = D // scale.shape[-1]
    each, zero = (jnp.repeat(x, of_channel, -1) for x in (scale, codes.zero))
    new, at = codes.codes, channels_in_planes(codes.format)
    for i in range(words.shape[-1]):
        code = (values[..., i, None] - zero) / each * plane_factors(codes.format)
        new = jnp.where(held[..., None] & (at == channels[..., i, None]), code, new)
    return replace(codes, codes=new, scale=scale)


def _split(words):
    """The values float32 and the channels int32 of outliers."""
    return low_half(words), (words >> 16).astype(jnp.int32)
