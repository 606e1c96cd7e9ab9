"""Descriptions of ops for tools: implementations, and named arguments in real models' shapes.

Tests, ahead-of-time compilation and benchmarks share the descriptions. A spec holds no arrays. Its
function `arguments` draws random arrays, and `Spec.shapes` returns only their shapes.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend
from pallas_kernels.backend import GPU, MADE_FOR
from pallas_kernels.quantization import KVFormat, QuantizedPages, quantize
from pallas_kernels.tools.balance import Balance

Arrays = Mapping[str, Any]  # a call's arguments
Results = list[np.ndarray]
Errors = tuple[np.ndarray, float]


@dataclass(frozen=True)
class Heads:
    """Query heads H, KV heads K and head dim D."""

    H: int
    K: int
    D: int = 128


HEADS = {
    "llama-2-7b": Heads(32, 32),
    "llama-2-13b": Heads(40, 40),
    "llama-2-70b": Heads(64, 8),
    "llama-3-8b": Heads(32, 8),
    "llama-3-70b": Heads(64, 8),
    "opt-13b": Heads(40, 40),
    "qwen2.5-7b": Heads(28, 4),
    "qwen2.5-32b": Heads(40, 8),
    "minitron-4b": Heads(24, 8),
    "bundled": Heads(8, 4, 64),
}


@dataclass(frozen=True)
class Cost:
    """The bytes read and written and the FLOPs that every implementation needs at least."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Rates:
    """The best rates of a machine.

    dispatch_s: seconds to start a program and wait for it.
    """

    bytes_per_s: float
    flops_per_s: float
    dispatch_s: float = 0.0

    @classmethod
    def best(cls, measured: Mapping[str, float]) -> "Rates":
        """The fastest of several measurements of each kind, because a floor must not depend on a
        slow program. The kind is the suffix of a measurement's name."""
        bytes_per_s, flops_per_s = (
            max(rate for name, rate in measured.items() if name.endswith(kind))
            for kind in ("bytes_per_s", "flops_per_s")
        )
        return cls(bytes_per_s, flops_per_s, measured.get("dispatch_s", 0.0))

    def floor_s(self, cost: Cost, dispatches: float = 1.0) -> float:
        """The least seconds for a cost.

        dispatches: the number of started programs, a fraction if one program runs several steps.
        """
        longer = max(cost.bytes / self.bytes_per_s, cost.flops / self.flops_per_s)
        return longer + dispatches * self.dispatch_s


@dataclass(frozen=True)
class Spec:
    """One call of an op.

    op: the op's public function.
    arguments: (random key) -> the random arrays of the call, or trees of arrays, by keyword.
    cost: (arrays by keyword) -> the cost of the call.
    options: the static keywords of the call.
    donated: the names of the arrays that the op may write in place.
    indices: the names of the arrays that `cost`, `plan` and `balance` need.
    plan: (arrays `indices`, name of the implementation) -> the schedule, which is computed once for
        all layers of a step. None if the call takes no schedule.
    planned_as: the keyword of the schedule.
    balance: (schedule from `plan`, arrays `indices` by name) -> balance of the schedule.
    most_pages: the most pages of a pool that the op accepts; None for any number.
    defined: (arguments, results) -> the results that are not arbitrary.
    compare: (arguments, `defined` results) -> errors, and the largest ratio of an error to its own
        tolerance. If `compare` is None, results must equal `reference`.
    """

    op: Callable
    arguments: Callable[[jax.Array], dict[str, Any]]
    cost: Callable[[dict[str, jax.Array]], Cost]
    options: Mapping[str, Any] = field(default_factory=dict)
    donated: tuple[str, ...] = ()
    indices: tuple[str, ...] = ()
    plan: Callable[[dict[str, jax.Array], str | None], Any] | None = None
    planned_as: str = "schedule"
    balance: Callable[..., Balance] | None = None
    most_pages: int | None = None
    defined: Callable[[Arrays, Results], Results] = lambda arguments, results: results
    compare: Callable[[Arrays, Results], Errors] | None = None

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return jax.eval_shape(self.arguments, jax.random.key(0))

    def drawn_indices(self) -> dict[str, jax.Array]:
        """The arrays `indices` for a fixed random key. All other arrays use no memory."""
        draw = jax.jit(lambda key: {name: self.arguments(key)[name] for name in self.indices})
        return draw(jax.random.key(0))

    def planned(self, arguments, implementation: str | None) -> dict[str, Any]:
        """`plan` of these arguments, by keyword; {} if there is nothing to plan."""
        if self.plan is None:
            return {}
        indices = {name: arguments[name] for name in self.indices}
        return {self.planned_as: self.plan(indices, implementation)}

    def results(self, arguments: Arrays, out: Any) -> Results:
        """The arrays of a call's output `out` that are not arbitrary."""
        return self.defined(arguments, [np.asarray(x) for x in jax.tree.leaves(out)])

    def errors(self, arguments: Arrays, found: Results) -> Errors:
        """Absolute errors of `found`, and the largest ratio of an error to its own tolerance."""
        if self.compare is not None:
            return self.compare(arguments, found)
        expected = self.results(arguments, reference(self.op, self.options, arguments))
        with np.errstate(invalid="ignore"):  # equal infinities do not differ
            differences = [
                np.where(f == e, 0, abs(np.subtract(f, e, dtype=np.float32)))
                for f, e in zip(found, expected)
            ]
        errors = np.stack([np.max(each) for each in differences])
        return errors, math.inf if errors.any() else 0.0


