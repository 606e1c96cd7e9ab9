"""Others' attention for the shapes of ours, where they can be imported: what to compare times with.

Not all of them read pages: JAX's on Mosaic, cuDNN and torch get the keys and values of each
sequence contiguous, which is less work than ours.
"""

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.specs import Attention
from pallas_kernels.tools.peers import jax_attention

SPECS = ("llama-2-7b", "llama-3-8b", "qwen2.5-7b")  # many peers are slow to compile
REPEATS = 10


@dataclass(frozen=True)
class PeerTiming:
    """Seconds of a call, or the problem that kept the peer from running."""

    op: str
    spec: str
    peer: str
    seconds: float | None
    problem: str | None = None


@dataclass(frozen=True)
class Peer:
    op: str
    spec: str
    name: str
    shapes: Attention

    def __str__(self) -> str:
        return f"{self.op} {self.spec} {self.name}"

    def time(self, device_seconds) -> PeerTiming:
        """device_seconds: times a function of JAX arrays."""
        try:
            seconds = PEERS[self.op, self.name](self.shapes, device_seconds)
            return PeerTiming(self.op, self.spec, self.name, seconds)
        except Exception as error:  # A peer's trouble of whatever kind is not ours.
            problem = f"{type(error).__name__}: {str(error)[:100]}".splitlines()[0]
            return PeerTiming(self.op, self.spec, self.name, None, problem)


def of(ops: Sequence[str], shapes: Mapping, small: bool) -> list[Peer]:
    """The peers of these ops, at some of the named `shapes` of each op."""
    peers = []
    for op, peer in PEERS:
        for name in SPECS if op in ops else ():
            one: Attention = shapes[op][0][name]
            peers.append(Peer(op, name, peer, _small(one) if small else one))
    return peers


def _small(shapes: Attention) -> Attention:
    return replace(shapes, sequences=1, context=64, chunk=min(shapes.chunk, 64))


def _contiguous(shapes: Attention, queries: int):
    """q [S, queries, H, D], k and v [S, context, K, D]."""
    S, (H, K, D) = shapes.sequences, (shapes.heads.H, shapes.heads.K, shapes.heads.D)
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(S, queries, H, D), (S, shapes.context, K, D), (S, shapes.context, K, D)]
    return [jax.random.normal(key, size, shapes.dtype) for key, size in zip(keys, sizes)]


def _jax_triton(shapes: Attention, device_seconds) -> float:
    paged = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    S, D = shapes.sequences, shapes.heads.D
    arrays = shapes.pages(jax.random.key(0))
    K, M = shapes.heads.K, shapes.context // shapes.page_size
    # Its pool has an axis of heads, which share one table.
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
    q, k, v = _contiguous(replace(shapes, dtype="float16"), shapes.chunk)
    return device_seconds(jax_attention(), q, k, v)


def _cudnn(queries: Callable[[Attention], int]):
    def run(shapes: Attention, device_seconds) -> float:
        q, k, v = _contiguous(shapes, queries(shapes))
        causal = q.shape[1] > 1
        return device_seconds(
            lambda q, k, v: jax.nn.dot_product_attention(
                q, k, v, is_causal=causal, implementation="cudnn"
            ),
            q, k, v,
        )  # fmt: skip

    return run


def _torch_seconds(torch, function: Callable) -> float:
    for _ in range(3):
        function()
    seconds = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def _torch_sdpa(queries: Callable[[Attention], int]):
    def run(shapes: Attention, _) -> float:
        torch = importlib.import_module("torch")
        dtype = getattr(torch, shapes.dtype)
        S, (H, K, D) = shapes.sequences, (shapes.heads.H, shapes.heads.K, shapes.heads.D)
        q = torch.randn(S, H, queries(shapes), D, dtype=dtype, device="cuda")
        k, v = torch.randn(2, S, K, shapes.context, D, dtype=dtype, device="cuda")
        attend = torch.nn.functional.scaled_dot_product_attention
        causal = q.shape[2] > 1
        return _torch_seconds(torch, lambda: attend(q, k, v, is_causal=causal, enable_gqa=K < H))

    return run


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


PEERS: dict[tuple[str, str], Callable] = {
    ("paged_attention", "JAX Triton"): _jax_triton,
    ("paged_attention", "FlashInfer"): _flashinfer_decode,
    ("paged_attention", "cuDNN, contiguous"): _cudnn(lambda shapes: 1),
    ("paged_attention", "torch SDPA, contiguous"): _torch_sdpa(lambda shapes: 1),
    ("paged_prefill_attention", "JAX Mosaic, contiguous float16"): _jax_mosaic,
    ("paged_prefill_attention", "FlashInfer, contiguous"): _flashinfer_prefill,
    ("paged_prefill_attention", "cuDNN, contiguous"): _cudnn(lambda shapes: shapes.chunk),
    ("paged_prefill_attention", "torch SDPA, contiguous"): _torch_sdpa(lambda shapes: shapes.chunk),
}
