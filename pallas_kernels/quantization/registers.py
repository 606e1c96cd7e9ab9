"""Quantised tokens in a kernel's registers: words become operands of tensor cores.

The tensor cores multiply 16-bit floats. A code of up to 4 bits becomes the lowest mantissa bits of
a 16-bit float, without arithmetic. The float's value is 128 + code in bfloat16 and 1024 + code in
float16. A code of 8 bits does not fit a bfloat16's mantissa. So the kernel puts its bits into two
floats, and their exact difference is code - 128.

`offset`, the number that is added to codes, is subtracted from sums, never from elements. The
larger sums lose bits of a float32. With rounded sums of D = 128 elements the error is up to
2 * D * 2**-24 * 1039 = 1/64 of a step of the code per unit of |q|. The error of quantisation itself
is up to 1/2 of a step. A 32-bit word is shifted whole and masked as two 16-bit halves, because a
GPU has no shift of 16-bit pairs.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.quantization.format import KVFormat

# The bits and the value of the float whose lowest mantissa bit is worth 1.
_ONES = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}
_CENTRE = 128  # subtracted from 8-bit codes


def refusal(format: KVFormat, dtype) -> str | None:
    """Why a kernel cannot multiply elements of this format by elements of `dtype`, or None."""
    if format.groups > 1:
        return f"keys and values must have one scale for each token, not {format.groups}"
    if not format.scaled and format.floats != str(jnp.dtype(dtype)):
        return (
            f"pages of {format.floats} need queries of {format.floats}, not of {jnp.dtype(dtype)}"
        )
    if format.code_words % 8:
        return (
            f"a token of {format.head_dim} elements of {format.bits} bits must fill a multiple of "
            f"8 words, not {format.code_words}"
        )
    return None


def offset(format: KVFormat, dtype) -> int:
    """The number that `operand` adds to codes."""
    if not format.scaled:
        return 0
    return -_CENTRE if format.bits == 8 else _ONES[str(jnp.dtype(dtype))][1]


def operand(words_TxC, format: KVFormat, dtype, hidden_zero=0):
    """code + `offset` [T, D] in `dtype`, for words [T, C] uint32. Floats are not changed.

    hidden_zero: int32, a zero that is no constant to the compiler. An instruction that masks one
        operand and sets bits of another can have only one constant.
    """
    hidden = jnp.asarray(hidden_zero).astype(jnp.uint32)
    halves: list[list] = [[], []]
    for plane in range(16 // format.bits):
        shifted = words_TxC >> jnp.uint32(plane * format.bits) if plane else words_TxC
        for parts, half in zip(halves, _halves(shifted, format, dtype, hidden)):
            parts.append(half)
    return jnp.concatenate(halves[0] + halves[1], axis=1)


def _halves(words, format: KVFormat, dtype, hidden):
    """The lowest element of each word's lower half, and the lowest element of its upper half."""

    def floats(words):
        for half in (words, words >> jnp.uint32(16)):
            yield jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.dtype(dtype))

    def bits(mask: int):
        return words & jnp.uint32(mask * 0x10001)

    if not format.scaled:
        return floats(words)
    ones, worth = _ONES[str(jnp.dtype(dtype))]
    constant = hidden + jnp.uint32(ones * 0x10001)
    if format.bits < 8:
        return floats(bits(format.most) | constant)
    if worth > format.most:
        more = jnp.asarray(worth + _CENTRE, dtype)
        return (half - more for half in floats(bits(format.most) | constant))
    # 0x80 is the lowest bit of the exponent: `highest` is 128 if the code has it, and 256 if not.
    larger = hidden + jnp.uint32((ones | 0x80) * 0x10001)
    both = floats(bits(0x7F) | constant), floats(bits(0x80) ^ larger)
    return (rest - highest for rest, highest in zip(*both))
