"""Decode over unified pages on Hopper: pages of each precision are a section of the kernel that
reads pages of few bits (paged_attention/quantized_sm90.py).

Each number of words of a token has a buffer of its own in shared memory, and there is no room for
those of 16-bit pages of head dim 128 beside those of two other precisions.
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from pallas_kernels.paged_attention import quantized_sm90, quantized_tiles, split_kv
from pallas_kernels.paged_attention.quantized_tiles import Section
from pallas_kernels.paged_attention.schedule import DecodeSchedule
from pallas_kernels.quantized_attention.pages import PageFormat
from pallas_kernels.quantized_attention.tables import Run


def sections_of(formats: Sequence[PageFormat], runs: Sequence[Run] = ()) -> list[Section]:
    """runs: where tables have the pages of each, for the kernel; what is planned needs none."""
    found = []
    for i, format in enumerate(formats):
        codes, scales, values, more_scales = (section.first for section in format.sections[:4])
        firsts = codes, scales, values, more_scales
        place = tuple(runs[i]) if runs else ()
        found.append(Section(format.keys, format.values, format.tokens, firsts, *place))
    return found


def refusal(q, words, K: int, formats: tuple[PageFormat, ...]) -> str | None:
    """Why the kernel cannot run these arguments with K KV heads, or None."""
    if any(format.key_group for format in formats):
        return "keys whose channels have scales by groups of tokens are not read by the kernel"
    if any(format.outliers for format in formats):
        return "outliers are not read by the kernel"
    return quantized_tiles.refusal(q, words, words, K, sections_of(formats))


def schedule_of(counts, formats: tuple[PageFormat, ...]) -> DecodeSchedule:
    return quantized_tiles.schedule_of(counts, sections_of(formats))


def decode(q, words, tables, counts, *, formats, runs, scale, soft_cap=None, schedule=None):
    out, lse, scores = quantized_sm90.decode(
        q, words, words, tables, counts, sections_of(formats, runs), scale=scale,
        soft_cap=soft_cap, schedule=schedule, returns_scores=True,
    )  # fmt: skip
    return out, lse, tuple(scores)


def with_its_shapes(run: Callable) -> Callable:
    """Another implementation, whose scores have the axes of this one's."""

    @functools.wraps(run)
    def padded(q, words, tables, counts, *, formats, **options):
        out, lse, scores = run(q, words, tables, counts, formats=formats, **options)
        sections, G = sections_of(formats), q.shape[1] // tables.shape[1]
        pages = quantized_tiles.pages_of_tile(sections)
        of_each = []
        for x, section in zip(scores, sections):
            axes = -x.shape[2] % pages, section.rows - section.tokens, split_kv.padded_group(G) - G
            of_each.append(jnp.pad(x, ((0, 0), (0, 0), *((0, more) for more in axes))))
        return out, lse, tuple(of_each)

    return padded