def reference(op: Callable, options: Mapping[str, Any], arguments: Arrays) -> Any:
    """The output of an op's reference implementation."""
    return jax.jit(partial(op, implementation="reference", **options))(**arguments)


def some[T](named: Mapping[str, T], small: bool) -> Mapping[str, T]:
    """The named shapes to check. If `small`, these are only the shapes of the bundled model."""
    return {"small": named["bundled"]} if small else named


def without_padding(arguments: Arrays, results: Results) -> Results:
    """Results of a ragged batch without the rows after the last sequence, which are arbitrary."""
    return [x[: arguments["query_starts"][-1]] for x in results]


@dataclass(frozen=True)
class Gates:
    """Requirements of an op's compiled kernels, in addition to the requirements of all kernels.

    resident: kernel -> thread blocks that must fit a multiprocessor at a time; 1 by default.
    most_launches: the most launches of the op on the device; None for any number.
    balanced: spec -> the most bytes of partial results for each byte of keys and values. Only these
        specs must give thread blocks equal parts of the work on Hopper.
    """

    resident: Mapping[str, int] = field(default_factory=dict)
    most_launches: int | None = None
    balanced: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    """One op, described for tools and checks.

    implementations: name -> implementation.
    specs: named arguments, in real models' shapes.
    checked: (small) -> named arguments that are small enough for `reference`; if `small`, tiny
        arguments for the interpreter.
    kernels: the names of the Mosaic kernels that a call launches on Hopper.
    reused: whether thread blocks read the same operands, so that the L2 cache holds them.
    slow_as_xla: specs for which XLA takes as long as many runs of the kernel.
    peers: other libraries' kernels, to be compiled for Hopper. (spec's name, peer's name) ->
        a function (GPU) -> (function to compile, its arguments).
    timed_peers: (small) -> peers to be timed. (spec's name, peer's name) -> a function
        (device_seconds) -> seconds of the peer's call on this machine. device_seconds times a
        function of JAX arrays.
    """

    implementations: Mapping[str, Callable]
    specs: Mapping[str, Spec]
    checked: Callable[[bool], Mapping[str, Spec]]
    kernels: tuple[str, ...]
    gates: Gates = Gates()
    reused: bool = False
    slow_as_xla: Collection[str] = ()
    peers: Mapping[tuple[str, str], Callable[[GPU], tuple[Callable, tuple]]] = field(
        default_factory=dict
    )
    timed_peers: Callable[[bool], Mapping[tuple[str, str], Callable]] = lambda small: {}

    def kernel_for(self, compute_capability: tuple[int, int]) -> str | None:
        """The name of the kernel for GPUs of this compute capability, or None."""
        for name, major in MADE_FOR.items():
            if major == compute_capability[0] and name in self.implementations:
                return name
        return None

    def balance(self, spec: str, gpu: GPU) -> Balance | None:
        """The balance of the schedule of a call on a GPU; None without a schedule."""
        kernel, named = self.kernel_for(gpu.compute_capability), self.specs[spec]
        if kernel is None or named.balance is None:
            return None
        with backend.compiling_for(gpu):
            drawn = named.drawn_indices()
            # One program, because a plan without jit compiles about ninety programs.
            (plan,) = jax.jit(lambda arrays: named.planned(arrays, kernel))(drawn).values()
            return named.balance(plan, **drawn)


