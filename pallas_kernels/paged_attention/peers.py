"""Other libraries' kernels for the same shapes, for comparison, if they can be imported.

JAX's kernel on Mosaic, FlashInfer's prefill, cuDNN and torch read contiguous keys and values, which
is less work than pages.
"""

import importlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.backend import GPU
from pallas_kernels.specs import Attention

Compiled = tuple[Callable, tuple]  # a function and its arguments
DTYPE = "float16"  # the only dtype of JAX's attention
TIMED = ("llama-2-7b", "llama-3-8b", "qwen2.5-7b")  # few specs, because many peers compile slowly
_REPEATS = 10


def compiled(spec: str, shapes: Mapping[str, Attention]) -> dict[tuple[str, str], Callable]:
    """The peers that are compiled for comparison with prefill (`Op.peers`)."""
    peers = {
        "jax attention_mgpu": _attention,
        "jax hopper_matmul_mgpu": _matmul,
        "tokamax attention": _tokamax,
    }
    return {(spec, name): partial(peer, shapes[spec]) for name, peer in peers.items()}


def timed(
    peers: Mapping[str, Callable], shapes: Mapping[str, Attention], small: bool
) -> dict[tuple[str, str], Callable]:
    """The peers that are timed for comparison with an op (`Op.timed_peers`)."""
    return {
        (spec, name): partial(peer, _small(shapes[spec]) if small else shapes[spec])
        for name, peer in peers.items()
        for spec in TIMED
    }


def _jax_attention() -> Callable:
    """JAX's own causal attention on Mosaic, with FlashAttention-3's schedule.

    Its arguments are q [B, T, H, D], and k and v [B, T, K, D], in float16; T is a multiple of 128.
    """
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    config = module.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    return partial(module.attention, config=config)


def _attention(shapes: Attention, _: GPU) -> Compiled:
    H, K, D = shapes.heads.H, shapes.heads.K, shapes.heads.D
    q, k = (jax.ShapeDtypeStruct((1, shapes.chunk, heads, D), DTYPE) for heads in (H, K))
    return _jax_attention(), (q, k, k)


def _matmul(shapes: Attention, gpu: GPU) -> Compiled:
    """The product [chunk, H * D] times [H * D, H * D], as in the projections beside attention."""
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu")
    width = shapes.heads.H * shapes.heads.D
    a, b = (jax.ShapeDtypeStruct((rows, width), DTYPE) for rows in (shapes.chunk, width))
    # The original function queries the GPU, which is absent.
    module.get_num_sms = lambda: gpu.num_multiprocessors  # type: ignore[attr-defined]
    config = module.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    return lambda a, b: module.matmul(a, b, None, config), (a, b)


def _tokamax(shapes: Attention, gpu: GPU) -> Compiled:
    tokamax = importlib.import_module("tokamax")
    _, arguments = _attention(shapes, gpu)
    return (
        partial(tokamax.dot_product_attention, is_causal=True, implementation="mosaic"),
        arguments,
    )


def _small(shapes: Attention) -> Attention:
    return replace(shapes, sequences=1, context=64, chunk=min(shapes.chunk, 64))


def _queries(shapes: Attention) -> int:
    return max(1, shapes.chunk)


def _contiguous(shapes: Attention):
    """q [S, queries, H, D], k and v [S, context, K, D]."""
    S, (H, K, D) = shapes.sequences, (shapes.heads.H, shapes.heads.K, shapes.heads.D)
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(S, _queries(shapes), H, D), (S, shapes.context, K, D), (S, shapes.context, K, D)]
    return [jax.random.normal(key, size, shapes.dtype) for key, size in zip(keys, sizes)]


def _jax_triton(shapes: Attention, device_seconds) -> float:
    paged = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    S, D = shapes.sequences, shapes.heads.D
    arrays = shapes.pages(jax.random.key(0))
    K, M = shapes.heads.K, shapes.context // shapes.page_size
    # JAX's pool has an axis of heads, and all heads share one table.
    pools = [
        arrays[name].reshape(K, S * M, shapes.page_size, D)
        for name in ("k_pages_NxPxD", "v_pages_NxPxD")
    ]
    table = jax.random.permutation(jax.random.key(1), S * M).reshape(S, M).astype(jnp.int32)
    lengths = jnp.full(S, shapes.context, jnp.int32)
    q = shapes.queries(jax.random.key(2), S)
    return min(
        device_seconds(
            lambda *a, splits=splits: paged.paged_attention(*a, k_splits=splits),
            q, *pools, table, lengths,
        )
        for splits in (1, 4, 16)
    )  # fmt: skip


def _jax_mosaic(shapes: Attention, device_seconds) -> float:
    return device_seconds(_jax_attention(), *_contiguous(replace(shapes, dtype="float16")))


def _cudnn(shapes: Attention, device_seconds) -> float:
    causal = _queries(shapes) > 1
    attend = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    return device_seconds(attend, *_contiguous(shapes))


def _torch_seconds(torch, function: Callable) -> float:
    for _ in range(3):
        function()
    seconds = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def _torch_sdpa(shapes: Attention, _) -> float:
    torch = importlib.import_module("torch")
    dtype = getattr(torch, shapes.dtype)
    S, (H, K, D) = shapes.sequences, (shapes.heads.H, shapes.heads.K, shapes.heads.D)
    q = torch.randn(S, H, _queries(shapes), D, dtype=dtype, device="cuda")
    k, v = torch.randn(2, S, K, shapes.context, D, dtype=dtype, device="cuda")
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = q.shape[2] > 1
    return _torch_seconds(torch, lambda: attend(q, k, v, is_causal=causal, enable_gqa=K < H))


def _flashinfer_decode(shapes: Attention, _) -> float:
    torch, flashinfer = map(importlib.import_module, ("torch", "flashinfer"))
    dtype = getattr(torch, shapes.dtype)
    S, (H, K, D) = shapes.sequences, (shapes.heads.H, shapes.heads.K, shapes.heads.D)
    M, P = shapes.context // shapes.page_size, shapes.page_size
    pool = torch.randn(S * M, 2, P, K, D, dtype=dtype, device="cuda")
    indices = torch.randperm(S * M, device="cuda").int()
    starts = torch.arange(0, S * M + 1, M, device="cuda").int()
    last = torch.full((S,), P, device="cuda").int()
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(starts, indices, last, H, K, D, P, q_data_type=dtype)
    q = torch.randn(S, H, D, dtype=dtype, device="cuda")
    return _torch_seconds(torch, lambda: wrapper.run(q, pool))


def _flashinfer_prefill(shapes: Attention, _) -> float:
    torch, flashinfer = map(importlib.import_module, ("torch", "flashinfer"))
    dtype = getattr(torch, shapes.dtype)
    H, K, D = shapes.heads.H, shapes.heads.K, shapes.heads.D
    q = torch.randn(shapes.chunk, H, D, dtype=dtype, device="cuda")
    k, v = torch.randn(2, shapes.context, K, D, dtype=dtype, device="cuda")
    return _torch_seconds(
        torch, lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    )


_CONTIGUOUS = {"cuDNN, contiguous": _cudnn, "torch SDPA, contiguous": _torch_sdpa}
DECODE = {"JAX Triton": _jax_triton, "FlashInfer": _flashinfer_decode, **_CONTIGUOUS}
PREFILL = {
    "JAX Mosaic, contiguous float16": _jax_mosaic,
    "FlashInfer, contiguous": _flashinfer_prefill,
    **_CONTIGUOUS,
}
