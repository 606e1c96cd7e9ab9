"""KV-cache policies: what a page holds, which pages a head reads, who owns the pages."""

from paged.kv_cache.dense import DenseHost, DensePolicy
from paged.kv_cache.policy import Capabilities, HostPolicy, KVPolicy, Usage

POLICIES = {"vllm": (DensePolicy, DenseHost)}

__all__ = [
    "POLICIES",
    "Capabilities",
    "DenseHost",
    "DensePolicy",
    "HostPolicy",
    "KVPolicy",
    "Usage",
]