@dataclass(frozen=True)
class Attention:
    """The shapes of a call of an attention op.

    heads: the model's heads.
    sequences: the number of sequences.
    context: the most tokens of a sequence.
    chunk: the number of a sequence's last tokens that a prefill computes.
    page_size: tokens of a page.
    ragged: whether lengths are random, except that sequence 0 has `context` tokens, and sequences 2
        to 4 have 0, 1 and `page_size` + 1. Otherwise every sequence has `context` tokens, unless
        `tokens` is given.
    tokens: the length of each sequence, if lengths are neither random nor all equal. Tables still
        have room for `context` tokens.
    scores_std: the standard deviation of scores, before a soft cap.
    kv_bits: bits of keys and values; 16 means `dtype`, and fewer bits mean quantised pages.

    Raises ValueError if `tokens` does not fit the other fields.
    """

    heads: Heads
    sequences: int = 64
    context: int = 4096
    chunk: int = 0
    page_size: int = 16
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    soft_cap: float | None = None
    ragged: bool = False
    tokens: tuple[int, ...] | None = None
    scores_std: float = 1.0
    kv_bits: int = 16

    def __post_init__(self):
        if self.tokens is not None and (
            self.ragged
            or len(self.tokens) != self.sequences
            or not all(0 <= tokens <= self.context for tokens in self.tokens)
        ):
            raise ValueError(
                f"{self.sequences} sequences of at most {self.context} tokens, "
                f"ragged={self.ragged}, cannot have {self.tokens} tokens"
            )

    @property
    def format(self) -> KVFormat | None:
        """The format of quantised keys and of quantised values; None if pages are of `dtype`."""
        return KVFormat(self.kv_bits, self.heads.D) if self.kv_bits < 16 else None

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys in one KV head. Its values have as many bytes."""
        if self.format:
            return self.format.token_bytes
        return self.heads.D * jnp.dtype(self.dtype).itemsize

    @property
    def options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap}

    def pages(self, key) -> dict[str, jax.Array]:
        """Pools, and tables with all pages of the pools in random order. With `tokens`, pools have
        only the pages of these tokens, and unused entries of tables are page id 0."""
        K, D = self.heads.K, self.heads.D
        M = -(-self.context // self.page_size)
        held = np.full(self.sequences, M)
        if self.tokens is not None:
            held = -(-np.array(self.tokens) // self.page_size)
        N = max(1, K * int(held.sum()))
        keys = jax.random.split(key, 3)
        pool = (N, self.page_size, D)
        pages = jax.random.permutation(keys[2], N).astype(jnp.int32)
        entry = np.broadcast_to(np.arange(M), (self.sequences, K, M))
        ends = np.cumsum(np.repeat(held, K)).reshape(self.sequences, K, 1)
        place = np.minimum(ends - held[:, None, None] + entry, N - 1)
        return {
            "k_pages_NxPxD": self._pool(keys[0], pool),
            "v_pages_NxPxD": self._pool(keys[1], pool),
            "tables_SxKxM": jnp.where(entry < held[:, None, None], pages[place], 0),
        }

    def _pool(self, key, shape):
        if not self.format:
            return jax.random.normal(key, shape, self.dtype)
        both = quantize(jax.random.normal(key, shape), self.format)
        words = jnp.concatenate([x.reshape(shape[0], -1) for x in both], axis=1)
        return QuantizedPages(words, self.format, self.page_size)

    def cost(self, visible, read) -> Cost:
        """The cost of attention over all heads.

        visible: [queries], the number of tokens that each query sees.
        read: [S], the number of tokens of each sequence that any query sees.
        """
        H, K, D = self.heads.H, self.heads.K, self.heads.D
        size = jnp.dtype(self.dtype).itemsize
        visible, read = np.asarray(visible, np.int64), np.asarray(read, np.int64)
        queries_and_outputs = 2 * visible.size * H * D * size
        return Cost(
            bytes=queries_and_outputs + int(read.sum()) * 2 * K * self.kv_token_bytes,
            flops=4 * H * D * int(visible.sum()),
        )

    def queries(self, key, count: int) -> jax.Array:
        drawn = jax.random.normal(key, (count, self.heads.H, self.heads.D), self.dtype)
        return drawn * jnp.asarray(self.scores_std, self.dtype)

    def lengths(self, key) -> jax.Array:
        """The tokens of each sequence, [S] int32."""
        S = self.sequences
        if self.tokens is not None:
            return jnp.array(self.tokens, jnp.int32)
        if not self.ragged:
            return jnp.full(S, self.context, jnp.int32)
        drawn = jax.random.randint(key, (S,), 1, self.context + 1, jnp.int32)
        edges = jnp.array([0, 1, self.page_size + 1], jnp.int32)
        return jnp.concatenate([drawn[:2].at[0].set(self.context), edges, drawn])[:S]
