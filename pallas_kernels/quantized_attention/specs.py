"""Cases for tests and benchmarks of decode over unified pages, by name."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import tolerance
from pallas_kernels.paged_attention import balance
from pallas_kernels.quantization import KVFormat
from pallas_kernels.quantization.quantizer import joined
from pallas_kernels.quantized_attention import api
from pallas_kernels.quantized_attention.api import mixed_precision_attention, plan_mixed_decode
from pallas_kernels.quantized_attention.pages import PageFormat, parse_format
from pallas_kernels.quantized_attention.sections import Section, pages_of_tile
from pallas_kernels.specs import HEADS, Cost, Errors, Gates, Heads, Op, Spec, reference, some

LARGEST = 2.4  # the largest element of drawn keys and values of up to 8 bits
# Tokens in each precision, for heads without tokens in one precision or in all precisions.
_EDGES = np.array([[4, 0, 3], [0, 5, 0], [0, 0, 0]])


@dataclass(frozen=True)
class Mixed:
    """The shapes of a call of mixed-precision decode.

    tokens: the number of tokens of each sequence.
    kept: the share of the tokens in each of two or three precisions; other tokens are pruned.
    names: the page formats, the highest precision first.
    page_size: tokens of a page in the highest precision.
    ragged: whether heads keep different, random numbers of tokens. Then some heads have no tokens
        in one precision, or no tokens at all.
    """

    heads: Heads
    sequences: int = 64
    tokens: int = 4096
    kept: tuple[float, ...] = (0.25, 0.65)
    names: tuple[str, ...] = ("K8V4", "K4V2")
    page_size: int = 64
    dtype: str = "bfloat16"
    ragged: bool = False

    @property
    def formats(self) -> tuple[PageFormat, ...]:
        highest, *others = (parse_format(name, self.heads.D, self.dtype) for name in self.names)
        first = PageFormat.holding(self.page_size, *highest)
        return first, *(PageFormat(*other, words=first.words) for other in others)

    @property
    def most(self) -> tuple[int, ...]:
        """The most tokens of a head in each precision."""
        return tuple(int(self.tokens * share) for share in self.kept)

    def counts(self, key):
        """[S, K, I] tokens in each precision."""
        shape, levels = (self.sequences, self.heads.K), len(self.names)
        if not self.ragged:
            return jnp.stack([jnp.full(shape, most, jnp.int32) for most in self.most], -1)
        # A precision without columns in the table has no tokens.
        edges = jnp.asarray(np.minimum(_EDGES[:, -levels:], self.most))
        keys = jax.random.split(key, levels)
        drawn = [jax.random.randint(k, shape, 0, most + 1) for k, most in zip(keys, self.most)]
        heads = np.prod(shape)
        counts = [
            jnp.concatenate([x.reshape(-1), edges[:, i]])[-heads:] for i, x in enumerate(drawn)
        ]
        return jnp.stack([x.reshape(shape).astype(jnp.int32) for x in counts], -1)


def make(shapes: Mixed) -> Spec:
    (H, K, D), S = (shapes.heads.H, shapes.heads.K, shapes.heads.D), shapes.sequences
    formats, dtype = shapes.formats, jnp.dtype(shapes.dtype)
    pages = [-(-most // format.tokens) for most, format in zip(shapes.most, formats)]
    single = pages[0] if len(formats) == 3 else 0

    def arguments(key):
        of_words, of_ids, last = jax.random.split(key, 3)
        words, ids, before = [], [], 0
        for i, (format, count) in enumerate(zip(formats, pages)):
            N = S * K * count
            words.append(_pages(jax.random.fold_in(of_words, i), format, N))
            order = jax.random.permutation(jax.random.fold_in(of_ids, i), N).astype(jnp.int32)
            ids.append((before + order).reshape(S, K, count))
            before += N
        return {
            "q_SxHxD": jax.random.normal(last, (S, H, D), dtype),
            "words_NxW": jnp.concatenate(words),
            "tables_SxKxM": jnp.concatenate(ids, axis=2),
            "counts_SxKxI": shapes.counts(last),
        }

    def read(tokens) -> int:
        """Bytes of keys and values for `tokens`, the number of tokens in each precision."""
        each = [format.keys.token_bytes + format.values.token_bytes for format in formats]
        return sum(count * size for count, size in zip(tokens, each))

    def cost(arguments) -> Cost:
        """The cost of reading queries and the tokens' keys and values, and of writing scores and
        outputs. Stored scores and positions are not read."""
        tokens = np.asarray(arguments["counts_SxKxI"]).sum((0, 1)).tolist()
        written = 4 * (H // K) * sum(tokens)
        return Cost(
            bytes=read(tokens) + written + 2 * S * H * D * dtype.itemsize,
            flops=4 * (H // K) * D * sum(tokens),
        )

    def plan(arguments, implementation):
        return plan_mixed_decode(arguments["counts_SxKxI"], formats, implementation=implementation)

    def balanced(schedule, counts_SxKxI):
        pages = pages_of_tile([Section.of_format(format) for format in formats])
        tokens = np.asarray(counts_SxKxI, np.int64).reshape(S * K, -1)
        tiles = sum(-(-tokens[:, i] // (pages * each.tokens)) for i, each in enumerate(formats))
        return balance.of_rows(tiles, schedule, shapes.heads, read(tokens.sum(0).tolist()))

    def compare(arguments, found) -> Errors:
        """The errors of the output, and the largest ratio of an error (of output or of log-sum-exp)
        to its own tolerance."""
        wide = arguments | {"q_SxHxD": arguments["q_SxHxD"].astype(jnp.float32)}
        out, lse, _ = reference(mixed_precision_attention, options, wide)
        # Σ p |v| is at most the largest drawn value.
        bound = tolerance.rounding(dtype) * (LARGEST + abs(np.asarray(out))) + tolerance.SUMS
        errors, of_bound = tolerance.errors_of(found[0], out, bound)
        seen = np.isfinite(lse)
        lse_error = np.where(seen, abs(found[1] - np.where(seen, lse, 0)), 0.0)
        assert (np.isfinite(found[1]) == seen).all(), "log-sum-exp of rows without tokens"
        return errors, max(of_bound, float(np.max(lse_error) / 1e-3))

    options: dict[str, Any] = {"formats": formats, "single": single}
    return Spec(
        mixed_precision_attention, arguments, cost, options, indices=("counts_SxKxI",), plan=plan,
        # Scores are not compared, because scores without a token may be anything.
        balance=balanced, defined=lambda arguments, results: results[:2], compare=compare,
    )  # fmt: skip


def _pages(key, format: PageFormat, count: int):
    """Random pages [count, W]."""
    keys = jax.random.split(key, 4)
    words = jnp.zeros((count, format.words), jnp.uint32)
    for i, (section, k) in enumerate(zip(format.sections[:4], keys)):
        shape = count, format.tokens * section.width
        one = format.keys if i < 2 else format.values
        drawn = _scales(k, one, shape) if i % 2 else _codes(k, one, shape)
        words = words.at[:, section.first : section.first + shape[1]].set(drawn)
    return words


def _codes(key, format: KVFormat, shape):
    """Random codes; floats from -2 to 2 if the format has no codes."""
    if format.scaled:
        return jax.random.bits(key, shape, jnp.uint32)
    floats = jax.random.uniform(key, (*shape, 2), minval=-2.0, maxval=2.0)
    return joined(floats[..., 0].astype(format.floats), floats[..., 1].astype(format.floats))


def _scales(key, format: KVFormat, shape):
    """Scales and zero points for elements from about -2 to 2, at most `LARGEST` in magnitude."""
    spread = jax.random.uniform(key, shape, minval=0.8, maxval=1.2)
    return joined(*(x.astype(jnp.float16) for x in (4 * spread / format.most, -2 * spread)))


_LLAMA, _QWEN = HEADS["llama-3-8b"], HEADS["qwen2.5-7b"]
SHAPES = {
    "llama-3-8b": Mixed(_LLAMA),
    "llama-3-8b-page128": Mixed(_LLAMA, page_size=128),
    "llama-3-8b-1x32k": Mixed(_LLAMA, sequences=1, tokens=32 * 1024),
    "llama-3-8b-K8V4": Mixed(_LLAMA, kept=(1.0, 0.0)),
    "llama-3-8b-K4V2": Mixed(_LLAMA, kept=(0.02, 0.98)),
    "llama-3-8b-K16V16": Mixed(_LLAMA, names=("K16V16", "K16V16")),
    # DiffKV's calibration keeps no tokens of Qwen2.5-7B in low precision, and few of others.
    "qwen2.5-7b": Mixed(_QWEN, kept=(0.9, 0.0)),
    "qwen2.5-7b-mixed": Mixed(_QWEN),
    "qwen2.5-32b": Mixed(HEADS["qwen2.5-32b"], kept=(0.3, 0.7)),
    "llama-3-70b-K4V2-K2V2": Mixed(HEADS["llama-3-70b"], names=("K4V2", "K2V2"), page_size=128),
    # With head dim 128, 16-bit pages leave no shared memory for two more precisions.
    "llama-3-8b-three": Mixed(
        _LLAMA, kept=(0.1, 0.3, 0.5), names=("K8V8", "K8V4", "K4V2"), page_size=32
    ),
    "bundled-three": Mixed(
        HEADS["bundled"],
        kept=(0.1, 0.3, 0.5),
        names=("K16V16", "K8V4", "K4V4"),
        page_size=32,
        dtype="float16",
    ),
    # 2-bit values with head dim 64 have fewer words per token than the kernel needs.
    "bundled": Mixed(HEADS["bundled"], names=("K8V4", "K4V4"), dtype="float16"),
    "llama-3-8b-f16": Mixed(_LLAMA, dtype="float16"),
}


def _decodes(small: bool) -> dict[str, Spec]:
    sequences, tokens = (2, 200) if small else (4, 2000)
    found = {}
    for name, shapes in some(SHAPES, small).items():
        heads = Heads(2 * shapes.heads.H // shapes.heads.K, 2, shapes.heads.D)
        found[name] = make(
            replace(shapes, heads=heads, sequences=sequences, tokens=tokens, ragged=True)
        )
    return found


DECODE = Op(
    api.DECODE,
    {name: make(shapes) for name, shapes in SHAPES.items()},
    _decodes,
    kernels=("paged_decode_of_words", "merge_partials"),
    gates=Gates(most_launches=3, balanced={"llama-3-8b": 0.02, "qwen2.5-32b": 0.02}),
)
