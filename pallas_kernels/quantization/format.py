"""The layout of quantised keys or values in a page.

A page holds P tokens of one KV head, as unsigned 32-bit words in two sections: first the codes of
all tokens, then the scales and zero points of all tokens (after the features, as in LServe §3.2 and
QServe). A pool of pages is one array [N, W].

    words 0 .. P * C - 1           codes: C = D * bits / 32 words of each token
    words P * C .. P * (C + g) - 1 scales and zero points: g words of each token, one per group

A token has g groups of D / g consecutive channels. Each group fills c = C / g whole words. Element
i of a group is in word i % c, in plane i // c. Plane j is the bits from j * bits on. If all words
of a group are shifted equally, their lowest bits are c neighbouring channels in order. A kernel
shifts registers, and equal halves of two words become a pair of 16-bit floats, an operand of tensor
cores. All formats have the same order of channels, so that results of pages of several formats can
be added. The XLA version masks bytes on CPUs, and has an order of its own (codes.py).

LServe has one group per token. A group's word has the scale in the low half and the zero point in
the high half, both float16:

    value = zero point + scale * code,   0 <= code < 2 ** bits

The zero point is a value and not a code, so that equal channels need no scale. For codes c,

    q . k         = scale * (q . c) + zero point * sum(q)
    sum of p * v  = (p * scale) . c + p . zero point

so scales are applied to scores and to probabilities, never to elements.

Elements of 16 and 32 bits are plain floats without scales. Their pages have no section of scales.

If C divides P * g, a page is a whole number of rows of C words. Kernels then copy from the pool as
an array [N, W / C, C]. Its row [n, t] has the codes of token t of page n.
"""

from dataclasses import dataclass

WORD_BITS = 32
BITS = (1, 2, 4, 8, 16, 32)
FLOATS = {16: ("float16", "bfloat16"), 32: ("float32",)}


@dataclass(frozen=True)
class KVFormat:
    """The keys, or the values, of one token and KV head.

    bits: bits of an element.
    head_dim: D.
    groups: g, the number of groups of a token. Each group has a scale and a zero point of its own.
    floats: the dtype of elements of 16 or 32 bits.

    Raises ValueError for unsupported bits or floats, and for groups that do not fill whole words.
    """

    bits: int
    head_dim: int
    groups: int = 1
    floats: str = "float16"

    def __post_init__(self):
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, not {self.bits}")
        if self.head_dim < 1 or self.head_dim * self.bits % WORD_BITS:
            raise ValueError(
                f"a head dim of {self.head_dim} with {self.bits}-bit elements is not a whole "
                f"number of {WORD_BITS}-bit words"
            )
        if self.groups < 1 or self.head_dim % self.groups:
            raise ValueError(f"{self.groups} groups do not divide a head dim of {self.head_dim}")
        if self.head_dim // self.groups * self.bits % WORD_BITS:
            raise ValueError(
                f"{self.groups} groups split a head dim of {self.head_dim} with {self.bits}-bit "
                f"elements into parts that are not whole {WORD_BITS}-bit words"
            )
        if not self.scaled and self.floats not in FLOATS[self.bits]:
            allowed = " or ".join(FLOATS[self.bits])
            raise ValueError(f"elements of {self.bits} bits are {allowed}, not {self.floats}")

    @property
    def scaled(self) -> bool:
        return self.bits not in FLOATS

    @property
    def scale_words(self) -> int:
        return self.groups if self.scaled else 0

    @property
    def most(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    @property
    def code_words(self) -> int:
        """C, the words of a token's codes."""
        return self.head_dim * self.bits // WORD_BITS

    @property
    def token_words(self) -> int:
        return self.code_words + self.scale_words

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: D * bits / 8, and 4 * g more for scales and zero points if scaled."""
        return self.token_words * WORD_BITS // 8

    def page_words(self, page_size: int) -> int:
        """W, the words of a page."""
        return page_size * self.token_words
