"""Named arguments of decode and prefill."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.api import (
    paged_attention,
    paged_prefill_attention,
    plan_decode,
    plan_prefill,
)
from pallas_kernels.specs import HEADS, Attention, Cost, Heads, Spec


def decode(shapes: Attention) -> Spec:
    def arguments(key):
        keys = jax.random.split(key, 3)
        lengths = shapes.lengths(keys[2])[:, None]
        return {
            "q_SxHxD": shapes.queries(keys[0], shapes.sequences),
            **shapes.pages(keys[1]),
            "lengths_SxK": jnp.broadcast_to(lengths, (shapes.sequences, shapes.heads.K)),
        }

    def cost(arguments) -> Cost:
        lengths = np.asarray(arguments["lengths_SxK"])[:, 0]
        visible = np.minimum(lengths, shapes.sliding_window or lengths)
        return shapes.cost(visible, read=visible)

    def plan(arguments, implementation):
        schedule = plan_decode(
            arguments["lengths_SxK"], shapes.heads.D, jnp.dtype(shapes.dtype),
            sliding_window=shapes.sliding_window, format=shapes.format, page_size=shapes.page_size,
            implementation=implementation,
        )  # fmt: skip
        return {"schedule": schedule}

    indices = ("lengths_SxK",)
    return Spec(paged_attention, arguments, cost, shapes.options, indices=indices, plan=plan)


def prefill(shapes: Attention) -> Spec:
    """Chunks follow each other without gaps. Padding rows follow the last chunk if it is ragged."""

    def arguments(key):
        keys = jax.random.split(key, 4)
        lengths = shapes.lengths(keys[2])
        counts = jnp.minimum(lengths, shapes.chunk)
        if shapes.ragged:
            drawn = jax.random.randint(keys[3], counts.shape, 0, counts + 1, jnp.int32)
            counts = drawn.at[0].set(counts[0])
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        return {
            "q_TxHxD": shapes.queries(keys[0], shapes.sequences * shapes.chunk),
            **shapes.pages(keys[1]),
            "query_starts": starts,
            "lengths_S": lengths,
        }

    def cost(arguments) -> Cost:
        lengths = np.asarray(arguments["lengths_S"])
        counts = np.diff(np.asarray(arguments["query_starts"]))
        window = shapes.sliding_window or shapes.context
        visible = [
            np.minimum(np.arange(length - count, length) + 1, window)
            for length, count in zip(lengths, counts)
        ]
        read = np.where(counts > 0, np.minimum(lengths, window + counts - 1), 0)
        return shapes.cost(np.concatenate(visible), read)

    def plan(arguments, implementation):
        schedule = plan_prefill(
            **arguments, num_tokens=shapes.sequences * shapes.chunk, num_heads=shapes.heads.H,
            num_kv_heads=shapes.heads.K, sliding_window=shapes.sliding_window,
            implementation=implementation,
        )  # fmt: skip
        return {"schedule": schedule}

    indices = ("query_starts", "lengths_S")
    return Spec(
        paged_prefill_attention, arguments, cost, shapes.options, indices=indices, plan=plan
    )


_LLAMA = HEADS["llama-3-8b"]
# Changes to the default shapes, which are bfloat16 in pages of 16 tokens.
_VARIANTS: dict[str, dict[str, Any]] = {
    "page32": {"page_size": 32},
    "page64": {"page_size": 64},
    "page128": {"page_size": 128},
    "f16": {"dtype": "float16"},
    "window": {"sliding_window": 1024},
    "soft_cap": {"soft_cap": 50.0},
    "ragged": {"ragged": True},
}


def _named(default: Attention) -> dict[str, Attention]:
    models = {name: replace(default, heads=heads) for name, heads in HEADS.items()}
    models["bundled"] = replace(models["bundled"], dtype="float16")
    variants = {
        f"llama-3-8b-{name}": replace(default, **change) for name, change in _VARIANTS.items()
    }
    return models | variants


def _lserve(heads: Heads, sequences: int) -> Attention:
    """LServe's decode: a row for each KV head, whose table has room for 64k tokens. The first half
    of a sequence's heads is dense and reads 64 selected pages, the other half streams and reads 128
    + 256 tokens, and both read 33 tokens of their newest page."""
    each, of_dense, of_streaming = heads.K // 2, 63 * 64 + 33, 128 + 256 + 33
    return Attention(
        Heads(heads.H // heads.K, 1, heads.D), sequences * heads.K, context=64 * 1024, page_size=64,
        tokens=(*[of_dense] * each, *[of_streaming] * each) * sequences,
    )  # fmt: skip


_LONG = 128 * 1024
_ONE_LONG = (_LONG, *[1024] * 63)
DECODE_SHAPES = _named(Attention(_LLAMA, sequences=64, context=4096)) | {
    "llama-3-8b-256x512": Attention(_LLAMA, sequences=256, context=512),
    "llama-2-13b-64x512": Attention(HEADS["llama-2-13b"], sequences=64, context=512),
    # One long sequence among short ones, and a short one in a table for long ones.
    "llama-3-8b-one-128k": Attention(_LLAMA, sequences=64, context=_LONG, tokens=_ONE_LONG),
    "llama-3-8b-1x4k": Attention(_LLAMA, sequences=1, context=_LONG, tokens=(4096,)),
    "llama-3-8b-lserve": _lserve(_LLAMA, sequences=64),
    "llama-2-7b-lserve": _lserve(HEADS["llama-2-7b"], sequences=16),
    # As many columns as products have, and tiles of as many tokens.
    "dim64-group16": Attention(Heads(32, 2, 64)),
}
# Pages of 8 and of 4 bits, as LServe's.
QUANTISED_SHAPES = {
    f"{name}-kv{bits}": replace(shapes, kv_bits=bits, page_size=64)
    for bits in (8, 4)
    for name, shapes in {
        "llama-3-8b": Attention(_LLAMA),
        "llama-3-8b-lserve": _lserve(_LLAMA, sequences=64),
        "llama-2-7b-lserve": _lserve(HEADS["llama-2-7b"], sequences=16),
        "llama-3-8b-window": Attention(_LLAMA, sliding_window=1024, soft_cap=50.0),
        "bundled": Attention(HEADS["bundled"], dtype="float16"),
    }.items()
}
# Small chunks after long histories, beside the others.
PREFILL_SHAPES = _named(Attention(_LLAMA, sequences=1, context=8192, chunk=8192)) | {
    "llama-3-8b-chunks": Attention(_LLAMA, sequences=4, context=4096, chunk=512, ragged=True),
    "llama-3-8b-128-of-32k": Attention(_LLAMA, sequences=1, context=32 * 1024, chunk=128),
    "llama-3-8b-128-of-128k": Attention(_LLAMA, sequences=1, context=_LONG, chunk=128),
}
DECODE = {name: decode(shapes) for name, shapes in DECODE_SHAPES.items()}
QUANTISED = {name: decode(shapes) for name, shapes in QUANTISED_SHAPES.items()}
PREFILL = {name: prefill(shapes) for name, shapes in PREFILL_SHAPES.items()}
