"""Writing new tokens into pages, and copying pages (vLLM §5.1)."""

from pallas_kernels.kv_write.api import copy_pages, write_kv

__all__ = ["copy_pages", "write_kv"]
