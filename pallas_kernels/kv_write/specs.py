"""Cases of the KV write and the page copy, by name."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import api
from pallas_kernels.kv_write.api import copy_pages, write_kv
from pallas_kernels.specs import HEADS, Cost, Heads, Op, Spec


def write(
    heads: Heads, tokens: int, *, num_pages: int = 65536, page_size: int = 16, dtype="bfloat16"
) -> Spec:
    """A KV write. Tokens have distinct random slots in the pools. The last token is padding."""

    def arguments(key):
        keys = jax.random.split(key, 5)
        pool, new = (num_pages, page_size, heads.D), (tokens, heads.K, heads.D)
        places = jax.random.permutation(keys[4], num_pages * page_size)[: tokens * heads.K]
        slots = places.reshape(tokens, heads.K).astype(jnp.int32)
        return {
            "k_pages_NxPxD": jax.random.normal(keys[0], pool, dtype),
            "v_pages_NxPxD": jax.random.normal(keys[1], pool, dtype),
            "k_TxKxD": jax.random.normal(keys[2], new, dtype),
            "v_TxKxD": jax.random.normal(keys[3], new, dtype),
            "slot_mapping_TxK": slots.at[-1].add(num_pages * page_size),
        }

    def cost(arguments) -> Cost:
        return Cost(bytes=2 * 2 * (tokens - 1) * heads.K * heads.D * jnp.dtype(dtype).itemsize)

    return Spec(
        write_kv, arguments, cost, donated=("k_pages_NxPxD", "v_pages_NxPxD"),
        most_pages=(2**31 - 1) // page_size,
    )  # fmt: skip


def copy(D: int, pairs: int, *, num_pages: int = 65536, page_size: int = 16) -> Spec:
    """A copy of random pages to other random pages. The last pair is padding."""

    def arguments(key):
        keys = jax.random.split(key, 2)
        pages = jax.random.permutation(keys[1], num_pages)[: 2 * pairs].astype(jnp.int32)
        return {
            "pages_NxPxD": jax.random.normal(keys[0], (num_pages, page_size, D), jnp.bfloat16),
            "sources_C": pages[:pairs],
            "destinations_C": pages[pairs:].at[-1].set(num_pages),
        }

    def cost(arguments) -> Cost:
        return Cost(bytes=2 * (pairs - 1) * page_size * D * jnp.dtype(jnp.bfloat16).itemsize)

    return Spec(copy_pages, arguments, cost, donated=("pages_NxPxD",))


_LLAMA = HEADS["llama-3-8b"]
_WRITES = {
    "llama-3-8b-decode": write(_LLAMA, 64),
    "llama-3-8b-prefill": write(_LLAMA, 2048),
    "llama-2-13b-decode": write(HEADS["llama-2-13b"], 64),
    "bundled-decode": write(HEADS["bundled"], 64, dtype="float16"),
}
_COPIES = {"page16": copy(128, 8192), "page128": copy(128, 1024, num_pages=8192, page_size=128)}
_FEW_WRITES = {
    "small": write(Heads(8, 4, 64), 9, num_pages=12),
    "dim128": write(Heads(8, 2), 7, num_pages=5, dtype="float16"),
}
_FEW_COPIES = {"small": copy(64, 4, num_pages=20)}
WRITE = Op(
    api.WRITE, _WRITES, lambda small: _FEW_WRITES if small else _WRITES, kernels=("write_kv",)
)
COPY = Op(
    api.COPY, _COPIES, lambda small: _FEW_COPIES if small else _COPIES, kernels=("copy_pages",)
)
