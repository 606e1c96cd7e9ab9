"""The modules that an adapter adapts, by PEFT's rules for adapter_config.json (`LoraConfig`)."""

import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import regex

from models.hf_fields import HfConfig, finite, flag, integer

MATCHING_S = 5.0  # seconds that all matches of a configuration may take
# The largest product of all repetition counts in an expression, because `regex` expands repeats.
MOST_REPEATS = 100_000

# Fields without effect on a trained adapter. fan_in_fan_out only describes the layout of the base
# weights, and PEFT itself corrects wrong values.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "megatron_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip
_READ = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "task_type", "use_rslora",
}  # fmt: skip
# Fields of which only some values are supported, and these values.
_ONLY: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # Other values change the base weights too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class Adapted:
    """Rank and scale of a module's adapter."""

    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """The factor of BA. The rank must have been checked against the tensors' shapes before,
        because the configuration may have any integer as rank."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class _Expressions:
    """The regular expressions of a configuration. All matches together may take MATCHING_S seconds,
    because some expressions take exponential time to match."""

    def __init__(self):
        self._end_s = time.monotonic() + MATCHING_S

    def compiled(self, field: str, given: str, pattern: str) -> regex.Pattern:
        """The compiled `pattern`. given: the text in the configuration's `field`."""
        try:
            re.compile(pattern)  # Only to validate, as PEFT does: `re` has no timeout.
            counts = (map(int, re.findall(r"\d+", each)) for each in re.findall(r"{[\d,]+}", given))
            if extended := re.search(r"{(?!\d*,?\d*})|\[\[:", pattern):
                raise re.error(
                    f"{extended[0]!r} has another meaning in the package regex, which matches here"
                )
            if math.prod(max([1, *pair]) for pair in counts) > MOST_REPEATS:
                raise re.error(f"it repeats too much: at most {MOST_REPEATS} times in all")
            return regex.compile(pattern)
        # OverflowError, ValueError: a large repetition. RecursionError: nested parentheses.
        except (re.error, regex.error, OverflowError, ValueError, RecursionError) as error:
            text = f"{given!r:.200}"
            raise ValueError(f"{field} {text} is no regular expression: {error}") from None

    def match(
        self, expression: regex.Pattern, name: str, whole: bool = False
    ) -> regex.Match | None:
        """The match with the beginning of a module's name, or with the whole name if `whole`."""
        match = expression.fullmatch if whole else expression.match
        try:
            return match(name, timeout=max(1e-3, self._end_s - time.monotonic()))
        except TimeoutError:
            raise ValueError(
                f"its regular expressions take more than {MATCHING_S:g} seconds; the last one: "
                f"{expression.pattern!r:.200} for {name}"
            ) from None


def adapted_modules(hf: HfConfig, modules: Collection[str], others: set[str]) -> dict[str, Adapted]:
    """The adapted modules of a configuration, with their ranks and scales, by PEFT's names.

    hf: the fields of adapter_config.json.
    modules: PEFT's names of all modules that can be adapted.
    others: PEFT's names of the model's other matrices.
    Raises ValueError, naming the field, for settings that are not supported.
    """
    for field, allowed in _ONLY.items():
        if not any(hf.get(field) is value or hf.get(field) == value for value in allowed):
            raise ValueError(f"{field} {hf.get(field)!r:.60} is not supported; allowed: {allowed}")
    for field in sorted(hf.keys() - _IGNORED - _READ):
        if hf[field]:
            raise ValueError(f"{field} {hf[field]!r:.60} is not supported")
    expressions = _Expressions()

    def of_modules[T](field: str, read: Callable[[HfConfig, str], T]) -> Callable[[str, T], T]:
        """A function (module's name, default) -> the module's value in `field`. The field maps
        regular expressions for suffixes of names to numbers. The first match is used."""
        given = hf.get(field) or {}
        if not isinstance(given, dict):
            raise ValueError(f"{field} must map names to numbers, not {given!r:.60}")
        ends = {key: expressions.compiled(field, key, rf"(.*\.)?({key})$") for key in given}
        try:
            values = {end: read(given, key) for key, end in ends.items()}
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from None

        def value(name: str, default: T) -> T:
            found = (v for end, v in values.items() if expressions.match(end, name))
            return next(found, default)

        return value

    rank, alpha = integer(hf, "r"), finite(hf, "lora_alpha")
    rank_of, alpha_of = of_modules("rank_pattern", integer), of_modules("alpha_pattern", finite)
    rslora = flag(hf, "use_rslora", False)
    adapted = {}
    for name in _targets(hf, modules, others, expressions):
        r, a = rank_of(name, rank), alpha_of(name, alpha)
        if r < 1:
            raise ValueError(f"r and rank_pattern must be at least 1, not {r} ({name})")
        adapted[name] = Adapted(r, a, rslora)
    return adapted


