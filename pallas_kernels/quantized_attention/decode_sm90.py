"""Decode over unified pages on Hopper: pages of two precisions are two sections of the kernel that
reads pages of few bits (paged_attention/quantized_sm90.py)."""

import functools
from collections.abc import Callable

import jax.numpy as jnp

from pallas_kernels.paged_attention import quantized_sm90, quantized_tiles, split_kv
from pallas_kernels.paged_attention.quantized_tiles import Section
from pallas_kernels.paged_attention.schedule import DecodeSchedule
from pallas_kernels.quantized_attention.pages import PageFormat


def sections_of(formats: tuple[PageFormat, PageFormat]) -> list[Section]:
    """Of high and low precision, whose pages lie from the left and from the right end (§5.2)."""
    found = []
    for format, from_right in zip(formats, (False, True), strict=True):
        codes, scales, values, more_scales = (section.first for section in format.sections[:4])
        firsts = codes, scales, values, more_scales
        found.append(Section(format.keys, format.values, format.tokens, firsts, from_right))
    return found


def refusal(q, words, K: int, formats: tuple[PageFormat, PageFormat]) -> str | None:
    """Why the kernel cannot run these arguments with K KV heads, or None."""
    return quantized_tiles.refusal(q, words, words, K, sections_of(formats))


def schedule_of(counts, formats: tuple[PageFormat, PageFormat]) -> DecodeSchedule:
    return quantized_tiles.schedule_of(counts, sections_of(formats))


def decode(q, words, tables, counts, *, formats, scale, schedule=None):
    out, lse, scores = quantized_sm90.decode(
        q, words, words, tables, counts, sections_of(formats), scale=scale, schedule=schedule,
        returns_scores=True,
    )  # fmt: skip
    return out, lse, tuple(scores)


def with_its_shapes(run: Callable) -> Callable:
    """Another implementation, whose scores have the axes of this one's."""

    @functools.wraps(run)
    def padded(q, words, tables, counts, *, formats, **options):
        out, lse, scores = run(q, words, tables, counts, formats=formats, **options)
        sections, G = sections_of(formats), q.shape[1] // tables.shape[1]
        pages = quantized_tiles.pages_of_tile(sections)
        both = []
        for x, section in zip(scores, sections):
            axes = -x.shape[2] % pages, section.rows - section.tokens, split_kv.padded_group(G) - G
            both.append(jnp.pad(x, ((0, 0), (0, 0), *((0, more) for more in axes))))
        return out, lse, tuple(both)

    return padded
