"""The options of DiffKV's policy, and their checks."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from models.config import ModelConfig
from paged import checks
from paged.checks import described
from paged.kv_cache.diffkv.compression import Rules
from paged.kv_cache.diffkv.keeps import Residual
from paged.kv_cache.diffkv.page_selector import TopPages
from paged.kv_cache.gates import GatedOptions
from paged.kv_cache.lserve.options import MIN_SELECTED
from paged.kv_cache.made_for import made_for, read
from pallas_kernels.prompt_attention import QUERY_TILE
from pallas_kernels.quantization import KVFormat
from pallas_kernels.quantized_attention import PageFormat, parse_format

AUTO = "auto"  # page format of keys and values in kv_dtype
Thresholds = tuple[float, ...]  # alpha_h and alpha_l


def read_thresholds(path: str, weights_hash: Callable[[], str]) -> Thresholds:
    """(alpha_h, alpha_l) of a file. weights_hash: returns the SHA-256 of the served weights.

    Raises ValueError, with the path, if the file has no thresholds, or is for other weights.
    """

    def parse(text: str) -> Thresholds:
        both = made_for(json.loads(text), weights_hash, "alpha_h", "alpha_l")
        if not all(checks.is_real(alpha) for alpha in both):
            raise ValueError(f"alpha_h and alpha_l must be numbers, not {checks.shown(both)}")
        if not 0 <= both[1] <= both[0]:
            raise ValueError(f"alpha_l must be from 0 to alpha_h, not {both[1]} of {both[0]}")
        return tuple(float(alpha) for alpha in both)

    return read(path, parse)


class Level(NamedTuple):
    """A precision: its name, its page format, and the alpha of its threshold."""

    name: str
    format: str
    alpha: float


@dataclass(frozen=True)
class Options(GatedOptions):
    """Fields carry their help texts. Fields that DiffKV's paper describes have its values as
    defaults; alpha is for Llama3-8B.

    Raises ValueError as `GatedOptions` does, and for thresholds that are not a pair.
    """

    alpha_h: float = described(
        1.0,
        "a token stays in high precision if its significance is at least alpha_h / N. N: tokens of "
        "the sequence; in prompts, under prompt_rule paper, those up to the token",
        least=0,
    )
    alpha_l: float = described(
        0.02, "a token is dropped if its significance is below alpha_l / N, with N as for alpha_h"
    )
    high: str = described("K8V4", f"page format of high precision; {AUTO!r} keeps kv_dtype")
    low: str = described("K4V2", f"page format of low precision; {AUTO!r} keeps kv_dtype")
    top: str = described(
        "",
        "page format of a third precision above high, such as K16V16, in which new tokens are "
        f"written; {AUTO!r} keeps kv_dtype. Empty: two precisions",
    )
    alpha_top: float = described(
        5.0,
        "a token stays in the third precision if its significance is at least alpha_top / N, "
        "with N as for alpha_h",
        least=0,
    )
    groups: int = described(
        1,
        "scales of a token's keys, and of its values, each for D / groups channels",
        least=1,
    )
    window: int = described(
        64,
        "last tokens of a sequence, which stay in the highest precision. Under h2o the window is "
        "half of the budget; under kivi it is the residual, in the format `high`",
        least=2,
        below=2**31,
    )
    prompt_rule: Literal["paper", "repository", "h2o", "snapkv", "kivi"] = described(
        "paper",
        "queries whose attention makes a prompt token's significance. paper: all later queries; "
        "repository: the prompt's last 64; h2o: all later queries and its own; snapkv: the "
        "window's; kivi: none",
    )
    generation_rule: Literal["paper", "repository", "h2o", "keep", "kivi"] = described(
        "paper",
        "token that may be moved down or dropped when a token is added. paper: the candidate, then "
        "a victim (Algorithm 1); repository: the least significant; h2o: the least significant, "
        "above the budget; keep: none; kivi: the oldest of the window, to low precision",
    )
    key_group: int = described(
        0,
        "tokens whose keys in low precision share a scale for each channel, as in KIVI (32 in its "
        "paper); `groups` is then of values alone. 0: scales are by token",
        least=0,
        below=2**31,
    )
    outliers: int = described(
        0,
        "elements of a token's keys, and as many of its values, that are kept in 16 bits (QAQ)",
        least=0,
        below=2**15,
    )
    budget: float = described(
        0.0,
        "tokens with the largest scores that a head keeps of a prompt (h2o: of the sequence). A "
        "value up to 1 is a share of the tokens; 0: alpha decides instead",
        least=0,
    )
    sink: int = described(
        128,
        "first tokens that streaming heads keep, in the highest precision",
        least=0,
        below=2**30,
    )
    local: int = described(
        256, "last tokens that streaming heads keep, in the highest precision", least=1, below=2**30
    )
    read_pages: int = described(
        0, "pages that a generated token reads in each dense head, of all precisions; 0 for all"
    )
    logical_page: int = described(
        16, "tokens whose keys share the extremes that select pages", least=1, below=2**31
    )
    prompt_tile: int = described(
        QUERY_TILE,
        "queries of a prompt whose scores are added at once: its chunks end at multiples of it",
        least=1,
        below=2**20,
    )
    pins: int = described(
        0,
        "prefixes that pin_prefix keeps unquantised, each with room for max_model_len tokens; "
        "prompts reuse the whole prompt_tiles before a prefix's last two tokens",
        least=0,
        below=2**15,
    )
    thresholds: Thresholds = field(
        default=(),
        metadata={
            "help": "file of alpha_h and alpha_l that experiments.papers.diffkv.fig10_thresholds "
            "wrote for the model; it overrides these two options",
            "read": read_thresholds,
        },
    )

    def __post_init__(self):
        super().__post_init__()
        # An event log restores a tuple as a list.
        if not isinstance(self.thresholds, list | tuple) or len(self.thresholds) not in (0, 2):
            raise checks.refusal("thresholds", "alpha_h and alpha_l, or ()", self.thresholds)
        for name, value in zip(("alpha_h", "alpha_l"), self.thresholds):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "thresholds", ())

    @property
    def rules(self) -> Rules:
        return Rules(self.window, self.prompt_rule, self.generation_rule, self.budget > 0)

    @property
    def residual(self) -> Residual | None:
        """KIVI's residual. None if precision does not depend on age alone."""
        return Residual(self.window, self.key_group) if self.key_group else None

    @property
    def levels(self) -> tuple[Level, ...]:
        """Two or three precisions, the highest first. For KIVI, alpha states that every token
        outside the window moves down, and that none is dropped; `Residual` does not read it."""
        alpha = (math.inf, 0.0) if self.residual else (self.alpha_h, self.alpha_l)
        lower = Level("high", self.high, alpha[0]), Level("low", self.low, alpha[1])
        return (Level("top", self.top, self.alpha_top), *lower) if self.top else lower

    def formats(self, page_size: int, head_dim: int, dtype: str) -> tuple[PageFormat, ...]:
        """The page format of each precision. All pages have one size (DiffKV §5.2), and hold
        `page_size` tokens of the highest precision or more of a lower one. dtype: dtype of
        unquantised keys and values.

        Raises ValueError for formats that cannot work with this head dim, or with each other.
        """
        floats = "float16" if dtype == "float32" else dtype
        as_they_are = "K32V32" if dtype == "float32" else "K16V16"
        names = [as_they_are if level.format == AUTO else level.format for level in self.levels]
        key_groups = [0] * (len(names) - 1) + [self.key_group]
        parsed = [
            _parsed(level.name, name, head_dim, floats, self.groups, of_level)
            for level, name, of_level in zip(self.levels, names, key_groups)
        ]
        if self.outliers > head_dim // 2:
            raise ValueError(
                f"outliers ({self.outliers}) must be at most half of the head dim ({head_dim})"
            )
        scored = self.residual is None
        words = PageFormat.holding(page_size, *parsed[0], scored, self.outliers).words
        formats = tuple(
            PageFormat(*both, words, of_level, scored, self.outliers)
            for both, of_level in zip(parsed, key_groups)
        )
        for higher, lower in itertools.pairwise(zip(self.levels, formats)):
            (above, of_above), (level, of_level) = higher, lower
            if of_level.tokens < of_above.tokens:
                raise ValueError(
                    f"{level.name} ({level.format}) must take no more memory than {above.name} "
                    f"({above.format}): a page holds {of_above.tokens} tokens of {above.format}, "
                    f"{of_level.tokens} of {level.format}"
                )
        return formats

    @property
    def reads(self) -> TopPages | None:
        """Page selection of generated tokens. None if they read all pages."""
        return TopPages(self.read_pages, self.logical_page) if self.read_pages else None

    @property
    def keeps_all(self) -> bool:
        """Whether every token stays in the precision in which it was written."""
        nothing_moves = self.budget == 0 == max(level.alpha for level in self.levels)
        return nothing_moves and not self.streaming_share


