"""The options of DiffKV's policy, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from models.config import ModelConfig
from paged import checks
from paged.checks import described
from paged.kv_cache.diffkv.compression import Rules
from paged.kv_cache.made_for import made_for
from pallas_kernels.quantized_attention import PageFormat, parse_format

Thresholds = tuple[float, ...]  # alpha_h and alpha_l
AUTO = "auto"  # a page format: keys and values in kv_dtype


def read_thresholds(path: str, weights_hash: Callable[[], str]) -> Thresholds:
    """Those in a file. weights_hash: gives the SHA-256 of the weights that they are to serve.

    Raises ValueError, naming the file, if it holds none, or those of other weights.
    """
    try:
        stored = json.loads(Path(path).read_text())
        both = made_for(stored, weights_hash, "alpha_h", "alpha_l")
        if not all(checks.is_real(alpha) for alpha in both):
            raise ValueError(f"alpha_h and alpha_l must be numbers, not {both}")
        return tuple(float(alpha) for alpha in both)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


@dataclass(frozen=True)
class Options:
    """Each field says what it is. The defaults are the paper's, alpha those of Llama3-8B."""

    alpha_h: float = described(
        1.0,
        "a token stays in high precision if its significance is at least this over their number",
    )
    alpha_l: float = described(
        0.02, "a token is dropped if its significance is below this over their number"
    )
    high: str = described("K8V4", f"page format of high precision; {AUTO!r} keeps kv_dtype")
    low: str = described("K4V2", f"page format of low precision; {AUTO!r} keeps kv_dtype")
    groups: int = described(1, "parts of a token's keys that have a scale each; values alike")
    window: int = described(
        64, "last tokens of a sequence, which stay in high precision; h2o's are half of its budget"
    )
    prompt_rule: Literal["paper", "repository", "h2o", "snapkv"] = described(
        "paper",
        "whose scores count for a prompt's tokens: all later tokens' (paper; h2o: and their own), "
        "the last 64 queries' (repository) or the window's (snapkv)",
    )
    generation_rule: Literal["paper", "repository", "h2o", "keep"] = described(
        "paper",
        "who may leave as a token comes: the candidate first (paper, Algorithm 1), the least "
        "significant token (repository, and h2o beyond the budget) or nobody (keep)",
    )
    budget: float = described(
        0.0,
        "tokens that a head keeps of a prompt, those of the largest scores, and h2o at all; up to "
        "1 a share of them. Alpha decides if it is 0, and else has no meaning",
    )
    thresholds: Thresholds = field(
        default=(),
        metadata={
            "help": "file of alpha_h and alpha_l that experiments.train.calibrate_diffkv has found "
            "for the model; those given beside it have no meaning",
            "read": read_thresholds,
        },
    )

    def __post_init__(self):
        for name, value in zip(("alpha_h", "alpha_l"), self.thresholds):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "thresholds", ())

    @property
    def rules(self) -> Rules:
        return Rules(self.window, self.prompt_rule, self.generation_rule, self.budget > 0)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing that is written is ever changed or dropped."""
        return self.alpha_h == self.alpha_l == self.budget == 0


def page_formats(
    options: Options, page_size: int, head_dim: int, dtype: str
) -> tuple[PageFormat, PageFormat]:
    """Of high and of low precision; a page holds `page_size` tokens of high precision. dtype: that
    of keys and values where they are kept as they are.

    Raises ValueError for formats that cannot work with this head dim or together.
    """
    floats = "float16" if dtype == "float32" else dtype
    as_they_are = "K32V32" if dtype == "float32" else "K16V16"
    high, low = (
        parse_format(as_they_are if name == AUTO else name, head_dim, floats, options.groups)
        for name in (options.high, options.low)
    )
    first = PageFormat.holding(page_size, *high)
    formats = first, PageFormat(*low, words=first.words)
    if formats[1].tokens < page_size:
        raise ValueError(
            f"low ({options.low}) must take no more memory than high ({options.high}): a page of "
            f"{page_size} tokens of that holds {formats[1].tokens} of the other"
        )
    return formats


def check_options(options: Options, model: ModelConfig | None) -> None:
    """Raises ValueError for options that cannot work, alone or with the model."""
    checks.require(options, {
        "alpha_h": (options.alpha_h >= 0, "at least 0"),
        "alpha_l": (
            0 <= options.alpha_l <= options.alpha_h, f"from 0 to alpha_h ({options.alpha_h})"
        ),
        "groups": (options.groups >= 1, "at least 1"),
        "budget": (options.budget >= 0, "at least 0"),
        "window": (2 <= options.window < 2**31, "at least 2, so that later tokens have scored"),
    })  # fmt: skip
    by_budget = options.prompt_rule in ("h2o", "snapkv"), options.generation_rule in ("h2o", "keep")
    if options.budget and not by_budget[1]:
        raise ValueError(
            f"a budget ({options.budget}) needs generation_rule h2o or keep, not "
            f"{options.generation_rule}"
        )
    if not options.budget and (by_budget[0] or options.generation_rule == "h2o"):
        raise ValueError("h2o and snapkv need a budget above 0")
    for name in (options.high, options.low):
        if name != AUTO:
            parse_format(name, 32 * options.groups, "float16", options.groups)
    if model is not None and model.sliding_window is not None:
        raise ValueError("policy 'diffkv' keeps no windows: the model's cannot be served")
