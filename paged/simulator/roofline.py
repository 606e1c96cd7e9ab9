"""The roofline: the least time in which a machine can compute a step.

A step's `Cost`, FLOPs and bytes, follows from the model and the lengths of the sequences. A
machine's `Rates` are measured here. (`pallas_kernels.specs` defines both classes.) Arithmetic and
memory traffic overlap at best, so the floor is the longer of their times, plus the time to dispatch
empty programs:

    floor = max(flops / flops_per_s, bytes / bytes_per_s) + dispatches * dispatch_s
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from models import lora
from models.config import ModelConfig
from models.families import family
from models.params import flatten
from paged.kv_cache.vllm.layout import VLLMLayout
from paged.kv_cache.work import Heads, Layout, kv_bytes_of_token
from pallas_kernels.specs import Cost

SQUARE = 2048  # rows of the square matrices


def step_cost(
    model: ModelConfig, contexts: Sequence[int], new_tokens: Sequence[int] | None = None,
    dtype="float32", layout: Layout | None = None,
) -> Cost:  # fmt: skip
    """The cost of one step that samples one token of each sequence.

    contexts: tokens of each sequence in the cache after the step.
    new_tokens: tokens of each sequence that the step computes; by default 1, a decode step.
    dtype: dtype of weights and KV cache.
    layout: the KV policy's layout; by default the vllm policy's.

    FLOPs include matrix products and attention, but no norms, activations, rotations and softmax.
    Bytes include each used weight once, and attention's traffic by `layout.work`: keys and values
    are read once for earlier tokens, and written once for new tokens. Bytes do not include
    activations, which are assumed to stay in the processor's caches.

    Raises ValueError if there is no sequence, if contexts and new_tokens differ in length, or if a
    sequence has fewer new tokens than 1 or more than its context.
    """
    context = np.asarray(contexts, np.int64)
    new = np.ones_like(context) if new_tokens is None else np.asarray(new_tokens, np.int64)
    if not context.size or new.size != context.size:
        raise ValueError(f"{context.size} contexts with {new.size} numbers of new tokens")
    for i in np.flatnonzero((new < 1) | (new > context)):
        raise ValueError(f"{new[i]} new tokens in a context of {context[i]}")
    weights, tokens = _weights(model), int(new.sum())
    attention = _attention(layout or _vllm(model, dtype), model, context, new, dtype)
    itemsize, L = jnp.dtype(dtype).itemsize, model.num_layers
    return Cost(
        bytes=itemsize * (weights.numbers + tokens * weights.looked_up)
        + round(L * attention.bytes),
        flops=tokens * weights.token_flops
        + len(context) * weights.sequence_flops
        + round(L * attention.flops),
    )


def _vllm(model: ModelConfig, dtype) -> VLLMLayout:
    return VLLMLayout(Heads.of(model, dtype), jnp.dtype(dtype).itemsize, model.attention.windows)


def _attention(
    layout: Layout, model: ModelConfig, contexts: np.ndarray, new_tokens: np.ndarray, dtype
) -> Cost:
    """A layer's attention cost, as a mean over layers. Bytes exclude queries and outputs, and
    include keys and values of new tokens once, as attention's reads."""
    parts = [cost for name, cost in layout.work(contexts, new_tokens).items() if name != "writes"]
    of_token = 2 * model.num_heads * model.head_dim * jnp.dtype(dtype).itemsize
    queries = of_token * int(new_tokens.sum())
    return Cost(sum(cost.bytes for cost in parts) - queries, sum(cost.flops for cost in parts))


def lora_cost(model: ModelConfig, rank: int, adapters: int, tokens: int, dtype="float32") -> Cost:
    """The cost that LoRA adapters of all projections add to a step (Punica §4).

    rank: rank of every adapter.
    adapters: number of distinct adapters of the step. Each is read once, in whole rank pages.
    tokens: the step's tokens with an adapter.
    """
    declared = lora.declare(model).values()
    of_page = sum(math.prod(param.shape) for matrices in declared for param in matrices.values())
    numbers = lora.num_pages(rank) * of_page
    return Cost(adapters * numbers * jnp.dtype(dtype).itemsize, 2 * tokens * numbers)


