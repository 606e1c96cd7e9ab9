"""Cases of prefill with dense and streaming heads, by name."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import tolerance
from pallas_kernels.attention.schedule import PrefillSchedule
from pallas_kernels.block_sparse_attention.hybrid import HYBRID as IMPLEMENTATIONS
from pallas_kernels.block_sparse_attention.hybrid import (
    hybrid_prefill_attention,
    plan_hybrid_prefill,
)
from pallas_kernels.block_sparse_attention.lists import streaming_blocks, streaming_lists
from pallas_kernels.paged_attention import balance
from pallas_kernels.paged_attention import specs as paged_attention
from pallas_kernels.specs import HEADS, Attention, Cost, Errors, Heads, Op, Spec, without_padding


@dataclass(frozen=True)
class Hybrid:
    """A call of hybrid prefill.

    shapes: the shapes of the prefill.
    dense: the number of dense KV heads in this call's layer; all other KV heads stream.
    sink, local: tokens of the sink and of the local window, with the paper's defaults.

    The schedules are for layers with dense // 2, with `dense`, and with only dense KV heads.
    """

    shapes: Attention
    dense: int
    sink: int = 128
    local: int = 256

    @property
    def dense_counts(self) -> tuple[int, ...]:
        return tuple(sorted({self.dense // 2, self.dense, self.shapes.heads.K}))

    @property
    def pages(self) -> tuple[int, int]:
        """The pages of the sink, and the pages of the window before the query's own page."""
        return self.sink // self.shapes.page_size, self.local // self.shapes.page_size

    def tokens_read(self, lengths, counts) -> tuple[tuple[int, np.ndarray], ...]:
        """For dense heads and for streaming heads: the number of heads, and the tokens [S] of each
        sequence that any of its last `counts` queries reads. A streaming head reads the pages of
        the sink, and all pages from the first query's window on."""
        (sink, local), P = self.pages, self.shapes.page_size
        window = np.maximum((lengths - counts) // P - local, sink) * P
        listed = np.minimum(lengths, sink * P) + np.maximum(lengths - window, 0)
        some = counts > 0
        K = self.shapes.heads.K
        return (self.dense, np.where(some, lengths, 0)), (K - self.dense, np.where(some, listed, 0))


def make(hybrid: Hybrid) -> Spec:
    """A call of `hybrid_prefill_attention`. All heads share a table with pages in random order; the
    page offsets give each head separate pages."""
    shapes, (sink, local) = hybrid.shapes, hybrid.pages
    heads, P, T = shapes.heads, shapes.page_size, shapes.sequences * shapes.chunk
    dense, counts = hybrid.dense, hybrid.dense_counts
    prefill = paged_attention.prefill(shapes)

    def arguments(key):
        drawn = prefill.arguments(key)
        S, K, M = drawn.pop("tables_SxKxM").shape
        tables = jax.random.permutation(key, S * M).reshape(S, M).astype(jnp.int32)
        lists = streaming_lists(drawn["query_starts"], drawn["lengths_S"], T, P, sink, local)
        columns = jnp.minimum(lists.blocks, M - 1)
        return drawn | {
            "tables_SxM": tables,
            "pages_IxB": tables[lists.rows[:, None], columns],
            "lists": lists,
            "num_dense": jnp.int32(dense),
            "page_offset_K": jnp.arange(K, dtype=jnp.int32) * (S * M),
        }

    def cost(arguments) -> Cost:
        lengths = np.asarray(arguments["lengths_S"])
        counts = np.diff(np.asarray(arguments["query_starts"]))
        position = np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, counts)])
        listed = np.asarray(streaming_blocks(position // P, sink, local)[1])
        of_streaming = (listed - 1) * P + position % P + 1
        G = heads.H // heads.K
        costs = [
            replace(shapes, heads=Heads(K * G, K, heads.D)).cost(visible, read)
            for visible, (K, read) in zip(
                (position + 1, of_streaming), hybrid.tokens_read(lengths, counts), strict=True
            )
        ]
        return Cost(*(sum(getattr(one, name) for one in costs) for name in ("bytes", "flops")))

    def plan(arguments, implementation):
        return plan_hybrid_prefill(
            **arguments, num_tokens=T, num_heads=heads.H, num_kv_heads=heads.K,
            dense_counts=counts, implementation=implementation,
        )  # fmt: skip

    def balanced(schedules, query_starts, lengths_S, lists):
        """The balance of layers with `hybrid.dense` dense heads."""
        case = counts.index(dense)
        read = hybrid.tokens_read(np.asarray(lengths_S), np.diff(np.asarray(query_starts)))
        keys = sum(heads * int(tokens.sum()) for heads, tokens in read)
        schedule = PrefillSchedule(schedules.items[case], schedules.merges[case])
        return balance.of_prefill(shapes, schedule, keys)

    def compare(arguments, found) -> Errors:
        expected = tolerance.expected(hybrid_prefill_attention, options, arguments)
        return tolerance.errors_of(found[0], *without_padding(arguments, list(expected)))

    options = {"dense_counts": counts, "soft_cap": shapes.soft_cap}
    return Spec(
        hybrid_prefill_attention, arguments, cost, options,
        indices=("query_starts", "lengths_S", "lists"), plan=plan, planned_as="schedules",
        balance=balanced,
        defined=without_padding, compare=compare,
    )  # fmt: skip


_PROMPT = Attention(HEADS["llama-3-8b"], sequences=1, context=8192, chunk=8192, page_size=64)
_BUNDLED = replace(_PROMPT, heads=HEADS["bundled"], context=4096, chunk=4096, dtype="float16")
HYBRID_SHAPES = {
    "llama-3-8b": Hybrid(_PROMPT, dense=4),
    "llama-3-8b-chunks": Hybrid(
        replace(_PROMPT, sequences=4, chunk=512, context=4096, ragged=True), dense=4
    ),
    "llama-3-8b-2k-of-64k": Hybrid(replace(_PROMPT, context=64 * 1024, chunk=2048), dense=4),
    "llama-2-7b": Hybrid(replace(_PROMPT, heads=HEADS["llama-2-7b"]), dense=16),
    "bundled": Hybrid(_BUNDLED, dense=2),
}


def _checked(small: bool) -> dict[str, Spec]:
    found = {}
    for name, hybrid in HYBRID_SHAPES.items():
        shapes = paged_attention.short(hybrid.shapes, small)
        heads = Heads(8, 4, hybrid.shapes.heads.D)
        found[name] = make(
            replace(hybrid, shapes=replace(shapes, heads=heads, sequences=3), dense=2)
        )
    return found


HYBRID = Op(
    IMPLEMENTATIONS,
    {name: make(shapes) for name, shapes in HYBRID_SHAPES.items()},
    _checked,
    kernels=("paged_prefill", "merge_partials"),
    reused=True,
)
