"""KV-cache policies: what a page holds, which pages a head reads, who owns the pages."""

from paged.kv_cache import dense, diffkv, lserve, orca
from paged.kv_cache.policy import Policy

POLICIES: dict[str, Policy] = {
    "vllm": dense.VLLM,
    "lserve": lserve.LSERVE,
    "diffkv": diffkv.DIFFKV,
    "orca_max": orca.ORCA_MAX,
    "orca_pow2": orca.ORCA_POW2,
    "orca_oracle": orca.ORCA_ORACLE,
    "fastertransformer": orca.FASTERTRANSFORMER,
}