@dataclass(frozen=True)
class _Weights:
    """The cost of a model's parameters.

    numbers: parameters that every step reads.
    looked_up: numbers that each token looks up in embedding tables.
    token_flops: FLOPs of each token.
    sequence_flops: FLOPs of each token with logits.
    """

    numbers: int
    looked_up: int
    token_flops: int
    sequence_flops: int


@functools.cache
def _weights(model: ModelConfig) -> _Weights:
    declared = flatten(family(model).declare(model))
    numbers = looked_up = token_flops = sequence_flops = 0
    for name, param in declared.items():
        size = math.prod(param.shape)
        if name == "positions" or (name == "embed" and "lm_head" in declared):
            looked_up += param.shape[-1]
            continue
        numbers += size
        if name in ("embed", "lm_head", "project_out"):
            sequence_flops += 2 * size
        elif len(param.shape) == 2:
            token_flops += 2 * size
    return _Weights(numbers, looked_up, token_flops, sequence_flops)


def layer_bytes(
    model: ModelConfig, contexts: Sequence[int], new_tokens: Sequence[int], dtype
) -> dict[str, int]:
    """Least bytes of one layer, by kind of traffic, if each product and attention are separate
    kernels that exchange arrays through memory.

    contexts, new_tokens, dtype: as in `step_cost`. Attention also reads the new tokens' keys and
    values. Windows are ignored.
    """
    E, F = model.hidden_size, model.intermediate_size
    HD, KD = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    itemsize, context, new = jnp.dtype(dtype).itemsize, np.array(contexts), np.array(new_tokens)
    whole = replace(_vllm(model, dtype), windows=(None,))
    layer = family(model).declare(model)["layers"][0].values()
    # Inputs and outputs of the products q/k/v, o, gate/up and down.
    activations = (E + HD + 2 * KD) + (HD + E) + (E + 2 * F) + (F + E)
    return {
        "weights": sum(math.prod(param.shape) for param in layer) * itemsize,
        "KV read": round(_attention(whole, model, context, new, dtype).bytes),
        "KV written": sum(new_tokens) * kv_bytes_of_token(model, dtype),
        "activations": sum(new_tokens) * itemsize * activations,
    }


def measure(
    model: ModelConfig, batch: int, seconds: float = 0.5, streamed_bytes: int = 2**29
) -> dict[str, float]:
    """Rates of the default JAX device for `Rates.best`, each the best of repeated measurements:

    step_flops_per_s: float32 products of a step's shape, [batch, E] × [E, F], with warm caches.
    square_flops_per_s: float32 products of large square matrices.
    read_bytes_per_s: reading an array far larger than the caches (in a matrix-vector product).
    copy_bytes_per_s: copying such an array, with bytes read plus bytes written.
    dispatch_s: calling a jitted program that adds one number, and waiting for it.

    seconds: approximate time of each measurement.
    streamed_bytes: size of the arrays that are read and copied; caches must be far smaller.

    On a CPU both numpy and JAX compute the matrix products, and the faster rate is returned.
    """
    E, F = model.hidden_size, model.intermediate_size
    one = jax.jit(lambda x: x + 1)
    zero = jnp.zeros(())
    return {
        "step_flops_per_s": _product_rate(batch, E, F, seconds),
        "square_flops_per_s": _product_rate(SQUARE, SQUARE, SQUARE, seconds),
        "read_bytes_per_s": _read_rate(streamed_bytes, seconds),
        "copy_bytes_per_s": _copy_rate(streamed_bytes, seconds),
        "dispatch_s": _best_s(lambda: one(zero).block_until_ready(), seconds),
    }


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
    """Seconds of the fastest call. After a warm-up call, calls repeat for `seconds` seconds, at
    least three times."""
    run()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
