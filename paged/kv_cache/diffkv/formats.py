"""Formats of unified pages (DiffKV §5.1). All pages have one size. Pages of lower precision hold
more tokens."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels.quantized_attention import PageFormat, parse_format

AUTO = "auto"  # page format of keys and values in kv_dtype


class Level(NamedTuple):
    """A precision: its name, its page format, and the alpha of its threshold."""

    name: str
    format: str
    alpha: float


def page_formats(
    levels: Sequence[Level], page_size: int, head_dim: int, dtype: str, *, groups: int = 1,
    key_group: int = 0, outliers: int = 0, scored: bool = True,
) -> tuple[PageFormat, ...]:  # fmt: skip
    """The page format of each precision. A page holds `page_size` tokens of the highest precision.

    dtype: dtype of unquantised keys and values.
    groups, key_group, outliers: see `Options`.
    scored: whether pages store scores and positions.

    Raises ValueError for formats that cannot work with this head dim, or with each other.
    """
    floats = "float16" if dtype == "float32" else dtype
    as_they_are = "K32V32" if dtype == "float32" else "K16V16"
    names = [as_they_are if level.format == AUTO else level.format for level in levels]
    key_groups = [0] * (len(names) - 1) + [key_group]
    parsed = [
        parse_format(name, head_dim, floats, groups, of_level)
        for name, of_level in zip(names, key_groups)
    ]
    if outliers > head_dim // 2:
        raise ValueError(f"outliers ({outliers}) must be at most half of the head dim ({head_dim})")
    words = PageFormat.holding(page_size, *parsed[0], scored, outliers).words
    formats = tuple(
        PageFormat(*both, words, of_level, scored, outliers)
        for both, of_level in zip(parsed, key_groups)
    )
    for higher, lower in itertools.pairwise(zip(levels, formats)):
        (above, of_above), (level, of_level) = higher, lower
        if of_level.tokens < of_above.tokens:
            raise ValueError(
                f"{level.name} ({level.format}) must take no more memory than {above.name} "
                f"({above.format}): a page of {of_above.tokens} tokens of that holds "
                f"{of_level.tokens} of the other"
            )
    return formats
