"""Engine configurations of DiffKV's studies: the 16-bit reference, DiffKV, and its baselines."""

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


def uniform(options: Options, name: str) -> EngineConfig:
    """All tokens in one format, as K8V4."""
    return policy(options, high=name, low=name, alpha_h=0.0, alpha_l=0.0)


def budgeted(options: Options, method: str, budget: float) -> EngineConfig:
    """Of `BUDGETED`: pruning to a share of the tokens, kept in 16 bits."""
    bits = {"high": "K16V16", "low": "K16V16", "alpha_h": 0.0, "alpha_l": 0.0}
    return policy(options, **bits, **BUDGETED[method], budget=budget)


def alphas(options: Options) -> list[tuple[float, float]]:
    """(alpha_h, alpha_l) of --alphas. Raises ValueError for what is none."""
    try:
        pairs = [tuple(float(x) for x in each.split("/")) for each in options.alphas]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"--alphas must be pairs such as 1/0.02, not {options.alphas}")
    return [(high, low) for high, low in pairs]


def numbers(options: Options, flag: str) -> list[float]:
    """Of a flag that is a list of shares. Raises ValueError for what is none."""
    given = getattr(options, flag)
    try:
        return [float(each) for each in given]
    except ValueError:
        raise ValueError(f"--{flag} must be numbers, not {given}") from None
