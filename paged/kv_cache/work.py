"""What attention over a KV cache reads and computes in a step: what policies say of themselves.

A layer's attention has parts, of which a policy's `Layout.work` gives the `Cost`, on one shard:

    prefill       attention of rows that compute several tokens
    decode        attention of rows that compute one
    selection     choosing the pages that are read
    statistics    what is kept of tokens besides their keys and values, as these are written
    compression   what is moved to fewer bits, or dropped
    writes        new tokens' keys and values

A part that a step lacks costs nothing. Layers may differ: costs are means over the layers.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from pallas_kernels.specs import Cost

Work = dict[str, Cost]
# Bytes [n] that sequences hold, and the shares of their tokens, over all heads, that are kept in
# each precision [n, I], the highest first.
Held = tuple[np.ndarray, np.ndarray]


class Layout(Protocol):
    """What a policy holds and reads, by numbers alone: frozen, and without a host half.

    A policy that holds less than all of its tokens as they are has a method besides:

        held(report, slots, tokens) -> Held

    of sequences in `slots` [n] with `tokens` [n] each. report: the device half's.
    """

    def work(self, contexts: np.ndarray, new_tokens: np.ndarray, held=None) -> Work:
        """The parts of a layer's attention in one step, or in several at once.

        contexts: [..., S] tokens of each row after the step. new_tokens: [..., S] how many of them
        it computes, 1 or more. Costs have the leading axes, numbers if there are none. held: [...,
        S, I] tokens of each precision that a KV head holds on average, for policies that keep fewer
        than all (None: all, in the highest).
        """
        ...


@dataclass(frozen=True)
class Heads:
    """The attention of a shard. H query heads over K KV heads of width D; itemsize: bytes of a
    number of queries and new keys."""

    H: int
    K: int
    D: int
    itemsize: int

    @classmethod
    def of(cls, shard: ModelConfig, dtype: str) -> "Heads":
        itemsize = jnp.dtype(dtype).itemsize
        return cls(shard.num_heads, shard.num_kv_heads, shard.head_dim, itemsize)

    def attention(self, kv_token_bytes: float, read, pairs, queries) -> Cost:
        """read: tokens whose keys and values, of `kv_token_bytes` a KV head, are read once, summed
        over rows and KV heads. pairs: of a query and a key, summed over query heads. queries: of
        all heads."""
        moved = kv_token_bytes * read + 2 * self.itemsize * self.D * self.H * queries
        return Cost(moved, 4 * self.D * pairs)

    def writes(self, kv_token_bytes: float, new_tokens) -> Cost:
        """New keys and values are read, and written as `kv_token_bytes` a KV head."""
        return Cost(self.K * (kv_token_bytes + 2 * self.D * self.itemsize) * new_tokens)


def kv_bytes_of_token(model: ModelConfig, dtype) -> int:
    """Of a token's keys and values in a layer."""
    return 2 * model.num_kv_heads * model.head_dim * jnp.dtype(dtype).itemsize


def triangle(tokens):
    """1 + 2 + … + tokens."""
    return tokens * (tokens + 1) // 2


def seen_up_to(tokens, window):
    """Pairs of a query and a key among the first `tokens` of a sequence, if a query sees at most
    `window` tokens, itself among them."""
    growing = np.minimum(tokens, window)
    return triangle(growing) + (tokens - growing) * window


def total(numbers, where) -> Any:
    """Of numbers [..., S] over the rows where [..., S] is true."""
    return np.where(where, numbers, 0).sum(-1)
