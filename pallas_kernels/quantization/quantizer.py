"""The quantiser: asymmetric, separate for each token and group, run when the token is written.

Scale and zero point are stored in 16 bits. The zero point is rounded down and the scale up, so that
the codes cover the range from the smallest to the largest value. So the error of every element is
at most half a scale.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.quantization.format import WORD_BITS, KVFormat

LIMIT = float(jnp.finfo(jnp.float16).max) / 2  # so that float16 holds LIMIT - (-LIMIT)


def quantize(x, format: KVFormat):
    """x [..., D] as codes [..., C], and as scales and zero points [..., g]; both are uint32 words.

    The error of an element is at most half a scale. A group of equal float16 values is exact.
    Elements beyond +-`LIMIT` (32,752) are clipped. A group with an element that is not finite reads
    as NaN. For floats the scales are empty, [..., 0]. Raises ValueError if D differs from the
    format's head_dim.
    """
    if x.shape[-1] != format.head_dim:
        raise ValueError(f"a format of head dim {format.head_dim} cannot hold {x.shape}")
    if not format.scaled:
        unsigned = jnp.dtype(f"uint{format.bits}")
        codes = jax.lax.bitcast_convert_type(x.astype(format.floats), unsigned)
        return pack(codes.astype(jnp.uint32), format), jnp.zeros((*x.shape[:-1], 0), jnp.uint32)
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], format.groups, -1)
    finite = jnp.isfinite(x).all(-1)
    x = jnp.clip(x, -LIMIT, LIMIT)
    zero = -_rounded_up(-x.min(-1))
    above = x - zero.astype(jnp.float32)[..., None]
    scale = _rounded_up(above.max(-1) / format.most)
    step = scale.astype(jnp.float32)
    step = jnp.where(step > 0, step, 1)[..., None]
    codes = jnp.clip(jnp.round(above / step), 0, format.most).astype(jnp.uint32)
    zero = jnp.where(finite, zero, jnp.nan)
    return pack(codes.reshape(*codes.shape[:-2], -1), format), joined(scale, zero)


def dequantize(codes, scales, format: KVFormat):
    """The elements [..., D] float32 of `quantize`'s codes [..., C] and scales [..., g]."""
    if not format.scaled:
        return unpack(codes, format)
    scale, zero = split(scales)
    elements = unpack(codes, format).reshape(*scale.shape, -1)
    elements = zero[..., None] + scale[..., None] * elements
    return elements.reshape(*scale.shape[:-1], -1)


def pack(codes, format: KVFormat):
    """Codes [..., D] uint32 as words [..., C]."""
    *rest, _ = codes.shape
    planes = codes.reshape(*rest, format.groups, format.per_word, -1)
    words = (planes << _shifts(format)).sum(-2, dtype=jnp.uint32)
    return words.reshape(*rest, format.code_words)


def unpack(words, format: KVFormat):
    """The codes [..., D] of words [..., C] in float32, or the elements for a format of floats. XLA
    fuses this form with a product."""
    of_groups = words.reshape(*words.shape[:-1], format.groups, 1, -1)
    codes = (of_groups >> _shifts(format)) & jnp.uint32(format.most)
    if not format.scaled:
        unsigned = codes.astype(f"uint{format.bits}")
        floats = jax.lax.bitcast_convert_type(unsigned, jnp.dtype(format.floats))
        return floats.astype(jnp.float32).reshape(*words.shape[:-1], -1)
    # On CPUs, one instruction converts signed integers to floats.
    return codes.astype(jnp.int32).astype(jnp.float32).reshape(*words.shape[:-1], -1)


def split(words):
    """The scales and the zero points of words [...], both [...] float32."""
    return low_half(words), low_half(words >> jnp.uint32(16))


def low_half(words):
    """The float16 in the low half of each word, as float32."""
    return words.astype(jnp.uint16).view(jnp.float16).astype(jnp.float32)


def joined(scale, zero):
    """The words of scales and zero points, both [...] float16."""
    low, high = (x.view(jnp.uint16).astype(jnp.uint32) for x in (scale, zero))
    return low | high << 16


def _shifts(format: KVFormat):
    return jnp.arange(0, WORD_BITS, format.bits, dtype=jnp.uint32)[:, None]


def _rounded_up(x):
    """The smallest float16 that is at least x, a float32 within the range of float16."""
    nearest = x.astype(jnp.float16)
    above = jnp.nextafter(nearest, jnp.float16(jnp.inf))
    return jnp.where(nearest.astype(jnp.float32) < x, above, nearest)
