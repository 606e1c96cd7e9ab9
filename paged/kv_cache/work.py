"""Work of attention over a KV cache in a step: bytes and operations, by policy.

`Layout.work` of a policy returns the `Cost` of each part of a layer's attention, on one shard:

    prefill       attention of rows that compute several tokens
    decode        attention of rows that compute one token
    selection     page selection
    statistics    reads and writes of key extremes and scores, stored beside keys and values
    compression   moving tokens to fewer bits, or dropping them
    writes        writes of new tokens' keys and values

A part without rows in the step costs `NOTHING`, or zeros. A cost is the mean over layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.kv_cache.windows import EVERYTHING
from pallas_kernels.specs import Cost

Work = dict[str, Cost]
NOTHING = Cost(0)
# Bytes [n] of each sequence, in all heads; [n, I] share of its tokens in each precision, highest
# first, as a mean over heads.
Stored = tuple[np.ndarray, np.ndarray]


class Layout(Protocol):
    """Memory and reads of a policy, computed from sizes, without a host half. Layouts are frozen.

    A policy that quantises or drops tokens has a further method:

        stored(report, slots, tokens) -> Stored

    slots: [n] slots of sequences. tokens: [n] tokens of each. report: the device half's report,
    or None if it reports nothing.
    """

    @property
    def swap_copies(self) -> int:
        """PCIe copies to swap one unit, if units are swapped one by one (vLLM Fig. 19); 0 if units
        are gathered first, as `paged.device.mover` does."""
        ...

    def work(self, contexts: np.ndarray, new_tokens: np.ndarray, kept=None) -> Work:
        """The parts of a layer's attention in one step, or in several steps at once.

        contexts: [..., S] tokens of each row after the step.
        new_tokens: [..., S] tokens of each row that the step computes, 1 or more.
        kept: [..., S, I] tokens by precision that a KV head keeps, as a mean over heads. None: all
            tokens, in the highest precision.
        The numbers of the costs have the leading axes [...]; without such axes they are scalars.
        """
        ...


@dataclass(frozen=True)
class Heads:
    """The attention of a shard: H query heads over K KV heads of width D.
    itemsize: bytes of an element of queries, new keys and new values."""

    H: int
    K: int
    D: int
    itemsize: int

    @classmethod
    def of(cls, shard: ModelConfig, dtype: str) -> "Heads":
        itemsize = jnp.dtype(dtype).itemsize
        return cls(shard.num_heads, shard.num_kv_heads, shard.head_dim, itemsize)

    def attention(self, kv_token_bytes: float, read, pairs, queries) -> Cost:
        """kv_token_bytes: bytes of a token's key and value in one KV head.
        read: tokens read, each once, summed over rows and KV heads.
        pairs: (query, key) pairs, summed over query heads.
        queries: tokens that attend, each with a query in all H heads.
        """
        moved = kv_token_bytes * read + 2 * self.itemsize * self.D * self.H * queries
        return Cost(moved, 4 * self.D * pairs)

    def writes(self, kv_token_bytes: float, new_tokens) -> Cost:
        """Reads of new keys and values, and writes of `kv_token_bytes` for each KV head."""
        return Cost(self.K * (kv_token_bytes + 2 * self.D * self.itemsize) * new_tokens)


def kv_bytes_of_token(model: ModelConfig, dtype) -> int:
    """Bytes of a token's keys and values in one layer."""
    return 2 * model.num_kv_heads * model.head_dim * jnp.dtype(dtype).itemsize


def seen_up_to(tokens, window):
    """(query, key) pairs among the first `tokens` of a sequence, if a query sees at most the last
    `window` tokens, its own included."""
    tokens = np.asarray(tokens, np.int64)  # squares of long contexts exceed 32 bits
    growing = np.minimum(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * window


def visible(contexts, new_tokens, windows: Sequence[int | None]) -> tuple[Any, Any]:
    """(pairs [..., S], seen [..., S]) of rows with `contexts` and `new_tokens` [..., S] tokens, as
    means over layers with `windows`.

    pairs: (query, key) pairs of a query head.
    seen: tokens that at least one query sees."""
    contexts, new_tokens = (np.asarray(x, np.int64) for x in (contexts, new_tokens))
    if not any(windows):  # equal to the loop below, and faster
        return new_tokens * (2 * contexts - new_tokens + 1) / 2, contexts * 1.0
    pairs = seen = np.zeros(contexts.shape)
    for window, layers in Counter(windows).items():
        share, most = layers / len(windows), EVERYTHING if window is None else window
        # The first new token's window begins at the oldest visible token.
        seen = seen + share * np.minimum(contexts, most + new_tokens - 1)
        of_window = seen_up_to(contexts, most) - seen_up_to(contexts - new_tokens, most)
        pairs = pairs + share * of_window
    return pairs, seen


def total(numbers, where) -> Any:
    """The sum of numbers [..., S] over the rows in which `where` [..., S] is true."""
    return np.vecdot(numbers, where)
