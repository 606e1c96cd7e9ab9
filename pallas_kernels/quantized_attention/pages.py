"""Unified pages (DiffKV §5.2). All pages have one size; each is parsed by its tokens' format.

A pool is one array [N, W] of unsigned 32-bit words. A page holds tokens of one KV head and of one
precision, in six sections: codes of keys, scales and zero points of keys, codes of values, scales
and zero points of values, scores, and positions. A section stores one token after the other.
pallas_kernels/quantization/format.py has the layout of a token's codes and scales. Sections begin
at multiples of `ALIGNMENT` words, because GPUs can copy asynchronously only from there. Sections of
codes also begin at multiples of a token's words, so that the pool can be viewed as an array with a
token per row.

    K8V4, head dim 128, P tokens: 32 P | P | 16 P | P | P | P words

Keys may have scales and zero points by channel, one pair for each group of t tokens (KIVI,
arXiv:2402.02750). Such a page holds whole groups. A group stores the codes channel by channel. The
codes of one channel, t tokens, have the layout of a token with t channels. Each channel of a group
has one word of scale and zero point, which is D / t words per token.

If `scored` is false, the sections of scores and positions are empty. Quantised keys and values may
have outliers. Their words follow a token's scales (quantization/outliers.py).

The number of tokens of a page follows from its words and its format. Attention reads a page's words
once. Only the format defines their meaning.
"""

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.quantization import (
    ByChannel,
    Codes,
    KVFormat,
    as_codes,
    dequantize,
    in_planes,
    put_back,
    quantize,
    quantize_but,
)
from pallas_kernels.quantization.pages import put_words, take_words

ALIGNMENT = 4  # words
NAME = re.compile(r"K(\d+)V(\d+)")


class Section(NamedTuple):
    """A section of a page.

    first: the section's first word in the page.
    width: the words of each token.
    """

    first: int
    width: int


class Tokens(NamedTuple):
    """Single tokens.

    keys, values: [n, D].
    scores: [n] float32.
    positions: [n] int32.
    """

    keys: jax.Array
    values: jax.Array
    scores: jax.Array
    positions: jax.Array

    def where(self, these, others: "Tokens") -> "Tokens":
        """This object's tokens where `these` [n] is true, and `others` elsewhere."""

        def chosen(x, other):
            return jnp.where(these.reshape(-1, *[1] * (x.ndim - 1)), x, other)

        return jax.tree.map(chosen, self, others)


