"""Cases of SGMV, by name: Llama-2's projections, and the adapter popularities of Punica §7."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import tolerance
from pallas_kernels.lora import api
from pallas_kernels.lora.api import plan_sgmv, sgmv, sgmv_expand, sgmv_shrink
from pallas_kernels.lora.segments import PAGE_RANKS, Segments
from pallas_kernels.specs import Cost, Errors, Op, Spec

SKEW = 1.5  # Skewed popularity: requests of an adapter over those of the next less popular one.
POPULARITIES = ("distinct", "uniform", "skewed", "identical")


def segment_lengths(popularity: str, tokens: int) -> list[int]:
    """The number of tokens of each adapter, in a batch of `tokens` tokens (Punica §7).

    'distinct': each adapter has one token.
    'uniform': the numbers of tokens of ⌈√tokens⌉ adapters differ by at most one.
    'skewed': the i-th least popular adapter has ⌊1.5^i⌋ tokens, and the most popular one the rest.
    'identical': one adapter has all tokens.

    Raises ValueError for another popularity.
    """
    if popularity == "distinct":
        return [1] * tokens
    if popularity == "uniform":
        return [len(part) for part in np.array_split(range(tokens), math.ceil(math.sqrt(tokens)))]
    if popularity == "skewed":
        counts = [math.floor(SKEW**i) for i in range(tokens)]
        ends = [min(end, tokens) for end in itertools.accumulate(counts)]
        return [
            after - before for before, after in itertools.pairwise([0, *ends]) if after > before
        ]
    if popularity == "identical":
        return [tokens]
    raise ValueError(f"popularity must be one of {', '.join(POPULARITIES)}, not {popularity!r}")


@dataclass(frozen=True)
class Lora:
    """The shapes of a call of SGMV.

    inputs, outputs: the projection's input and output width.
    lengths: tokens of each segment. Each segment has an adapter of its own.
    ranks: the adapters' ranks; adapter i has ranks[i % len(ranks)].
    without: the number of tokens without an adapter, which follow all segments.
    """

    inputs: int
    outputs: int
    lengths: tuple[int, ...]
    ranks: tuple[int, ...] = (16,)
    without: int = 0
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.without

    @property
    def pages(self) -> np.ndarray:
        """The rank pages of each segment's adapter, [S]."""
        ranks = itertools.islice(itertools.cycle(self.ranks), len(self.lengths))
        return np.array([-(-rank // PAGE_RANKS) for rank in ranks], np.int32)

    @property
    def cost(self) -> Cost:
        """The cost if inputs, outputs and the pages of all adapters are moved once."""
        per_token = 2 * PAGE_RANKS * (self.inputs + self.outputs)
        moved = self.tokens * (self.inputs + self.outputs) + per_token // 2 * int(self.pages.sum())
        return Cost(
            bytes=moved * jnp.dtype(self.dtype).itemsize,
            flops=per_token * int(self.pages @ np.array(self.lengths)),
        )


def make(shapes: Lora) -> Spec:
    """A call for the second of two layers. Adapters have random slots and random pages."""

    def arguments(key):
        keys = jax.random.split(key, 5)
        pages = shapes.pages
        S, N, Q = len(pages), int(pages.sum()), int(pages.max())
        ends = np.cumsum(shapes.lengths, dtype=np.int32)
        starts = jnp.asarray(ends - np.array(shapes.lengths, np.int32))
        slots = jax.random.permutation(keys[0], S).astype(jnp.int32)
        # An adapter's pages begin where the pages of the adapter before it end.
        first = np.cumsum(pages) - pages
        listed = jax.random.permutation(keys[1], N)[first[:, None] + np.arange(Q)]
        a = jax.random.normal(keys[2], (2, N, PAGE_RANKS, shapes.inputs)) * shapes.inputs**-0.5
        b = (
            jax.random.normal(keys[3], (2, N, PAGE_RANKS, shapes.outputs))
            * (PAGE_RANKS * Q) ** -0.5
        )
        return {
            "x_TxI": jax.random.normal(keys[4], (shapes.tokens, shapes.inputs), shapes.dtype),
            "a_LxNx16xI": a.astype(shapes.dtype),
            "b_LxNx16xO": b.astype(shapes.dtype),
            "layer": jnp.int32(1),
            "segments": Segments(slots, starts, jnp.asarray(ends), jnp.array([S], jnp.int32)),
            "rank_pages_AxQ": jnp.zeros((S, Q), jnp.int32).at[slots].set(listed.astype(jnp.int32)),
            "num_rank_pages_A": jnp.zeros(S, jnp.int32).at[slots].set(pages),
        }

    def plan(arguments, implementation):
        return plan_sgmv(**arguments, num_tokens=shapes.tokens, implementation=implementation)

    def compare(arguments, found) -> Errors:
        """The tolerance covers one rounding of v = x·A and one rounding of the result."""
        x, a, b, *tables = tolerance.wide(arguments).values()
        v = sgmv_shrink(x, a, *tables, implementation="reference")
        out, sizes = (
            np.asarray(sgmv_expand(*operands, *tables, implementation="reference"))
            for operands in ((v, b), (abs(v), abs(b)))
        )
        bound = tolerance.rounding(shapes.dtype) * (sizes + abs(out)) + tolerance.SUMS
        return tolerance.errors_of(found[0], out, bound)

    return Spec(
        sgmv, arguments, lambda arguments: shapes.cost, indices=("segments",), plan=plan,
        compare=compare,
    )  # fmt: skip


# The distinct (input, output) widths of the projections; for 70B also the shard of one of 8 GPUs.
WIDTHS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "llama-2-7b": {"q": (4096, 4096), "up": (4096, 11008), "down": (11008, 4096)},
    "llama-2-13b": {"q": (5120, 5120), "up": (5120, 13824), "down": (13824, 5120)},
    "llama-2-70b": {"q": (8192, 8192), "k": (8192, 1024), "down": (28672, 8192)},
    "llama-2-70b-part": {
        "q": (8192, 1024), "k": (8192, 128), "o": (1024, 8192), "up": (8192, 3584),
        "down": (3584, 8192),
    },
}  # fmt: skip
BATCH = 64


def _of(popularity: str) -> tuple[int, ...]:
    return tuple(segment_lengths(popularity, BATCH))


_PREFILL = (512, *[1] * 31)
SHAPES = {
    f"{model}-{name}": Lora(*widths, _of("skewed"))
    for model, projections in WIDTHS.items()
    for name, widths in projections.items()
}
SHAPES |= {f"llama-2-7b-{kind}": Lora(4096, 4096, _of(kind)) for kind in POPULARITIES}
SHAPES |= {
    "llama-2-7b-one": Lora(4096, 4096, (1,)),
    "llama-2-7b-prefill": Lora(4096, 4096, _PREFILL, without=9),
    "llama-2-7b-rank64": Lora(4096, 4096, _of("skewed"), ranks=(64,)),
    "llama-2-7b-mixed": Lora(4096, 4096, _of("uniform"), ranks=(8, 16, 64, 128), without=7),
    "llama-2-7b-f16": Lora(4096, 4096, _of("skewed"), dtype="float16"),
}
_NAMED = {name: make(shapes) for name, shapes in SHAPES.items()}
_FEW = {
    "small": make(Lora(256, 128, (1, 3), ranks=(16, 32))),
    "one": make(Lora(1024, 512, (1,), ranks=(16,), without=2)),
    "down": make(Lora(2816, 512, (1, 1, 2, 40), ranks=(16, 8), without=2)),
}
SGMV = Op(
    api.SGMV,
    _NAMED,
    lambda small: _FEW if small else _NAMED,
    kernels=("sgmv_shrink", "sgmv_expand"),
)
