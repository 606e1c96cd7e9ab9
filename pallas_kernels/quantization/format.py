"""How keys or values of few bits lie in a page.

A page holds P tokens of one KV head, as unsigned 32-bit words in two sections: the codes of all its
tokens, and then their scales and zero points (LServe §3.2: stored after the features, as QServe
does). A pool of such pages is one array [N, W].

    words 0 .. P * C - 1           codes: C = D * bits / 32 words of each token
    words P * C .. P * (C + g) - 1 scales and zero points: g words of each token, one a group

Element i of a token lies in word i // n of its C, where n = 32 / bits, from bit (i % n) * bits on:
a word holds neighbours. As bytes (little-endian) a token of 8 bits is its elements in order; of 4
bits, byte j has element 2j in its low half and 2j + 1 in its high half. So a kernel that unpacks
bytes into planes finds all even channels and then all odd ones; attention does not mind, if the
query's channels are put in that order before and the output's back after it.

A group is D / g consecutive channels; LServe has one a token. Its word is the scale in the low half
and the zero point in the high half, both float16:

    value = zero point + scale * code,   0 <= code < 2 ** bits

The zero point is a value and not a code, so that equal channels need no scale. With codes c,

    q . k         = scale * (q . c) + zero point * sum(q)
    sum of p * v  = (p * scale) . c + p . zero point

so scales are applied to scores and to probabilities, never to elements.

Elements of 16 and 32 bits are floats as they are: they have no scales, and no section of them.

The sections of a page begin at whole tokens: where C divides P * g, the pool is also an array
[N * W / C, C] whose row n * W / C + t has the codes of token t of page n.
"""

from dataclasses import dataclass

WORD_BITS = 32
BITS = (1, 2, 4, 8, 16, 32)
FLOATS = {16: ("float16", "bfloat16"), 32: ("float32",)}


@dataclass(frozen=True)
class KVFormat:
    """The keys, or the values, of one token and KV head.

    bits: of an element. head_dim: D. groups: g, each with a scale and a zero point of its own.
    floats: what elements of 16 or 32 bits are.

    Raises ValueError for what does not fill whole words.
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
        if self.head_dim // self.groups * self.bits % 8:
            raise ValueError(
                f"{self.groups} groups of {self.head_dim} elements of {self.bits} bits fill no "
                "whole bytes each"
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
        """Of a token, with its scales and zero points if it has any: D * bits / 8 + 4 * g."""
        return self.token_words * WORD_BITS // 8

    def page_words(self, page_size: int) -> int:
        """W."""
        return page_size * self.token_words