@dataclass(frozen=True)
class PageFormat:
    """The format of a page of `words` words: the precision and layout of its tokens.

    keys, values: the formats of a token's keys and values.
    words: W, the size of a page.
    key_group: t, the number of tokens that share a channel's key scale; 0 for scales by token.
    scored: whether the page stores the tokens' scores and positions.
    outliers: the number of outliers of a token's keys, and of its values. Plain floats have none.

    Raises ValueError if a page is too small for a token, or for a group of tokens.
    """

    keys: KVFormat
    values: KVFormat
    words: int
    key_group: int = 0
    scored: bool = True
    outliers: int = 0

    def __post_init__(self):
        if self.tokens < 1:
            unit = f"a group of {self.key_group} tokens" if self.key_group else "a token"
            raise ValueError(f"{self.name}: {unit} does not fit a page of {self.words} words")

    @classmethod
    def holding(
        cls, tokens: int, keys: KVFormat, values: KVFormat, scored: bool = True, outliers: int = 0
    ) -> "PageFormat":
        """The format of the smallest page that holds `tokens` tokens."""
        words = _sections(_widths(keys, values, scored, outliers), tokens)[1]
        return cls(keys, values, words, scored=scored, outliers=outliers)

    @property
    def name(self) -> str:
        return f"K{self.keys.bits}V{self.values.bits}"

    @functools.cached_property
    def tokens(self) -> int:
        """P, the tokens of a page."""
        widths, step = self._widths, self.key_group or 1
        most = self.words // sum(widths) // step * step
        return next((n for n in range(most, 0, -step) if _sections(widths, n)[1] <= self.words), 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, with scales and zero points, and with score and position if stored."""
        return 4 * sum(self._widths)

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """The keys' codes and scales, the values' codes and scales, scores, and positions."""
        return _sections(self._widths, self.tokens)[0]

    @property
    def _widths(self) -> tuple[int, ...]:
        return _widths(self.keys, self.values, self.scored, self.outliers)

    @property
    def _channel(self) -> KVFormat:
        """The format of one channel's keys in a group."""
        return KVFormat(self.keys.bits, self.key_group)

    def section(self, rows, number: int):
        """The words [..., P, w] of section `number`, from pages' words [..., W]."""
        first, width = self.sections[number]
        part = rows[..., first : first + self.tokens * width]
        return part.reshape(*rows.shape[:-1], self.tokens, width)

    def _channels(self, rows):
        """Codes [..., P / t, D, words] and scales [..., P / t, D, 1] of keys by channel."""
        shape = *rows.shape[:-1], self.tokens // self.key_group, self.keys.head_dim, -1
        return self.section(rows, 0).reshape(shape), self.section(rows, 1).reshape(shape)

    def dequantized(self, rows):
        """Keys and values [..., P, D] float32 of pages' words [..., W]."""
        codes, scales, of_values, their_scales = (self.section(rows, i) for i in range(4))
        values = self._elements(of_values, their_scales, self.values)
        if not self.key_group:
            return self._elements(codes, scales, self.keys), values
        of_keys, of_scales = self._channels(rows)
        keys = dequantize(of_keys, of_scales, self._channel).swapaxes(-1, -2)
        return keys.reshape(values.shape), values

    def _elements(self, codes, scales, format: KVFormat):
        elements = dequantize(codes, scales[..., : format.scale_words], format)
        return put_back(elements, scales[..., format.scale_words :])

    def _quantized(self, x, format: KVFormat) -> list[jax.Array]:
        """The words of codes, and the words of scales followed by outliers."""
        if not (self.outliers and format.scaled):
            return list(quantize(x, format))
        codes, *scales = quantize_but(x, format, self.outliers)
        return [codes, jnp.concatenate(scales, -1)]

    def queries(self, q):
        """Queries [..., R, D] for the keys that `read` returns."""
        return q if self.key_group else in_planes(q, self.keys)

    def read(self, words_NxW, page, held) -> tuple[Codes | ByChannel, Codes]:
        """Keys and values of the tokens [n, P] of the pages `page` [n].

        held: [n, P]. Other tokens read as zeros, because values that remain from another sequence
            may not be finite. Keys by channel read as zeros only in groups without held tokens.
        """
        # Without the barriers XLA on CPUs copies words one by one (paged_attention/xla.py).
        page = jax.lax.optimization_barrier(page)
        rows = take_words(words_NxW, page, 0, self.sections[4].first)
        rows = jax.lax.optimization_barrier(rows)
        if self.key_group:
            of_groups = held.reshape(len(page), -1, self.key_group).any(-1)[..., None]
            codes, scales = self._channels(rows)
            keys = Codes.unpacked(codes, scales, self._channel)
            return ByChannel(keys.only(of_groups)), self._unpacked(rows, 2, self.values, held)
        return self._unpacked(rows, 0, self.keys, held), self._unpacked(rows, 2, self.values, held)

    def _unpacked(self, rows, first: int, format: KVFormat, held) -> Codes:
        codes, scales = self.section(rows, first), self.section(rows, first + 1)
        if not format.scaled:
            codes = jnp.where(held[..., None], codes, 0)
        unpacked = Codes.unpacked(codes, scales[..., : format.scale_words], format)
        return as_codes(unpacked, scales[..., format.scale_words :], held).only(held)

    def read_tokens(self, words_NxW, page, at) -> Tokens:
        """The tokens [n] with index `at` [n] in the pages `page` [n]. Raises ValueError for keys by
        channel."""
        if self.key_group:
            raise ValueError(f"{self.name}: tokens are read by groups of {self.key_group}")
        rows = words_NxW.at[page].get(mode="clip")
        parts = [
            jnp.take_along_axis(self.section(rows, i), at[:, None, None], axis=1)[:, 0]
            for i in range(6)
        ]
        return Tokens(
            self._elements(parts[0], parts[1], self.keys),
            self._elements(parts[2], parts[3], self.values),
            parts[4][:, 0].view(jnp.float32) if self.scored else jnp.zeros(len(page), jnp.float32),
            parts[5][:, 0].view(jnp.int32) if self.scored else jnp.zeros(len(page), jnp.int32),
        )

    def write(self, words_NxW, page, at, tokens: Tokens):
        """The words [N, W] with tokens written to pages `page` [n] at index `at` [n].

        Tokens for pages from N on are dropped. All (page, at) must be distinct, also for dropped
        tokens. With a `key_group`, `tokens` are groups of tokens [n, t, …], and `at` is the index
        of a group's first token.
        """
        if self.key_group:
            keys = quantize(tokens.keys.swapaxes(-1, -2), self._channel)
        else:
            keys = self._quantized(tokens.keys, self.keys)
        parts = [
            *keys,
            *self._quantized(tokens.values, self.values),
            tokens.scores.astype(jnp.float32).view(jnp.uint32),
            tokens.positions.astype(jnp.int32).view(jnp.uint32),
        ]
        for (first, width), part in zip(self.sections, parts, strict=True):
            if width:
                part = part.reshape(len(page), -1)
                words_NxW = put_words(words_NxW, page, first + at * width, part)
        return words_NxW

    def read_scores(self, words_NxW, page):
        """Scores and positions [n, P] of the pages `page` [n]. Other words are not read."""
        first = self.sections[4].first
        span = self.sections[5].first + self.tokens - first
        part = take_words(words_NxW, page, first, span)
        scores, positions = part[:, : self.tokens], part[:, span - self.tokens :]
        return scores.view(jnp.float32), positions.view(jnp.int32)

    def write_scores(self, words_NxW, page, scores_nxP):
        """The words with new scores [n, P] in the pages `page` [n]. As in `write`, pages from N on
        are dropped, and all pages must be distinct."""
        first = jnp.full_like(page, self.sections[4].first)
        return put_words(words_NxW, page, first, scores_nxP.view(jnp.uint32))


def parse_format(
    name: str, head_dim: int, floats: str, groups: int = 1, key_group: int = 0
) -> tuple[KVFormat, KVFormat]:
    """The formats of keys and values, from a name such as K8V4.

    floats: the dtype of elements of 16 bits.
    groups: the number of groups of a token's keys, and of its values.
    key_group: as in `PageFormat`. If it is not 0, the keys' format has head_dim / key_group groups,
        so that the keys have the right number of words of scales.

    Raises ValueError for an invalid name, and for formats that do not fill whole words.
    """
    found = NAME.fullmatch(name)
    if not found:
        raise ValueError(f"a page format is named K8V4, by bits of keys and values, not {name!r}")
    keys, values = (
        KVFormat(int(bits), head_dim, groups, "float32" if bits == "32" else floats)
        for bits in found.groups()
    )
    if not key_group:
        return keys, values
    if head_dim % key_group or key_group * keys.bits % 32 or not keys.scaled:
        raise ValueError(
            f"{name}: keys by channel need scales, a head dim ({head_dim}) of whole groups of "
            f"{key_group} tokens, and whole words of a channel's codes"
        )
    return replace(keys, groups=head_dim // key_group), values


def _widths(keys: KVFormat, values: KVFormat, scored: bool, outliers: int) -> tuple[int, ...]:
    parts = [
        width
        for each in (keys, values)
        for width in (each.code_words, each.scale_words + outliers * each.scaled)
    ]
    return *parts, int(scored), int(scored)


def _sections(widths: tuple[int, ...], tokens: int) -> tuple[tuple[Section, ...], int]:
    """The sections of a page of `tokens` tokens, and the page's size in words."""
    sections, end = [], 0
    for number, width in enumerate(widths):
        of_codes = number in (0, 2)
        step = math.lcm(ALIGNMENT, width) if of_codes else ALIGNMENT
        first = -(-end // step) * step
        sections.append(Section(first, width))
        end = first + tokens * width
    return tuple(sections), -(-end // ALIGNMENT) * ALIGNMENT