def _targets(
    hf: HfConfig, modules: Collection[str], others: set[str], expressions: _Expressions
) -> list[str]:
    """The modules of target_modules that are not in exclude_modules and that are in
    layers_to_transform."""
    field, target = "target_modules", hf.get("target_modules")
    allowed = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    in_layers = _layers(hf, expressions)
    all_linear = isinstance(target, str) and target.lower() == "all-linear"
    targeted: list[str] = []
    # A string is one regular expression.
    for one in [target] if isinstance(target, str) else _names(field, target):
        means = _meaning(field, target, one, expressions)
        if all_linear:
            found, wrong = list(modules), []
        else:
            found, wrong = list(filter(means, modules)), sorted(filter(means, others))
        if wrong or not found:
            what = f"names {wrong[0]}, which is" if wrong else "is"
            raise ValueError(f"{field} {one!r} {what} no projection of a layer; allowed: {allowed}")
        # layers_to_transform does not apply to a full name, which already names the layer.
        targeted += [name for name in found if name == one or in_layers(name)]
    excluded = hf.get("exclude_modules") or []
    for one in [excluded] if isinstance(excluded, str) else _names("exclude_modules", excluded):
        means = _meaning("exclude_modules", excluded, one, expressions)
        targeted = [name for name in targeted if not means(name)]
    if not targeted:
        raise ValueError(f"{field}, exclude_modules and layers_to_transform leave nothing to adapt")
    return sorted(set(targeted))


def _layers(hf: HfConfig, expressions: _Expressions) -> Callable[[str], bool]:
    """A predicate on full module names: whether the module's layer is in layers_to_transform.

    The layer is the number after a match of layers_pattern. Without a pattern it is the first
    number in the name.
    """
    layers, patterns = hf.get("layers_to_transform"), hf.get("layers_pattern")
    if isinstance(hf.get("target_modules"), str) and not layers is patterns is None:
        raise ValueError(
            "layers_to_transform and layers_pattern go with a list of target_modules, not with a "
            "regular expression"
        )
    if patterns and layers is None:
        raise ValueError(f"layers_pattern {patterns!r:.60} needs layers_to_transform")
    if layers is None or layers == []:
        return lambda name: True
    numbers = layers if isinstance(layers, list) else [layers]
    patterns = [patterns] if isinstance(patterns, str) else patterns or []
    given = {each: rf"(?:^|.*?\.){each}" for each in _names("layers_pattern", patterns) if each}
    before = given or {"": r".*?\.[^.]*"}
    numbered = [
        expressions.compiled("layers_pattern", each, rf"{pattern}\.(?P<idx>\d+)\.")
        for each, pattern in before.items()
    ]

    def in_layers(name: str) -> bool:
        matches = (expressions.match(each, name) for each in numbered)
        found = next(filter(None, matches), None)
        return found is not None and int(found["idx"]) in numbers

    return in_layers


def _names(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{field} must be a text or a list of texts, not {value!r:.60}")
    return value


def _meaning(
    field: str, given: Any, one: str, expressions: _Expressions
) -> Callable[[str], bool]:  # fmt: skip
    """A predicate on full module names: whether `one` selects the module.

    given: the field's value. If it is a list, `one` is a suffix of names. If it is a string, `one`
        is a regular expression for whole names.
    """
    if isinstance(given, str):
        whole = expressions.compiled(field, one, one)
        return lambda name: expressions.match(whole, name, whole=True) is not None
    return lambda name: name == one or name.endswith(f".{one}")
