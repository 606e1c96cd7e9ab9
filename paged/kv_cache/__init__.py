"""KV-cache policies: what a page holds, which pages a head reads, who owns the pages.

A policy is a module, or an object like one, with `CAPABILITIES`, `host(config)` (its `HostPolicy`)
and `device(config, model, implementation)` (its `KVPolicy`).
"""

from typing import Any

from paged.kv_cache import dense, orca

POLICIES: dict[str, Any] = {
    "vllm": dense,
    "orca_max": orca.ORCA_MAX,
    "orca_pow2": orca.ORCA_POW2,
    "orca_oracle": orca.ORCA_ORACLE,
    "fastertransformer": orca.FASTERTRANSFORMER,
}
