"""Times of the LoRA operator x·A·B (Punica §7.1): predicted for an H200 from the compiled SGMV, and
measured on this machine's GPU, beside a loop over adapters and Gather-BMM.

SGMV's launches and its share of the bandwidth come from the compiled kernel (`kernels`). The loop
launches one product with A and one with B for each adapter; Gather-BMM launches two gathers
and two batched products. Their bytes follow the paper's formulas and move at SGMV's bandwidth.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes

from experiments.lib.typed_flags import Flags, flag
from experiments.papers import kernels
from experiments.papers.kernels import Compiled
from pallas_kernels.lora import PAGE_RANKS, Segments, plan_sgmv, sgmv, sgmv_expand
from pallas_kernels.lora.specs import POPULARITIES, segment_lengths
from pallas_kernels.specs import Cost

TARGET, SPEC, KERNEL = "h200", "llama-2-7b-distinct", "sgmv_shrink"
SGMV, LOOP, GATHER_BMM = "sgmv", "loop", "gather_bmm"
EXPAND = "expand"  # a single SGMV, as in the paper's roofline
COLOURS = dict(zip(POPULARITIES, ("#c8553d", "#e0a030", "#7d4f9e", "#2f6b9a")))
BATCHES, WIDTH = (1, 2, 4, 8, 16, 32, 48, 64), 4096
COMMAND = "python -m experiments.papers.punica."
HERE = (
    "4,096 × 4,096, 16 bits, batches of 1 to 64; predicted for an H200 from the compiled kernel's "
    "bytes and launches, and measured where there is a GPU"
)
DIFFERS = "the paper times an A100, for which SGMV has no kernel here"


@dataclass(frozen=True)
class OperatorFlags(Flags):
    """A study may set its own defaults of `ranks` and `implementations`."""

    batches: tuple[int, ...] = flag(BATCHES, "tokens of a call", least=1)
    ranks: tuple[int, ...] = flag((16,), "of all adapters of a call", least=1)
    implementations: tuple[str, ...] = flag(
        (SGMV,), "of the operator", choices=(SGMV, LOOP, GATHER_BMM, EXPAND)
    )


@dataclass(frozen=True)
class Row:
    """A call.

    flops, io_bytes: operations and bytes by the paper's formulas.
    least_us, most_us: bounds of the predicted time.
    us: measured time; None without a GPU.
    """

    implementation: str
    popularity: str
    batch: int
    rank: int
    adapters: int
    launches: int
    flops: int
    io_bytes: int
    least_us: float
    most_us: float
    us: float | None


@dataclass(frozen=True)
class Case:
    """A call.

    rank: rank of each adapter.
    inputs, outputs: widths of the projection.
    """

    popularity: str
    batch: int
    rank: int
    inputs: int
    outputs: int
    dtype: str = "float32"

    @property
    def lengths(self) -> list[int]:
        return segment_lengths(self.popularity, self.batch)

    def sgmv_cost(self, inputs: int, outputs: int) -> Cost:
        """The cost of one SGMV, by the paper's formulas (§7.1) with this case's dtype instead of 16
        bits."""
        moved = self.batch * (inputs + outputs) + len(self.lengths) * inputs * outputs
        return Cost(
            bytes=moved * jnp.dtype(self.dtype).itemsize,
            flops=2 * self.batch * inputs * outputs,
        )

    @property
    def expand_cost(self) -> Cost:
        return self.sgmv_cost(self.rank, self.outputs)

    @property
    def cost(self) -> Cost:
        """The cost of the operator: two SGMVs."""
        shrink, expand = self.sgmv_cost(self.inputs, self.rank), self.expand_cost
        return Cost(shrink.bytes + expand.bytes, shrink.flops + expand.flops)


@dataclass(frozen=True)
class Weights:
    """The input x and `batch` adapters of one rank. `sgmv` reads the weights from pages; the other
    implementations read a [batch, I, rank] and b [batch, rank, O]."""

    x: jax.Array
    a_pages: jax.Array
    b_pages: jax.Array
    rank_pages: jax.Array
    num_rank_pages: jax.Array
    a: jax.Array
    b: jax.Array

    @classmethod
    def draw(cls, case: Case, seed: int) -> "Weights":
        n, Q = case.batch, -(-case.rank // PAGE_RANKS)
        keys = jax.random.split(jax.random.key(seed), 4)
        a = jax.random.normal(keys[0], (n, case.inputs, case.rank)) * case.inputs**-0.5
        b = jax.random.normal(keys[1], (n, case.rank, case.outputs)) * case.rank**-0.5
        missing = ((0, 0), (0, Q * PAGE_RANKS - case.rank), (0, 0))
        order = np.asarray(jax.random.permutation(keys[2], n * Q))

        def paged(rows):
            pages = jnp.pad(rows, missing).reshape(n * Q, PAGE_RANKS, -1)
            return jnp.zeros_like(pages).at[order].set(pages)[None]

        x = jax.random.normal(keys[3], (case.batch, case.inputs))
        x, a_pages, b_pages, a, b = (
            z.astype(case.dtype) for z in (x, paged(a.swapaxes(1, 2)), paged(b), a, b)
        )
        return cls(
            x, a_pages, b_pages, jnp.asarray(order.reshape(n, Q), jnp.int32),
            jnp.full(n, Q, jnp.int32), a, b,
        )  # fmt: skip


def segments_of(case: Case) -> Segments:
    """Segments of adjacent tokens, padded to `case.batch` segments, so that one program serves all
    popularities."""
    lengths = np.array(case.lengths)
    ends = np.cumsum(lengths)

    def padded(numbers):
        return jnp.asarray(np.pad(numbers, (0, case.batch - len(lengths))), jnp.int32)

    count = jnp.array([len(lengths)], jnp.int32)
    return Segments(padded(np.arange(len(lengths))), padded(ends - lengths), padded(ends), count)


@jax.jit
def _sgmv(w: dict[str, Any], segments, schedule):
    return sgmv(
        w["x"], w["a_pages"], w["b_pages"], jnp.int32(0), segments, w["rank_pages"],
        w["num_rank_pages"], schedule=schedule,
    )  # fmt: skip


@jax.jit
def _expand(v, w: dict[str, Any], segments, schedule):
    return sgmv_expand(
        v, w["b_pages"], jnp.int32(0), segments, w["rank_pages"], w["num_rank_pages"],
        schedule=schedule,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="length")
def _one_adapter(x, a, b, start, length):
    return jax.lax.dynamic_slice_in_dim(x, start, length) @ a @ b


@jax.jit
def _gather_bmm(x, a, b, adapter_of_token):
    v = jnp.einsum("ti,tir->tr", x, a[adapter_of_token])
    return jnp.einsum("tr,tro->to", v, b[adapter_of_token])


def programs(case: Case, weights: Weights) -> dict[str, tuple[Callable[..., jax.Array], tuple]]:
    """Implementations of x·A·B by name, and EXPAND, a single SGMV: each a function with its
    arguments, because XLA computes at compilation what depends on no argument.

    sgmv: this machine's kernel.
    loop: a program for each adapter, dispatched one after the other.
    gather_bmm: a gather of each token's weights, and batched products.
    """
    w, segments = vars(weights), segments_of(case)
    schedule = plan_sgmv(segments, case.batch)  # A step has one for all layers and projections.
    x, a, b = weights.x, weights.a, weights.b
    lengths = case.lengths
    adapter_of_token = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths), jnp.int32)
    starts = np.cumsum(lengths) - lengths
    # The slices are outside the timed loop, because other frameworks make such views for free.
    parts = [(jnp.int32(start), a[i], b[i]) for i, start in enumerate(starts)]
    width = weights.rank_pages.shape[1] * PAGE_RANKS
    v = x[:, :width] if case.inputs >= width else jnp.ones((case.batch, width), case.dtype)

    def loop(x, parts):
        rows = [
            _one_adapter(x, a, b, start, length) for (start, a, b), length in zip(parts, lengths)
        ]
        return jnp.concatenate(rows) if len(rows) > 1 else rows[0]

    return {
        SGMV: (_sgmv, (w, segments, schedule)),
        LOOP: (loop, (x, parts)),
        GATHER_BMM: (_gather_bmm, (x, a, b, adapter_of_token)),
        EXPAND: (_expand, (v, w, segments, schedule)),
    }


def predicted(case: Case, implementation: str, compiled: Compiled) -> tuple[int, Cost]:
    """The number of launches of a call, and the cost of the call."""
    cost, n = case.cost, len(case.lengths)
    if implementation == EXPAND:
        return compiled.launches // 2, case.expand_cost
    if implementation == LOOP:
        return 2 * n, cost
    if implementation == GATHER_BMM:
        # Gather writes the weights of each token, and BMM reads these copies (§7.1).
        weights = case.rank * (case.inputs + case.outputs) * np.dtype(np.float16).itemsize
        return 4, Cost(cost.bytes + 2 * case.batch * weights, cost.flops)
    # SGMV reads all ranks of an adapter page, even if the adapter has fewer.
    paged = replace(case, rank=-(-case.rank // PAGE_RANKS) * PAGE_RANKS)
    return compiled.launches, paged.cost


def measured(case: Case, names: Sequence[str]) -> dict[str, float | None]:
    if not kernels.has_gpu():
        return dict.fromkeys(names)
    weights = Weights.draw(case, 0)
    chosen = {name: each for name, each in programs(case, weights).items() if name in names}
    return {name: kernels.peer_us(run, arguments) for name, (run, arguments) in chosen.items()}


def measure(flags: OperatorFlags, _) -> Iterator[Row]:
    compiled = kernels.compiled(TARGET, "sgmv", SPEC, KERNEL)
    for rank in sorted(set(flags.ranks)):
        for popularity in POPULARITIES:
            for batch in sorted(set(flags.batches)):
                case = Case(popularity, batch, rank, WIDTH, WIDTH, "float16")
                times = measured(case, flags.implementations)
                for name in flags.implementations:
                    launches, moved = predicted(case, name, compiled)
                    cost = case.expand_cost if name == EXPAND else case.cost
                    yield Row(
                        name, popularity, batch, rank, len(case.lengths), launches, cost.flops,
                        cost.bytes, *replace(compiled, launches=launches).call_us(moved),
                        times[name],
                    )  # fmt: skip
    jax.clear_caches()


def of(rows: Sequence[Row], implementation: str, popularity: str, rank: int) -> list[Row]:
    """Rows of one implementation, popularity and rank, by batch size."""
    key = implementation, popularity, rank
    return [r for r in rows if (r.implementation, r.popularity, r.rank) == key]


def middle_us(row: Row) -> float:
    return (row.least_us + row.most_us) / 2


def growth(mine: Sequence[Row]) -> tuple[float, float | None]:
    """The growth of predicted and of measured time from the smallest batch to the largest."""
    first, last = mine[0], mine[-1]
    return middle_us(last) / middle_us(first), last.us / first.us if last.us and first.us else None


def plot(axes: Axes, mine: Sequence[Row], colour: str, label: str) -> None:
    x = [row.batch for row in mine]
    low, high = [row.least_us for row in mine], [row.most_us for row in mine]
    axes.fill_between(x, low, high, alpha=0.35, color=colour, linewidth=0)
    axes.plot(x, [middle_us(row) for row in mine], ":", color=colour, label=label)
    if all(row.us is not None for row in mine):
        axes.plot(x, [row.us or 0 for row in mine], "o-", color=colour)
