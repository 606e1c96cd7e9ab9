"""The floor of an engine step: the time below which this machine cannot compute it.

A step of a model must do certain arithmetic (`Work.flops`) and move certain bytes between memory
and processor (`Work.bytes`), which follow from the model and the lengths of the sequences. The
machine's `Rates` are measured. The two overlap at best, so the floor is the longer of both, plus
what it takes to dispatch programs that do nothing:

    floor = max(flops / flops_per_s, bytes / bytes_per_s) + dispatches * dispatch_s
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.families import family
from models.params import flatten

SQUARE = 2048  # rows of the square matrices


@dataclass(frozen=True)
class Work:
    """What a step cannot do without.

    flops: multiplications and additions of matrix products and attention; norms, activations,
    rotations and softmax are left out.
    bytes: every weight that is used read once, keys and values of earlier tokens read once, those
    of the new tokens written once; activations are taken to stay in the caches.
    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Rates:
    """What a machine can do, each the best of repeated measurements.

    step_flops_per_s: float32 products of a step's shape, [batch, E] × [E, F], with warm caches.
    square_flops_per_s: the same of large square matrices.
    read_bytes_per_s: reading an array far larger than the caches (in a matrix-vector product).
    copy_bytes_per_s: copying one to another; bytes read and bytes written both count.
    dispatch_s: calling a jitted program that adds one number, and waiting for it.
    """

    step_flops_per_s: float
    square_flops_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float
    dispatch_s: float

    @property
    def flops_per_s(self) -> float:
        """The faster one: what is a floor must not rest on a slow product."""
        return max(self.step_flops_per_s, self.square_flops_per_s)

    @property
    def bytes_per_s(self) -> float:
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)


def step_work(
    model: ModelConfig, contexts: Sequence[int], new_tokens: Sequence[int] | None = None,
    bytes_per_number: int = 4,
) -> Work:  # fmt: skip
    """The work of one step that samples one token of each sequence.

    contexts: tokens of each sequence in the cache after the step. new_tokens: how many of them this
    step computes; one each, a decode step, by default. bytes_per_number: of weights and KV cache.

    Raises ValueError if there is no sequence, or one whose new tokens are not within 1 and its
    context.
    """
    new = [1] * len(contexts) if new_tokens is None else list(new_tokens)
    if not contexts or len(new) != len(contexts):
        raise ValueError(f"{len(contexts)} contexts with {len(new)} numbers of new tokens")
    for context, count in zip(contexts, new):
        if not 1 <= count <= context:
            raise ValueError(f"{count} new tokens in a context of {context}")
    T, S, L = sum(new), len(contexts), model.num_layers
    H, K, D = model.num_heads, model.num_kv_heads, model.head_dim
    window = model.sliding_window or max(contexts)

    flops, numbers = 0.0, 0.0
    declared = flatten(family(model).declare(model))
    for name, param in declared.items():
        size = float(np.prod(param.shape))
        rows = T  # that this parameter meets
        if name == "positions" or (name == "embed" and "lm_head" in declared):
            numbers += T * param.shape[-1]  # looked up, not multiplied
            continue
        if name in ("embed", "lm_head", "project_out"):
            rows = S
        numbers += size
        if len(param.shape) == 2:
            flops += 2 * rows * size

    for context, count in zip(contexts, new):
        seen = sum(min(position, window) for position in range(context - count + 1, context + 1))
        flops += 2 * 2 * L * H * D * seen  # q·k, and its weights times v
        first_seen = max(0, context - count + 1 - window)
        numbers += 2 * L * K * D * (context - first_seen)  # earlier tokens read, new ones written
    return Work(flops, numbers * bytes_per_number)


def floor_s(work: Work, rates: Rates, dispatches: float = 1.0) -> float:
    """Seconds; dispatches: programs that the step starts (a fraction if one runs several steps)."""
    return (
        max(work.flops / rates.flops_per_s, work.bytes / rates.bytes_per_s)
        + dispatches * rates.dispatch_s
    )


def measure(
    model: ModelConfig, batch: int, seconds: float = 0.5, streamed_bytes: int = 2**29
) -> Rates:
    """The rates of the default JAX device, about `seconds` for each of the measurements.

    streamed_bytes: of the arrays that are read and copied; the caches must be far smaller.
    On a CPU numpy's matrix products compete with JAX's: whoever is faster has shown what the
    machine can do.
    """
    E, F = model.hidden_size, model.intermediate_size
    one = jax.jit(lambda x: x + 1)
    zero = jnp.zeros(())
    return Rates(
        step_flops_per_s=_product_rate(batch, E, F, seconds),
        square_flops_per_s=_product_rate(SQUARE, SQUARE, SQUARE, seconds),
        read_bytes_per_s=_read_rate(streamed_bytes, seconds),
        copy_bytes_per_s=_copy_rate(streamed_bytes, seconds),
        dispatch_s=_best_s(lambda: one(zero).block_until_ready(), seconds),
    )


def _product_rate(m: int, k: int, n: int, seconds: float) -> float:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    out = np.empty((m, n), np.float32)
    a_device, b_device = jnp.asarray(a), jnp.asarray(b)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    times = [_best_s(lambda: product(a_device, b_device).block_until_ready(), seconds)]
    if jax.default_backend() == "cpu":
        times.append(_best_s(lambda: np.matmul(a, b, out=out), seconds))
    return 2 * m * k * n / min(times)


def _read_rate(size: int, seconds: float) -> float:
    columns = 4096
    matrix = jnp.ones((size // 4 // columns, columns), jnp.float32)
    vector = jnp.ones(columns, jnp.float32)
    product = jax.jit(jnp.matmul)
    times = [_best_s(lambda: product(matrix, vector).block_until_ready(), seconds)]
    if jax.default_backend() == "cpu":
        a, b = np.asarray(matrix), np.asarray(vector)
        times.append(_best_s(lambda: np.matmul(a, b), seconds))
    return matrix.nbytes / min(times)


def _copy_rate(size: int, seconds: float) -> float:
    array = jnp.ones(size // 4, jnp.float32)
    # A bare copy would be compiled to nothing; the donated buffer is written in place.
    copy = jax.jit(lambda x, out: out.at[:].set(-x), donate_argnums=1)
    out = [jnp.zeros_like(array)]

    def run():
        out[0] = copy(array, out[0]).block_until_ready()

    return 2 * array.nbytes / _best_s(run, seconds)


def _best_s(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of the calls that `seconds` allow, at least three, one to warm up."""
    run()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
