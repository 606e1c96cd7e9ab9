"""How keys or values of few bits lie in a page.

A page holds P tokens of one KV head, as unsigned 32-bit words in two sections: the codes of all its
tokens, and then their scales and zero points (LServe §3.2: stored after the features, as QServe
does). A pool of such pages is one array [N, W].

    words 0 .. P * C - 1           codes: C = D * bits / 32 words of each token
    words P * C .. P * (C + g) - 1 scales and zero points: g words of each token, one a group

A token's groups, D / g consecutive channels each, follow each other in whole words, c = C / g words
each. Element i of a group lies in word i % c, in plane i // c; plane j is the bits from j * bits
on. If all words of a group are shifted equally, their lowest bits are c neighbouring channels in
order. A kernel shifts registers, and two words become a pair of 16-bit floats as tensor cores take
it. Pages of all formats have the same order of channels, so that their results add up. XLA on CPUs
masks bytes, and has an order of its own (codes.py).

LServe has one group a token. A group's word is the scale in the low half and the zero point in the
high half, both float16:

    value = zero point + scale * code,   0 <= code < 2 ** bits

The zero point is a value and not a code, so that equal channels need no scale. For codes c,

    q . k         = scale * (q . c) + zero point * sum(q)
    sum of p * v  = (p * scale) . c + p . zero point

so scales are applied to scores and to probabilities, never to elements.

Elements of 16 and 32 bits are plain floats: they have no scales, and their pages no such section.

If C divides P * g, a page is a whole number of rows of C words. The pool is then also an array
[N, W / C, C], whose row [n, t] has the codes of token t of page n. A kernel copies from it.
"""

from dataclasses import dataclass

WORD_BITS = 32
BITS = (1, 2, 4, 8, 16, 32)
FLOATS = {16: ("float16", "bfloat16"), 32: ("float32",)}


@dataclass(frozen=True)
class KVFormat:
    """The keys, or the values, of one token and KV head.

    bits: of an element.
    head_dim: D.
    groups: g, each with a scale and a zero point of its own.
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
                f"a head dim of {self.head_dim} elements of {self.bits} bits fills no whole words "
                f"of {WORD_BITS}"
            )
        if self.groups < 1 or self.head_dim % self.groups:
            raise ValueError(f"{self.groups} groups do not divide a head dim of {self.head_dim}")
        if self.head_dim // self.groups * self.bits % WORD_BITS:
            raise ValueError(
                f"{self.groups} groups of {self.head_dim} elements of {self.bits} bits fill no "
                "whole words each"
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
        """C."""
        return self.head_dim * self.bits // WORD_BITS

    @property
    def token_words(self) -> int:
        return self.code_words + self.scale_words

    @property
    def token_bytes(self) -> int:
        """Bytes of a token with its scales and zero points: D * bits / 8, and 4 * g if scaled."""
        return self.token_words * WORD_BITS // 8

    def page_words(self, page_size: int) -> int:
        """W."""
        return page_size * self.token_words
