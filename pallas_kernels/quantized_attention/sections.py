"""Tiles of quantised pages, and their layout in the decode kernel's shared memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.attention import schedule as schedules
from pallas_kernels.mosaic import pl
from pallas_kernels.quantization import KVFormat, QuantizedPages, registers
from pallas_kernels.quantized_attention.pages import PageFormat
from pallas_kernels.quantized_attention.tables import Run

STAGE_BYTES = 42 * 1024  # The most bytes of a tile; shared memory holds four: two of each lane.
MOST_GROUP = 8  # The most query heads per KV head.
CHUNK = 64  # Tokens that are unpacked at a time.
MOST_ROWS = 256  # The most rows of a tile.


@dataclass(frozen=True)
class Section:
    """The pages of one precision: their layout, and their columns in tables.

    keys, values: the formats of keys and of values.
    tokens: P.
    firsts: the first word in a page of the keys' codes, the keys' scales, the values' codes, and
        the values' scales.
    column: the table's column of the first page.
    step: 1 or -1, from the column of a page to the column of the next page.
    width: the most columns of this precision; 0 means all columns.
    """

    keys: KVFormat
    values: KVFormat
    tokens: int
    firsts: tuple[int, ...]
    column: int = 0
    step: int = 1
    width: int = 0

    @classmethod
    def of_page(cls, keys: KVFormat, values: KVFormat, page_size: int) -> "Section":
        """The section of separate pools of keys and values (quantization/format.py)."""
        of_keys, of_values = (page_size * format.code_words for format in (keys, values))
        return cls(keys, values, page_size, (0, of_keys, 0, of_values))

    @classmethod
    def of_format(cls, format: PageFormat, run: Run | tuple = ()) -> "Section":
        """The section of unified pages.

        run: the pages' columns in tables, which the kernel needs and a schedule does not.
        """
        firsts = tuple(section.first for section in format.sections[:4])
        return cls(format.keys, format.values, format.tokens, firsts, *run)

    @property
    def formats(self) -> tuple[KVFormat, KVFormat]:
        return self.keys, self.values

    @property
    def rows(self) -> int:
        """The rows of a page in a tile: P, rounded up to whole chunks."""
        return CHUNK * pl.cdiv(self.tokens, CHUNK)


def refusal(q, k_words, v_words, K: int, sections: Sequence[Section]) -> str | None:
    """Why the kernel cannot run queries [S, H, D] over pools [N, W], or None."""
    D, G = q.shape[-1], q.shape[1] // K
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries must be bfloat16 or float16, not {q.dtype}"
    if D not in (64, 128):
        return f"head dim must be 64 or 128, not {D}"
    if G > MOST_GROUP:
        return f"at most {MOST_GROUP} query heads may share a KV head, not {G}"
    for section in sections:
        for words, format in zip((k_words, v_words), section.formats):
            if reason := registers.refusal(format, q.dtype):
                return reason
            C, W = format.code_words, words.shape[1]
            if W % C or W % 4:
                return f"pages of {W} words must be whole tokens of {C}"
    if not _fits(sections, 1):
        *others, last = (f"{section.tokens} tokens" for section in sections)
        sizes = f"{', '.join(others)} and {last}" if others else last
        return f"pages of {sizes} do not fit shared memory"
    return None


def refusal_of_pages(q, k_pages: QuantizedPages, v_pages: QuantizedPages, K: int) -> str | None:
    section = Section.of_page(k_pages.format, v_pages.format, k_pages.page_size)
    return refusal(q, k_pages.words, v_pages.words, K, [section])


def refusal_of_formats(q, words, K: int, formats: tuple[PageFormat, ...]) -> str | None:
    if any(format.key_group for format in formats):
        return "keys whose channels have scales by groups of tokens are not read by the kernel"
    if any(format.outliers for format in formats):
        return "outliers are not read by the kernel"
    return refusal(q, words, words, K, [Section.of_format(format) for format in formats])


def pages_of_tile(sections: Sequence[Section]) -> int:
    """The number of pages of a tile. It is the same for all precisions, because all pages have the
    same size."""
    return max((pages for pages in (1, 2, 4) if _fits(sections, pages)), default=1)


def _fits(sections: Sequence[Section], pages: int) -> bool:
    rows = pages * max(section.rows for section in sections)
    words = sum(C * count for C, count in buffers(sections, pages)[0]) + 2 * rows
    return rows <= MOST_ROWS and 4 * words <= STAGE_BYTES


def schedule_of(
    counts, sections: Sequence[Section], sliding_window: int | None = None
) -> schedules.DecodeSchedule:
    """The schedule of decode.

    counts: [S, K] tokens, one array per precision.
    """
    pages = pages_of_tile(sections)
    tiles = [pages * section.tokens for section in sections]
    return schedules.decode_schedule(counts, tiles, sliding_window)


def views_of(pools, sections):
    """Views [N, rows, C] of the pools, and each view's index in `(*pools, *views)`, by (pool, C).

    C is the number of words of a token's codes. Pages are a separate axis, because a large pool has
    more rows than int32 can number.
    """
    views: list[jnp.ndarray] = []
    places: dict[tuple[int, int], int] = {}
    for section in sections:
        for which, format in enumerate(section.formats):
            if (which, format.code_words) not in places:
                places[which, format.code_words] = 2 + len(views)
                pages, words = pools[which].shape
                C = format.code_words
                views.append(pools[which].reshape(pages, words // C, C))
    return views, places


def buffers(sections, pages: int) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """The buffers in shared memory for the codes of a tile. Precisions share buffers, because a
    slot holds a tile of one precision at a time.

    Returns (words of a row, rows) of each buffer, and for each precision the index of the keys'
    buffer and the index of the values' buffer.
    """
    sizes: list[tuple[int, int]] = []
    taken_by = []
    for section in sections:
        count, taken = pages * section.rows, []
        for format in section.formats:
            C = format.code_words
            free = [i for i, (width, _) in enumerate(sizes) if width == C and i not in taken]
            if not free:
                free = [len(sizes)]
                sizes.append((C, count))
            sizes[free[0]] = C, max(count, sizes[free[0]][1])
            taken.append(free[0])
        taken_by.append(taken)
    return sizes, taken_by


def rows_copied_together(sections, taken_by, pools) -> list[int]:
    """For each buffer of `buffers` the number of rows of its swizzled tiles, at most 8. The number
    divides the index of the first row of a page's codes, the tokens of a page, and the rows of a
    page. Otherwise a copy would cut a swizzled tile."""
    found: dict[int, int] = {}
    for section, taken in zip(sections, taken_by, strict=True):
        for which, (buffer, format) in enumerate(zip(taken, section.formats)):
            C, first = format.code_words, section.firsts[2 * which]
            rows = first // C, section.tokens, pools[which].shape[1] // C
            found[buffer] = math.gcd(found.get(buffer, 8), *rows)
    return [found[buffer] for buffer in sorted(found)]
