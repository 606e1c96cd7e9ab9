"""Named arguments of decode over unified pages."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantization import KVFormat
from pallas_kernels.quantized_attention.api import mixed_precision_attention, plan_mixed_decode
from pallas_kernels.quantized_attention.pages import PageFormat, parse_format
from pallas_kernels.specs import HEADS, Cost, Heads, Spec

LARGEST = 2.4  # of the elements of keys and values that are drawn


@dataclass(frozen=True)
class Mixed:
    """tokens: of each sequence, the shares of high and low precision of which `kept` gives; other
    tokens are pruned. page_size: tokens of a page in high precision. ragged: whether heads keep
    different numbers of tokens, which are then drawn, and heads without any of one precision or of
    both are among them."""

    heads: Heads
    sequences: int = 64
    tokens: int = 4096
    kept: tuple[float, float] = (0.25, 0.65)
    names: tuple[str, str] = ("K8V4", "K4V2")
    page_size: int = 64
    dtype: str = "bfloat16"
    ragged: bool = False

    @property
    def formats(self) -> tuple[PageFormat, PageFormat]:
        high, low = (parse_format(name, self.heads.D, self.dtype) for name in self.names)
        first = PageFormat.holding(self.page_size, *high)
        return first, PageFormat(*low, words=first.words)

    @property
    def most(self) -> tuple[int, int]:
        """Tokens of a head in high and in low precision."""
        high, low = self.kept
        return int(self.tokens * high), int(self.tokens * low)

    def counts(self, key):
        """[S, K] tokens in high precision, and in low precision."""
        shape, edges = (self.sequences, self.heads.K), jnp.array([[0, 3], [5, 0], [0, 0]])
        if not self.ragged:
            return tuple(jnp.full(shape, most, jnp.int32) for most in self.most)
        keys = jax.random.split(key)
        drawn = [jax.random.randint(k, shape, 0, most + 1) for k, most in zip(keys, self.most)]
        heads = np.prod(shape)
        counts = [
            jnp.concatenate([x.reshape(-1), edges[:, i]])[-heads:] for i, x in enumerate(drawn)
        ]
        return tuple(x.reshape(shape).astype(jnp.int32) for x in counts)


def make(shapes: Mixed) -> Spec:
    (H, K, D), S = (shapes.heads.H, shapes.heads.K, shapes.heads.D), shapes.sequences
    formats, dtype = shapes.formats, jnp.dtype(shapes.dtype)
    pages = [-(-most // format.tokens) for most, format in zip(shapes.most, formats)]

    def arguments(key):
        keys = jax.random.split(key, 5)
        words = [_pages(k, format, S * K * count) for k, format, count in zip(keys, formats, pages)]
        first_low = S * K * pages[0]
        ids = [jax.random.permutation(k, len(x)) for k, x in zip(keys[2:], words)]
        high, low = (x.reshape(S, K, -1).astype(jnp.int32) for x in ids)
        counts = shapes.counts(keys[4])
        return {
            "q_SxHxD": jax.random.normal(keys[4], (S, H, D), dtype),
            "words_NxW": jnp.concatenate(words),
            "tables_SxKxM": jnp.concatenate([high, first_low + low], axis=2),
            "high_SxK": counts[0],
            "low_SxK": counts[1],
        }

    def cost(arguments) -> Cost:
        """Words of the tokens that are read but their scores and positions, and the scores that
        are written; queries and outputs."""
        tokens = [int(np.asarray(arguments[name]).sum()) for name in ("high_SxK", "low_SxK")]
        read = sum(
            count * (format.keys.token_bytes + format.values.token_bytes)
            for count, format in zip(tokens, formats)
        )
        written = 4 * (H // K) * sum(tokens)
        return Cost(
            bytes=read + written + 2 * S * H * D * dtype.itemsize,
            flops=4 * (H // K) * D * sum(tokens),
        )

    def plan(arguments, implementation):
        schedule = plan_mixed_decode(
            arguments["high_SxK"], arguments["low_SxK"], formats, implementation=implementation
        )
        return {"schedule": schedule}

    return Spec(
        mixed_precision_attention, arguments, cost, {"formats": formats},
        indices=("high_SxK", "low_SxK"), plan=plan,
    )  # fmt: skip


def _pages(key, format: PageFormat, count: int):
    """Random pages [count, W]."""
    keys = jax.random.split(key, 4)
    parts = []
    end = 0
    for i, (section, k) in enumerate(zip(format.sections[:4], keys)):
        width = format.tokens * section.width
        parts.append(jnp.zeros((count, section.first - end), jnp.uint32))
        one = format.keys if i < 2 else format.values
        parts.append(
            _scales(k, one, (count, width)) if i % 2 else jax.random.bits(k, (count, width))
        )
        end = section.first + width
    return jnp.concatenate([*parts, jnp.zeros((count, format.words - end), jnp.uint32)], axis=1)


def _scales(key, format: KVFormat, shape):
    """Of elements from about -2 to 2, `LARGEST` at most."""
    spread = jax.random.uniform(key, shape, minval=0.8, maxval=1.2)

    def half(x):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
        return bits.astype(jnp.uint32)

    return half(4 * spread / format.most) | half(-2 * spread) << 16


_LLAMA, _QWEN = HEADS["llama-3-8b"], HEADS["qwen2.5-7b"]
SHAPES = {
    "llama-3-8b": Mixed(_LLAMA),
    "llama-3-8b-page128": Mixed(_LLAMA, page_size=128),
    "llama-3-8b-1x32k": Mixed(_LLAMA, sequences=1, tokens=32 * 1024),
    "llama-3-8b-K8V4": Mixed(_LLAMA, kept=(1.0, 0.0)),
    "llama-3-8b-K4V2": Mixed(_LLAMA, kept=(0.02, 0.98)),
    "llama-3-8b-K16V16": Mixed(_LLAMA, names=("K16V16", "K16V16")),
    # Calibrated so that nothing is in low precision (Qwen2.5-7B), or little.
    "qwen2.5-7b": Mixed(_QWEN, kept=(0.9, 0.0)),
    "qwen2.5-7b-mixed": Mixed(_QWEN),
    "qwen2.5-32b": Mixed(HEADS["qwen2.5-32b"], kept=(0.3, 0.7)),
    # 2-bit values of head dim 64 fill too few words for the kernel.
    "bundled": Mixed(HEADS["bundled"], names=("K8V4", "K4V4"), dtype="float16"),
    "llama-3-8b-f16": Mixed(_LLAMA, dtype="float16"),
}
DECODE = {name: make(shapes) for name, shapes in SHAPES.items()}
