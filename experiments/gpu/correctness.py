"""Whether kernels are right on this machine's GPU: every op and spec against `reference`.

What 16 bits cost anyone is what a result of attention may be wrong by. With unit roundoff u, a
kernel may round each probability before it multiplies values, u · Σ p |v|, and must round its
output, u · |out|. With a soft cap the GPU's tanh is off by 2^-11 of its value, so each logit by d
= cap · 2^-11 (0.024 at 50), each probability by a factor between exp(-2 d) and exp(2 d), and the
output by (exp(2 d) - 1) · (Σ p |v| + |out|). What only moves numbers changes none.

Of quantised values a kernel rounds p · scale, and what that multiplies is off the middle of a
token's values by less than the largest of them, so |v| is that of the token's largest element.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend
from pallas_kernels.block_sparse_attention import specs as block_sparse_specs
from pallas_kernels.kv_write import specs as kv_write_specs
from pallas_kernels.lora import specs as lora_specs
from pallas_kernels.ops import OPS
from pallas_kernels.page_selection import specs as page_selection_specs
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import specs as attention_specs
from pallas_kernels.quantization import QuantizedPages
from pallas_kernels.quantized_attention import specs as mixed_specs
from pallas_kernels.specs import HEADS, Attention, Heads, Spec

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
TANH_ERROR = 2.0**-11  # relative, of the GPU's MUFU.TANH
SUMS = 1e-4  # what sums in float32 and exp2 may add
REFERENCE_BYTES = 4 * 10**9  # that the keys of the rows may take that are checked
SHAPES = {
    "paged_attention": (attention_specs.DECODE_SHAPES, attention_specs.decode),
    "quantised_paged_attention": (attention_specs.QUANTISED_SHAPES, attention_specs.decode),
    "paged_prefill_attention": (attention_specs.PREFILL_SHAPES, attention_specs.prefill),
}
HYBRID, MIXED = "hybrid_prefill_attention", "mixed_precision_attention"
PROMPTS = "prompt_attention"
_LLAMA = HEADS["llama-3-8b"]


@dataclass(frozen=True)
class Check:
    """largest_error: over all results, absolute.  of_bound: the largest share of what a result may
    be wrong by."""

    op: str
    spec: str
    implementation: str
    largest_error: float
    of_bound: float
    repeats_to_the_bit: bool

    @property
    def passes(self) -> bool:
        # XLA's scatters may add in any order.
        repeats = self.repeats_to_the_bit or self.implementation == "xla"
        return self.of_bound <= 1 and repeats


def jitted(function: Callable) -> Callable:
    """On a GPU. Inside one program the threads of kernels that are interpreted wait for each other
    for ever on a machine of few cores."""
    return jax.jit(function) if backend.current_gpu() else function


def check(op: str, name: str, spec: Spec, implementation: str) -> Check:
    arguments = spec.arguments(jax.random.key(0))
    call = jitted(partial(spec.op, implementation=implementation, **spec.options))
    # Rows of padding may hold anything.
    end = arguments["query_starts"][-1] if "query_starts" in arguments else None
    found, again = (
        [np.asarray(x)[:end] for x in jax.tree.leaves(call(**arguments))] for _ in range(2)
    )
    if op in SHAPES:
        rows, expected, bound = _attention(spec, arguments)
        errors = abs(np.asarray(found[0][rows], np.float32) - expected)
        of_bound = np.max(errors / bound)
    elif op == HYBRID:
        expected, bound = _expected(spec, arguments)
        errors = abs(np.asarray(found[0], np.float32) - expected[:end])
        of_bound = np.max(errors / bound[:end])
    elif op == MIXED:
        errors, of_bound = _mixed(spec, arguments, found)
        found, again = found[:2], again[:2]  # scores that belong to no read token may be anything
    elif op == PROMPTS:
        errors, of_bound = _prompts(spec, arguments, found)
    elif op == "select_pages":  # Rows that do not select may hold anything.
        reference = partial(spec.op, implementation="reference", **spec.options)
        selects = np.asarray(arguments["selects_R"])
        expected = np.asarray(jax.jit(reference)(**arguments))
        errors = np.where(selects[:, None], abs(found[0] - expected), 0)
        of_bound = 0.0 if not errors.any() else math.inf
    else:
        reference = partial(spec.op, implementation="reference", **spec.options)
        errors = np.stack(
            [
                np.max(abs(np.asarray(f, np.float32) - np.asarray(e, np.float32)))
                for f, e in zip(found, jax.tree.leaves(jax.jit(reference)(**arguments)))
            ]
        )
        of_bound = 0.0 if not errors.any() else math.inf
    return Check(
        op,
        name,
        implementation,
        largest_error=float(np.max(errors)),
        of_bound=float(of_bound),
        repeats_to_the_bit=all(np.array_equal(f, a) for f, a in zip(found, again)),
    )


def _attention(spec: Spec, arguments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the output; what they should be, and what they may be wrong by, [rows, H, D]."""
    if "query_starts" in arguments:
        rows, arguments = _as_decode(arguments)
    else:
        rows = np.arange(arguments["q_SxHxD"].shape[0])
    return rows, *_expected(replace(spec, op=paged_attention), arguments)


