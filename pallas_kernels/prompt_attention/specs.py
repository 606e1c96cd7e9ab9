"""Cases of prompt attention with scores, by name."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import tolerance
from pallas_kernels.paged_attention import balance
from pallas_kernels.prompt_attention import api, prompt_sm90
from pallas_kernels.prompt_attention.api import plan_prompt_attention, prompt_attention
from pallas_kernels.specs import (
    HEADS,
    Cost,
    Errors,
    Gates,
    Heads,
    Op,
    Spec,
    reference,
    some,
    without_padding,
)
from pallas_kernels.tools import balance as tools

_LLAMA = HEADS["llama-3-8b"]


@dataclass(frozen=True)
class Prompts:
    """The shapes of a call of prompt attention.

    tokens: the number of tokens of each prompt.
    padding: the number of rows after the last prompt.
    last_rows, own, by_head: as in `prompt_attention`.
    """

    heads: Heads
    tokens: tuple[int, ...]
    padding: int = 0
    last_rows: int | None = None
    own: bool = False
    by_head: bool = False
    dtype: str = "bfloat16"

    @property
    def counted(self) -> int:
        """The number of (query, key) pairs. Queries are the last_rows of each prompt; keys are
        those that the query sees."""
        return sum(
            queries * (2 * n - queries + 1) // 2
            for n in self.tokens
            for queries in [min(n, self.last_rows or n)]
        )


def prompts(shapes: Prompts) -> Spec:
    (H, K, D), dtype = (shapes.heads.H, shapes.heads.K, shapes.heads.D), jnp.dtype(shapes.dtype)
    total = sum(shapes.tokens)
    T, starts = total + shapes.padding, np.cumsum([0, *shapes.tokens])
    options: dict[str, Any] = {
        "last_rows": shapes.last_rows,
        "own": shapes.own,
        "by_head": shapes.by_head,
    }

    def arguments(key):
        heads = {"q_TxHxD": H, "k_TxKxD": K, "v_TxKxD": K}
        drawn = {
            name: jax.random.normal(k, (T, count, D), dtype)
            for k, (name, count) in zip(jax.random.split(key, 3), heads.items())
        }
        return drawn | {"query_starts": jnp.asarray(starts, jnp.int32)}

    def cost(arguments) -> Cost:
        pairs = sum(n * (n + 1) // 2 for n in shapes.tokens)
        return Cost(
            bytes=2 * total * (H + K) * D * dtype.itemsize + 4 * total * K,
            # Scores are computed twice: probabilities need each row's log-sum-exp.
            flops=4 * H * D * pairs + 2 * H * D * shapes.counted,
        )

    def plan(arguments, implementation):
        return plan_prompt_attention(
            arguments["query_starts"], T, H, K, **options, implementation=implementation
        )

    def balanced(schedule, query_starts):
        """The balance of prompt_scores. What `tools.balance` calls a row is a tile of keys of one
        KV head, or of one query head if by_head. The tiles of a row are the tiles of queries whose
        probabilities for these keys are summed."""
        tile, padded, scores = prompt_sm90.TILE, len(schedule.ends), schedule.scores
        begin, end = np.full(padded, padded), np.zeros(padded, np.int64)
        for first, after in itertools.pairwise(np.asarray(query_starts, np.int64)):
            key = np.arange(first, after)
            begin[key] = np.maximum(key + (not shapes.own), after - (shapes.last_rows or after))
            end[key] = after
        first_tile = begin.reshape(-1, tile).min(1) // tile
        end_tile = -(-end.reshape(-1, tile).max(1) // tile)
        return tools.balance(
            np.tile(np.maximum(end_tile - first_tile, 0), H if shapes.by_head else K),
            scores.items,
            scores.block_items,
            places=len(scores.block_items) - 1,
            partial_bytes=tile * balance.FLOAT32,
            kv_bytes=total * 2 * K * D * dtype.itemsize,
        )

    def compare(arguments, found) -> Errors:
        """The errors of the attention, and the largest ratio of an error (of attention or of sums)
        to its own tolerance."""
        wide = tolerance.wide(arguments)

        def expected(arguments):
            return without_padding(
                arguments, [np.asarray(x) for x in reference(prompt_attention, options, arguments)]
            )

        out, sums = expected(wide)
        sizes, _ = expected(wide | {"v_TxKxD": abs(wide["v_TxKxD"])})
        bound = tolerance.rounding(dtype) * (sizes + abs(out)) + tolerance.SUMS
        errors, of_bound = tolerance.errors_of(found[0], out, bound)
        of_sums = abs(found[1] - sums) / (tolerance.SUMS * (1 + sums))
        return errors, max(of_bound, float(np.max(of_sums)))

    return Spec(
        prompt_attention, arguments, cost, options, indices=("query_starts",), plan=plan,
        balance=balanced, defined=without_padding, compare=compare,
    )  # fmt: skip


PROMPT_SHAPES = {
    "llama-3-8b": Prompts(_LLAMA, (8192,)),
    "llama-3-8b-4x2k": Prompts(_LLAMA, (2048,) * 4),
    "llama-3-8b-ragged": Prompts(_LLAMA, (1500, 1, 700, 129, 0, 1000), padding=766),
    # H2O and SnapKV include the score for the token itself, and sum by head.
    "llama-3-8b-own": Prompts(_LLAMA, (4096,), own=True, by_head=True),
    "llama-3-8b-last-rows": Prompts(_LLAMA, (8192,), last_rows=64),
    "qwen2.5-7b": Prompts(HEADS["qwen2.5-7b"], (4096,)),
    "qwen2.5-32b": Prompts(HEADS["qwen2.5-32b"], (4096,)),
    "bundled": Prompts(HEADS["bundled"], (4096,), dtype="float16"),
}


def _prompts(small: bool) -> dict[str, Spec]:
    tokens, kv_heads = ((1, 60), 1) if small else ((1100, 1, 0, 300), 2)
    found = {}
    for name, shapes in some(PROMPT_SHAPES, small).items():
        heads = Heads(kv_heads * shapes.heads.H // shapes.heads.K, kv_heads, shapes.heads.D)
        found[name] = prompts(replace(shapes, heads=heads, tokens=tokens, padding=20))
    return found


PROMPT = Op(
    api.PROMPT,
    {name: prompts(shapes) for name, shapes in PROMPT_SHAPES.items()},
    _prompts,
    kernels=("paged_prefill", "merge_partials", "prompt_scores", "merge_sums"),
    gates=Gates(balanced={"llama-3-8b": 0.02, "qwen2.5-32b": 0.02}),
    reused=True,
)
