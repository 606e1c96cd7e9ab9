"""KV-cache policies: what a page holds, which pages a head reads, who owns the pages.

A policy is a module with `CAPABILITIES`, `host(config)` (its `HostPolicy`) and
`device(config, model, implementation)` (its `KVPolicy`).
"""

from paged.kv_cache import dense

POLICIES = {"vllm": dense}