def _expected(spec: Spec, arguments) -> tuple[np.ndarray, np.ndarray]:
    """What an op of attention should give, in float32, and what that may be wrong by."""
    quantised = isinstance(arguments["k_pages_NxPxD"], QuantizedPages)
    dtype = str(next(iter(arguments.values())).dtype)  # of the queries
    arguments = {
        name: array.values() if isinstance(array, QuantizedPages) else array
        for name, array in arguments.items()
    }
    wide = {
        name: jax.tree.map(
            lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, array
        )
        for name, array in arguments.items()
    }
    reference = jax.jit(partial(spec.op, implementation="reference", **spec.options))
    expected = np.asarray(reference(**wide))
    sizes = abs(wide["v_pages_NxPxD"])
    if quantised:
        sizes = jnp.broadcast_to(sizes.max(-1, keepdims=True), sizes.shape)
    wide["v_pages_NxPxD"] = sizes
    sizes = np.asarray(reference(**wide)) + abs(expected)
    logit_error = (spec.options["soft_cap"] or 0.0) * TANH_ERROR
    share = 1.05 * UNIT_ROUNDOFF[dtype] + math.expm1(2 * logit_error)
    return expected, share * sizes + SUMS


def _mixed(spec: Spec, arguments, found) -> tuple[np.ndarray, float]:
    """Errors of decode over unified pages and of its log-sum-exp, and the largest share of what
    they may be."""
    wide = dict(arguments, q_SxHxD=arguments["q_SxHxD"].astype(jnp.float32))
    reference = partial(spec.op, implementation="reference", **spec.options)
    out, lse, _ = jax.jit(reference)(**wide)
    unit = UNIT_ROUNDOFF[str(arguments["q_SxHxD"].dtype)]
    # Σ p |v| is at most the largest value that specs draw.
    largest = mixed_specs.LARGEST
    bound = 1.05 * unit * (largest + abs(np.asarray(out))) + SUMS
    errors = abs(np.asarray(found[0], np.float32) - np.asarray(out))
    seen = np.isfinite(lse)
    lse_error = np.where(seen, abs(found[1] - np.where(seen, lse, 0)), 0.0)
    assert (np.isfinite(found[1]) == seen).all(), "log-sum-exp of rows without tokens"
    return errors, float(max(np.max(errors / bound), np.max(lse_error) / 1e-3))


def _prompts(spec: Spec, arguments, found) -> tuple[np.ndarray, float]:
    """Errors of the attention of prompts and of the scores of their keys, and the largest share of
    what they may be."""
    wide = {
        name: x if name == "query_starts" else x.astype(jnp.float32)
        for name, x in arguments.items()
    }
    reference = jax.jit(partial(spec.op, implementation="reference", **spec.options))
    end = arguments["query_starts"][-1]
    out, sums = (np.asarray(x)[:end] for x in reference(**wide))
    sizes, _ = reference(**wide | {"v_TxKxD": abs(wide["v_TxKxD"])})
    unit = UNIT_ROUNDOFF[str(arguments["q_TxHxD"].dtype)]
    bound = 1.05 * unit * (np.asarray(sizes)[:end] + abs(out)) + SUMS
    errors, of_sums = abs(np.asarray(found[0], np.float32) - out), abs(found[1] - sums)
    return errors, float(max(np.max(errors / bound), np.max(of_sums / (SUMS * (1 + sums)))))