def _parsed(level: str, *of_format) -> tuple[KVFormat, KVFormat]:
    """See `parse_format`. Errors name the option `level`."""
    try:
        return parse_format(*of_format)
    except ValueError as error:
        raise ValueError(f"{level}: {error}; {AUTO!r} keeps kv_dtype") from None


def check_options(options: Options, model: ModelConfig | None) -> None:
    """Raises ValueError for options that cannot work, alone or with the model."""
    checks.require_bounds(options)
    checks.require(options, {
        "alpha_l": (
            0 <= options.alpha_l <= options.alpha_h, f"from 0 to alpha_h ({options.alpha_h})"
        ),
        "alpha_top": (
            not options.top or options.alpha_top >= options.alpha_h,
            f"at least alpha_h ({options.alpha_h})",
        ),
        "read_pages": (
            options.read_pages == 0 or MIN_SELECTED <= options.read_pages < 2**31,
            f"0, or at least {MIN_SELECTED} and below 2^31",
        ),
    })  # fmt: skip
    by_budget = options.prompt_rule in ("h2o", "snapkv"), options.generation_rule in ("h2o", "keep")
    if options.budget and not by_budget[1]:
        raise ValueError(
            f"a budget ({options.budget}) needs generation_rule h2o or keep, not "
            f"{options.generation_rule}"
        )
    if options.budget and options.top:
        raise ValueError(
            f"a budget ({options.budget}) keeps tokens in high precision: top ({options.top}) has "
            "no meaning"
        )
    if not options.budget and (by_budget[0] or options.generation_rule == "h2o"):
        raise ValueError("h2o and snapkv need a budget above 0")
    if {"kivi"} & {options.prompt_rule, options.generation_rule} or options.key_group:
        _check_kivi(options)
    for level in options.levels:
        if level.format != AUTO:
            _parsed(level.name, level.format, 32 * options.groups, "float16", options.groups)
    if model is None:
        return
    options.check_gates(model)
    if options.residual and model.sliding_window is not None:
        raise ValueError("KIVI serves no model with a sliding window: its pages store no positions")


def _check_kivi(options: Options) -> None:
    """Raises ValueError if an option of KIVI is missing, or if another method's option is set."""
    rules = options.prompt_rule, options.generation_rule
    if rules != ("kivi", "kivi") or not options.key_group:
        raise ValueError(
            "KIVI needs prompt_rule=kivi, generation_rule=kivi and a key_group above 0, not "
            f"{', '.join(rules)} and {options.key_group}"
        )
    if options.window % options.key_group:
        raise ValueError(
            f"window ({options.window}) must be whole groups of key_group ({options.key_group})"
        )
    others = {
        "top": options.top, "budget": options.budget, "read_pages": options.read_pages,
        "streaming_share": options.streaming_share, "outliers": options.outliers,
    }  # fmt: skip
    if given := [f"{name} ({value})" for name, value in others.items() if value]:
        raise ValueError(f"KIVI keeps and reads all tokens in all heads: unset {given[0]}")
