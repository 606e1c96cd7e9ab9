"""Cases of decode and prefill, by name."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import tolerance
from pallas_kernels.paged_attention import api, balance, peers
from pallas_kernels.specs import (
    HEADS,
    Attention,
    Cost,
    Errors,
    Gates,
    Heads,
    Op,
    Spec,
    without_padding,
)


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
        return api.plan_decode(
            arguments["lengths_SxK"], shapes.heads.D, jnp.dtype(shapes.dtype),
            sliding_window=shapes.sliding_window, format=shapes.format, page_size=shapes.page_size,
            implementation=implementation,
        )  # fmt: skip

    def compare(arguments, found) -> Errors:
        expected = tolerance.expected(api.paged_attention, shapes.options, arguments)
        return tolerance.errors_of(found[0], *expected)

    return Spec(
        api.paged_attention, arguments, cost, shapes.options, indices=("lengths_SxK",), plan=plan,
        balance=partial(balance.of_decode, shapes), compare=compare,
    )  # fmt: skip


def prefill(shapes: Attention) -> Spec:
    """A prefill of chunks without gaps. If `shapes.ragged`, padding rows follow the last chunk."""

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

    window = shapes.sliding_window or shapes.context

    def tokens_read(lengths, counts) -> np.ndarray:
        """The tokens of each sequence that any of its queries reads, in each KV head."""
        return np.where(counts > 0, np.minimum(lengths, window + counts - 1), 0)

    def cost(arguments) -> Cost:
        lengths = np.asarray(arguments["lengths_S"])
        counts = np.diff(np.asarray(arguments["query_starts"]))
        visible = [
            np.minimum(np.arange(length - count, length) + 1, window)
            for length, count in zip(lengths, counts)
        ]
        return shapes.cost(np.concatenate(visible), tokens_read(lengths, counts))

    def plan(arguments, implementation):
        return api.plan_prefill(
            **arguments, num_tokens=shapes.sequences * shapes.chunk, num_heads=shapes.heads.H,
            num_kv_heads=shapes.heads.K, sliding_window=shapes.sliding_window,
            implementation=implementation,
        )  # fmt: skip

    def balanced(schedule, query_starts, lengths_S):
        read = tokens_read(np.asarray(lengths_S), np.diff(np.asarray(query_starts)))
        return balance.of_prefill(shapes, schedule, shapes.heads.K * int(read.sum()))

    def compare(arguments, found) -> Errors:
        rows, decode = tolerance.as_decode(arguments)
        expected = tolerance.expected(api.paged_attention, shapes.options, decode)
        return tolerance.errors_of(found[0][rows], *expected)

    return Spec(
        api.paged_prefill_attention, arguments, cost, shapes.options,
        indices=("query_starts", "lengths_S"), plan=plan, balance=balanced,
        defined=without_padding, compare=compare,
    )  # fmt: skip


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
    """LServe's decode. Each KV head has a row, and a table for 64k tokens. The first half of a
    sequence's heads is dense and reads 63 selected pages. The second half streams and reads 128 +
    256 tokens. All heads also read 33 tokens of their newest page."""
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
    # One long sequence among short sequences, and short sequences in a table for long ones.
    "llama-3-8b-one-128k": Attention(_LLAMA, sequences=64, context=_LONG, tokens=_ONE_LONG),
    "llama-3-8b-1x4k": Attention(_LLAMA, sequences=1, context=_LONG, tokens=(4096,)),
    "llama-3-8b-lserve": _lserve(_LLAMA, sequences=64),
    "llama-2-7b-lserve": _lserve(HEADS["llama-2-7b"], sequences=16),
    # Products with the most columns, and tiles with the most tokens.
    "dim64-group16": Attention(Heads(32, 2, 64)),
}
# Pages of 8 bits and of 4 bits, as in LServe.
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
# Prefill of whole prompts, and of small chunks after long histories.
PREFILL_SHAPES = _named(Attention(_LLAMA, sequences=1, context=8192, chunk=8192)) | {
    "llama-3-8b-chunks": Attention(_LLAMA, sequences=4, context=4096, chunk=512, ragged=True),
    "llama-3-8b-128-of-32k": Attention(_LLAMA, sequences=1, context=32 * 1024, chunk=128),
    "llama-3-8b-128-of-128k": Attention(_LLAMA, sequences=1, context=_LONG, chunk=128),
}


def short(shapes: Attention, small: bool) -> Attention:
    """`shapes`, shortened until `reference` has enough memory and time for them."""
    context, sequences = (100, 2) if small else (1000, 6)
    chunk = min(shapes.chunk, 40 if small else 150)
    heads = Heads(2 * shapes.heads.H // shapes.heads.K, 2, shapes.heads.D)
    return replace(
        shapes, heads=heads if small else shapes.heads, sequences=sequences, context=context,
        chunk=chunk, ragged=True, tokens=None,
        sliding_window=shapes.sliding_window and 2 * context // 5,
    )  # fmt: skip


def _demanding(small: bool, **change) -> dict[str, Attention]:
    """Demanding shapes: a long context, which uses each barrier many times, beside short contexts;
    logits with a standard deviation of 9; capped logits with a standard deviation of 40."""
    heads, long = (Heads(4, 2), 700) if small else (_LLAMA, _LONG)
    some = Attention(heads, sequences=6, context=150 if small else 1000, ragged=True, **change)
    tokens = (long, 1, long // 9, 129)
    return {
        "long-context": Attention(heads, sequences=4, context=long, tokens=tokens, **change),
        "large-logits": replace(some, scores_std=9.0),
        "capped-logits": replace(some, scores_std=40.0, soft_cap=50.0),
    }


def _shortened(named: Mapping[str, Attention], small: bool) -> dict[str, Attention]:
    return {name: short(shapes, small) for name, shapes in named.items()}


def _decodes(small: bool) -> dict[str, Spec]:
    """Shortened and demanding shapes, and many heads of short sequences."""
    many = DECODE_SHAPES["llama-2-13b-64x512"]
    many = replace(many, heads=Heads(4, 4), sequences=6, context=70) if small else many
    shapes = _shortened(DECODE_SHAPES, small) | _demanding(small) | {"many-heads": many}
    return {name: decode(one) for name, one in shapes.items()}


def _quantised(small: bool) -> dict[str, Spec]:
    shapes = _shortened(QUANTISED_SHAPES, small) | _demanding(small, kv_bits=8, page_size=64)
    return {name: decode(one) for name, one in shapes.items()}


def _prefills(small: bool) -> dict[str, Spec]:
    """Shortened and demanding shapes, and chunks after long histories."""
    chunk = 30 if small else 128
    demanding = _demanding(small, chunk=chunk)
    one = replace(demanding["long-context"], sequences=1, tokens=None)
    shapes = _shortened(PREFILL_SHAPES, small) | demanding
    shapes |= {"chunk-of-long": one, "chunk-of-32k": replace(one, context=one.context // 4)}
    return {name: prefill(shapes) for name, shapes in shapes.items()}


DECODE = Op(
    api.DECODE,
    {name: decode(shapes) for name, shapes in DECODE_SHAPES.items()},
    _decodes,
    kernels=("paged_decode", "merge_partials"),
    gates=Gates(
        resident={"paged_decode": 2},
        most_launches=3,
        balanced={
            "llama-3-8b": 0.02,
            "llama-3-8b-256x512": 0.0,
            "llama-3-8b-one-128k": 0.02,
            "llama-3-8b-1x4k": 1.0,
            "llama-3-8b-lserve": 0.02,
            "qwen2.5-32b": 0.02,
        },
    ),
    timed_peers=partial(peers.timed, peers.DECODE, DECODE_SHAPES),
)
# Quantised pages have separate kernels, and no kernel for Ampere.
QUANTISED = Op(
    api.DECODE_QUANTISED,
    {name: decode(shapes) for name, shapes in QUANTISED_SHAPES.items()},
    _quantised,
    kernels=("paged_decode_of_words", "merge_partials"),
    gates=Gates(most_launches=3, balanced={"llama-3-8b-lserve-kv8": 0.02, "llama-3-8b-kv4": 0.02}),
)
PREFILL = Op(
    api.PREFILL,
    {name: prefill(shapes) for name, shapes in PREFILL_SHAPES.items()},
    _prefills,
    kernels=("paged_prefill", "merge_partials"),
    reused=True,
    slow_as_xla=PREFILL_SHAPES.keys() - {"bundled"},
    peers=peers.compiled("llama-3-8b", PREFILL_SHAPES),
    timed_peers=partial(peers.timed, peers.PREFILL, PREFILL_SHAPES),
)