def _as_decode(arguments) -> tuple[np.ndarray, dict]:
    """Rows of a prefill, as many as the reference has the memory for, and each as a decode query
    whose length ends at the row's own position."""
    starts, lengths = (np.asarray(arguments[name]) for name in ("query_starts", "lengths_S"))
    tables, pools = arguments["tables_SxKxM"], arguments["k_pages_NxPxD"]
    _, K, M = tables.shape
    row_bytes = K * M * math.prod(pools.shape[1:]) * 4
    most = max(2, REFERENCE_BYTES // row_bytes)
    rows = np.unique(np.linspace(0, starts[-1] - 1, min(most, starts[-1])).astype(int))
    sequence = np.searchsorted(starts, rows, side="right") - 1
    visible = lengths[sequence] - (starts[sequence + 1] - 1 - rows)
    decode = {name: arguments[name] for name in ("k_pages_NxPxD", "v_pages_NxPxD")}
    return rows, decode | {
        "q_SxHxD": arguments["q_TxHxD"][rows],
        "tables_SxKxM": tables[sequence],
        "lengths_SxK": jnp.broadcast_to(jnp.asarray(visible, jnp.int32)[:, None], (len(rows), K)),
    }


def specs_to_check(small: bool) -> list[tuple[str, str, Spec]]:
    """Every op and spec, shortened so that `reference` has the memory and the time for it; and what
    short ones leave out."""

    def shorten(shapes: Attention) -> Attention:
        if small:
            heads = Heads(2 * shapes.heads.H // shapes.heads.K, 2, shapes.heads.D)
            return replace(shapes, heads=heads, sequences=2, context=100, ragged=True, tokens=None)
        return replace(shapes, sequences=6, context=1000, ragged=True, tokens=None)

    found = []
    for op, (shapes, make) in SHAPES.items():
        for name, one in shapes.items():
            short = shorten(one)
            chunk = min(short.chunk, 40 if small else 150)
            found.append((op, name, make(replace(short, chunk=chunk))))
        found += [(op, name, make(one)) for name, one in _demanding(op, small).items()]
    for name, hybrid in block_sparse_specs.HYBRID_SHAPES.items():
        short = replace(shorten(hybrid.shapes), chunk=40 if small else 150)
        short = replace(short, heads=replace(hybrid.shapes.heads, H=8, K=4), sequences=3)
        found.append(
            (HYBRID, name, block_sparse_specs.make(replace(hybrid, shapes=short, dense=2)))
        )
    named = mixed_specs.SHAPES
    for name, mixed in ({"small": named["bundled"]} if small else named).items():
        few = replace(
            mixed, sequences=2 if small else 4, tokens=200 if small else 2000, ragged=True
        )
        heads = Heads(2 * mixed.heads.H // mixed.heads.K, 2, mixed.heads.D)
        found.append((MIXED, name, mixed_specs.make(replace(few, heads=heads))))
    prompts = mixed_specs.PROMPT_SHAPES
    for name, all_heads in ({"small": prompts["bundled"]} if small else prompts).items():
        H, K, D = all_heads.heads.H, all_heads.heads.K, all_heads.heads.D
        tokens = (1, 60) if small else (1100, 1, 0, 300)
        kv_heads = 1 if small else 2
        heads = Heads(kv_heads * H // K, kv_heads, D)
        shorter = replace(all_heads, heads=heads, tokens=tokens, padding=20)
        found.append((PROMPTS, name, mixed_specs.prompts(shorter)))
    for op in OPS.keys() - SHAPES - {HYBRID, MIXED, PROMPTS}:
        found += [(op, name, spec) for name, spec in _moves(op, small).items()]
    return found


def _demanding(op: str, small: bool) -> dict[str, Attention]:
    """A long context, which laps the barriers many times, beside short ones; many heads of short
    sequences; chunks after long histories; logits of a deviation of 9, and capped ones of 40."""
    heads, long = (Heads(4, 2), 700) if small else (_LLAMA, 128 * 1024)
    some = Attention(heads, sequences=6, context=150 if small else 1000, ragged=True)
    tokens = (long, 1, long // 9, 129)
    found = {
        "long-context": Attention(heads, sequences=4, context=long, tokens=tokens),
        "large-logits": replace(some, scores_std=9.0),
        "capped-logits": replace(some, scores_std=40.0, soft_cap=50.0),
    }
    if op == "quantised_paged_attention":
        return {name: replace(one, kv_bits=8, page_size=64) for name, one in found.items()}
    if op == "paged_attention":
        many = Heads(4, 4) if small else HEADS["llama-2-13b"]
        sequences, context = (6, 70) if small else (64, 512)
        return found | {"many-heads": Attention(many, sequences, context)}
    chunk = 30 if small else 128
    chunks = {name: replace(one, chunk=chunk) for name, one in found.items()}
    one = Attention(heads, sequences=1, context=long, chunk=chunk)
    return chunks | {"chunk-of-long": one, "chunk-of-32k": replace(one, context=long // 4)}


def _moves(op: str, small: bool) -> dict[str, Spec]:
    if not small:
        return dict(OPS[op].specs)
    if op == "write_kv":
        return {"small": kv_write_specs.write(Heads(8, 4, 64), 9, num_pages=12)}
    if op == "select_pages":
        few = page_selection_specs.Selection(Heads(4, 2, 64), 2, 1280, budget=192)
        return {"small": page_selection_specs.select(few)}
    if op == "write_key_statistics":
        return {"small": page_selection_specs.write(Heads(2, 2, 64), (5, 1, 37), num_pages=20)}
    if op == "sgmv":
        return {"small": lora_specs.make(lora_specs.Lora(256, 128, (1, 3), ranks=(16, 32)))}
    return {"small": kv_write_specs.copy(64, 4, num_pages=20)}
