"""Engine configurations of DiffKV's studies: the 16-bit reference, DiffKV, and its baselines."""

from collections.abc import Sequence
from typing import Any

from experiments.figures import accuracy
from experiments.lib.program import Options
from paged.config import EngineConfig

REFERENCE = "16 bits"
PAGE_SIZE = 16  # tokens of high precision
BUDGETED = {
    "H2O": {"prompt_rule": "h2o", "generation_rule": "h2o"},
    "SnapKV": {"prompt_rule": "snapkv", "generation_rule": "keep"},
}


def _config(options: Options, **fields: Any) -> EngineConfig:
    """Few sequences at once and one prompt a step: few programs to compile."""
    longest = accuracy.longest_of(options)
    common = {
        "page_size": PAGE_SIZE, "max_num_seqs": 8, "max_prefills_per_step": 1,
        "max_num_batched_tokens": longest, "kv_cache_tokens": 9 * longest,
        "chunked_prefill": False,
    }  # fmt: skip
    return accuracy.config_of(options, **common | fields)


def reference(options: Options) -> EngineConfig:
    """Pages of 16 bits (the paper's vLLM)."""
    return _config(options, kv_dtype="float16")


def policy(options: Options, **chosen: Any) -> EngineConfig:
    """Of these options of `--policy=diffkv`. Raises ValueError for what cannot work."""
    return _config(options, policy="diffkv", policy_options=chosen)


def three_levels(options: Options, alpha: Sequence[float]) -> EngineConfig:
    """16 bits, K8V4 and K4V2 (§7.2), with an alpha each. Pages take about the memory of DiffKV's:
    half as many tokens of a precision of which each takes twice as much."""
    chosen: dict[str, Any] = {"top": "K16V16"}
    chosen |= dict(zip(("alpha_top", "alpha_h", "alpha_l"), alpha, strict=True))
    return _config(options, policy="diffkv", policy_options=chosen, page_size=PAGE_SIZE // 2)


def uniform_options(name: str) -> dict[str, Any]:
    """All tokens in one format, as K8V4."""
    return {"high": name, "low": name, "alpha_h": 0.0, "alpha_l": 0.0}


def pruning_options(method: str, budget: float) -> dict[str, Any]:
    """Of `BUDGETED`: pruning to a share of the tokens, kept in 16 bits."""
    return uniform_options("K16V16") | BUDGETED[method] | {"budget": budget}


def uniform(options: Options, name: str) -> EngineConfig:
    return policy(options, **uniform_options(name))


def budgeted(options: Options, method: str, budget: float) -> EngineConfig:
    return policy(options, **pruning_options(method, budget))


def duo_attention(options: Options) -> EngineConfig:
    """A share of the KV heads streams, by the gates of --gates, all tokens in 16 bits."""
    all_pages = accuracy.longest_of(options) + PAGE_SIZE
    chosen = {"gates": accuracy.gates_of(options), "streaming_share": options.duo_share}
    return _lserve(options, **chosen, budget=all_pages)


def quest(options: Options) -> EngineConfig:
    """All tokens are kept, in 16 bits, and --quest_budget of them read by each query."""
    return _lserve(options, budget=options.quest_budget, logical_page=PAGE_SIZE, reuse=1)


def _lserve(options: Options, **chosen: Any) -> EngineConfig:
    return _config(options, policy="lserve", policy_options=chosen, kv_dtype="float16")


def alphas(options: Options) -> list[tuple[float, float]]:
    """(alpha_h, alpha_l) of --alphas, one at least. Raises ValueError for what is none."""
    pairs = _separated(options.alphas, 2)
    if not pairs:
        raise ValueError(f"--alphas must be pairs such as 1/0.02, not {options.alphas}")
    return [(high, low) for high, low in pairs]


def alphas_of_three(options: Options) -> list[tuple[float, ...]]:
    """(alpha_top, alpha_h, alpha_l) of --three_levels. Raises ValueError for what is none."""
    triples = _separated(options.three_levels, 3)
    if len(triples) < len(options.three_levels):
        raise ValueError(f"--three_levels must be such as 5/1/0, not {options.three_levels}")
    return triples


def _separated(given: Sequence[str], parts: int) -> list[tuple[float, ...]]:
    """Numbers between slashes; nothing if any is not of so many."""
    try:
        found = [tuple(float(x) for x in each.split("/")) for each in given]
    except ValueError:
        return []
    return found if all(len(each) == parts for each in found) else []


def numbers(options: Options, flag: str) -> list[float]:
    """Of a flag that is a list of shares. Raises ValueError for what is none."""
    given = getattr(options, flag)
    try:
        return [float(each) for each in given]
    except ValueError:
        raise ValueError(f"--{flag} must be numbers, not {given}") from None
