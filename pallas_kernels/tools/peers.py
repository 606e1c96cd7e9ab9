"""Others' kernels for the shapes of ours, compiled ahead of time: what they do a tile and a byte.

A peer that cannot be imported or compiled is named with the reason; that is never a failure.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from pallas_kernels.backend import GPU
from pallas_kernels.paged_attention.specs import PREFILL_SHAPES
from pallas_kernels.tools import predict
from pallas_kernels.tools.compiled import Kernel, compile_function
from pallas_kernels.tools.targets import TARGETS

SPEC = "llama-3-8b"  # of prefill, whose shapes the peers get
DTYPE = "float16"  # JAX's attention takes no other.


@dataclass(frozen=True)
class PeerReport:
    """A peer's kernel, or the problem that kept it from compiling."""

    target: str
    peer: str
    kernel: Kernel | None
    problem: str | None = None


def of(op: str, spec: str, gpu: GPU) -> Sequence[str]:
    """The names of the peers of an op with a spec; all are for Hopper."""
    wanted = (op, spec) == ("paged_prefill_attention", SPEC)
    return tuple(PEERS) if wanted and gpu.compute_capability[0] == 9 else ()


def compile_peer(target: str, peer: str) -> PeerReport:
    """In a new process, as `compile_function` asks."""
    try:
        function, arguments = PEERS[peer](TARGETS[target].gpu)
        compiled = compile_function(
            lambda _, arguments: function(*arguments), (), arguments, target, reused=True
        )
        kernel = next(kernel for kernel in compiled.kernels if kernel.prediction)
        return PeerReport(target, peer, kernel)
    except Exception as error:  # A peer's trouble of whatever kind is not ours.
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        return PeerReport(target, peer, None, problem)


def jax_attention() -> Callable:
    """JAX's own causal attention on Mosaic, with FlashAttention-3's schedule: of q [B, T, H, D],
    and of k and v [B, T, K, D], in float16; T is a multiple of 128."""
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    config = module.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    return partial(module.attention, config=config)


def _attention(_: GPU) -> tuple[Callable, tuple]:
    shapes = PREFILL_SHAPES[SPEC]
    H, K, D = shapes.heads.H, shapes.heads.K, shapes.heads.D
    q, k = (jax.ShapeDtypeStruct((1, shapes.chunk, heads, D), DTYPE) for heads in (H, K))
    return jax_attention(), (q, k, k)


def _matmul(gpu: GPU) -> tuple[Callable, tuple]:
    """[chunk, H * D] times [H * D, H * D], as the projections beside attention."""
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu")
    shapes = PREFILL_SHAPES[SPEC]
    width = shapes.heads.H * shapes.heads.D
    a, b = (jax.ShapeDtypeStruct((rows, width), DTYPE) for rows in (shapes.chunk, width))
    # It would ask the GPU, which is not here.
    module.get_num_sms = lambda: gpu.num_multiprocessors  # type: ignore[attr-defined]
    config = module.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    return lambda a, b: module.matmul(a, b, None, config), (a, b)


def _tokamax(gpu: GPU) -> tuple[Callable, tuple]:
    tokamax = importlib.import_module("tokamax")
    _, arguments = _attention(gpu)
    return (
        partial(tokamax.dot_product_attention, is_causal=True, implementation="mosaic"),
        arguments,
    )


PEERS: dict[str, Callable[[GPU], tuple[Callable, tuple]]] = {
    "jax attention_mgpu": _attention,
    "jax hopper_matmul_mgpu": _matmul,
    "tokamax attention": _tokamax,
}


def columns(kernel: Kernel) -> list[str]:
    """Of a loop over tiles: KB in flight and needed, instructions of a warp that multiplies and of
    one that fetches, their barriers, what they wait for, and what they reach."""
    loop, found, fetching = kernel.loop, kernel.prediction, kernel.fetching
    assert loop is not None and found is not None
    both = [loop, fetching] if fetching else [loop]
    return [
        f"{found.in_flight / 1024:.0f}",
        f"{found.needed_in_flight / 1024:.0f}",
        "+".join(str(one.instructions) for one in both),
        "+".join(str(one.block_barriers) for one in both),
        "+".join(str(one.transaction_barriers) for one in both),
        found.bound,
        f"{predict.percent(found.shares)} of {found.of}",
    ]


def rows(peers: list[PeerReport], reports: list) -> list[list[str]]:
    """A table of peers and of our kernel for the same shapes. reports: as compile.py makes them."""
    header = (
        "target kernel registers threads resident KB-a-tile MFLOP-a-tile FLOP-a-byte "
        "KB-through-shared KB-in-flight needed instructions BAR SYNCS waits-for reaches"
    )
    found = [header.split()]
    targets = {peer.target for peer in peers}
    op = "paged_prefill_attention"
    ours = [
        (r.target, f"our {op}", kernel, None)
        for r in reports
        for kernel in r.kernels
        if r.target in targets and (r.op, r.spec) == (op, SPEC) and kernel.prediction
    ]
    for target, name, kernel, problem in ours + [
        (peer.target, peer.peer, peer.kernel, peer.problem) for peer in peers
    ]:
        if kernel is None:
            found.append([target, name, *["-"] * (len(found[0]) - 3), str(problem)])
            continue
        launch = kernel.launch
        flops = launch.multiplying * launch.flops
        shared = launch.copied + launch.multiplying * (launch.operands + launch.stored)
        found.append([target, name, str(kernel.registers), str(launch.threads)])
        found[-1] += [str(kernel.occupancy.blocks), f"{launch.copied / 1024:.0f}"]
        found[-1] += [f"{flops / 1e6:.1f}", f"{flops / max(1, launch.copied):.0f}"]
        found[-1] += [f"{shared / 1024:.0f}", *columns(kernel)]
    return found if peers else []
