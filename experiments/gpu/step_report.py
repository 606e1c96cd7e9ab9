"""Report on a compiled step: its memory, its kernels beside the floor of a layer, its faults."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from models import lora
from models.config import ModelConfig
from models.families import family
from paged.kv_cache.work import kv_bytes_of_token
from paged.simulator.roofline import layer_bytes
from pallas_kernels.backend import PLAN_SCOPE
from pallas_kernels.lora import PAGE_RANKS
from pallas_kernels.lora.specs import SGMV as ADAPTER
from pallas_kernels.specs import Op
from pallas_kernels.tools import hlo
from pallas_kernels.tools.targets import Target

MOST_TEMPORARY = 0.05  # largest temporaries, as a share of the KV pools
MOST_MOVED = 0.02  # largest traffic of a kernel that only copies, as a share of a layer's floor
LAYER = r"params\['layers'\]\[(\d+)\]"  # the beginning of the name of a layer's argument
MOSAIC = "mosaic_gpu_v2"  # the custom call of a Pallas kernel


@dataclass(frozen=True)
class Step:
    """A step to compile: one decode token for each of `decodes` sequences, and one prompt.

    context: tokens of each decoding sequence.
    prefill_tokens: tokens of the prompt, prefilled in one piece; 0 for none.
    adapters: number of adapter slots, and of sequences with an adapter each.
    rank: rank of the adapters.
    tokens_read: tokens that a decode token reads, mean over the KV heads; None for the context.
    statistics_read: bytes of key statistics that a layer's page selector reads.
    kv_token_bytes: bytes of a token in a layer's pages; None for unquantised keys and values.
    pools: number of page arrays.
    decode_ops, prompt_ops: ops that a layer runs for decode tokens and for prompt tokens.
    """

    decodes: int
    prefill_tokens: int
    context: int
    adapters: int = 0
    rank: int = 16
    tokens_read: int | None = None
    statistics_read: int = 0
    kv_token_bytes: int | None = None
    pools: int = 2
    decode_ops: tuple[Op, ...] = ()
    prompt_ops: tuple[Op, ...] = ()

    @property
    def decode_tokens(self) -> int:
        """Context tokens that a decode token reads."""
        return self.context if self.tokens_read is None else self.tokens_read

    @property
    def adapter_pages(self) -> int:
        """Rank pages of each projection that the step reads."""
        sequences = self.decodes + (self.prefill_tokens > 0)
        return min(self.adapters, sequences) * lora.num_pages(self.rank)

    @property
    def kernels(self) -> int:
        """Mosaic kernels of a layer on Hopper, without SGMV kernels."""
        ops = self.decode_ops + (self.prompt_ops if self.prefill_tokens else ())
        return sum(len(op.kernels) for op in ops)

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """(context tokens, new tokens) of each sequence; the prompt comes last."""
        prompt = [self.prefill_tokens] if self.prefill_tokens else []
        return [self.decode_tokens] * self.decodes + prompt, [1] * self.decodes + prompt


@dataclass(frozen=True)
class Compiled:
    """A policy's part of `experiments.gpu.compile_step`.

    step: (step, config, shards, dtype) -> the step, with the policy's reads and ops filled in.
    options: (model, share of streaming heads, bits of keys and values) -> policy options; None for
        the defaults.
    pools: cache -> its page arrays.
    statistics: cache -> its array of key statistics, or None.
    """

    step: Callable[..., Step]
    options: Callable[..., dict | None] = lambda model, share, kv_bits: None
    pools: Callable[[Any], Any] = lambda cache: (cache.k_pages, cache.v_pages)
    statistics: Callable[[Any], Any] = lambda cache: None


@dataclass(frozen=True)
class Kernel:
    """A kernel of a layer, and the bytes that it reads and writes."""

    name: str
    kind: str
    read: int
    written: int


@dataclass(frozen=True)
class Report:
    """A compiled step, on each device.

    memory: bytes by purpose.
    collectives: number of collectives in the step, by opcode.
    mosaic_kernels: Mosaic kernels in the step.
    sgmv_kernels: Mosaic kernels that compute SGMV for adapters.
    spilled: bytes of register spills, over all Mosaic kernels.
    plan_kernels: kernels in the step that assign tiles to the thread blocks of attention.
    kernels: kernels of one layer.
    floor: least bytes that a layer moves, by purpose.
    faults: violated expectations.
    """

    kv_cache_tokens: int
    seconds_to_compile: float
    memory: dict[str, int]
    collectives: dict[str, int]
    mosaic_kernels: int
    sgmv_kernels: int
    spilled: int
    plan_kernels: int
    kernels: list[Kernel]
    floor: dict[str, int]
    faults: list[str]


def report_of(
    text: str, model: ModelConfig, gpu: Target, step: Step, dtype, kv_cache_tokens: int,
    tensor_parallel: int, seconds: float, memory: dict[str, int], spilled: int,
) -> Report:  # fmt: skip
    """The report on a program. text: the program's HLO. model: one device's shard of the model."""
    program, pool, kv_bytes = (
        hlo.Program(text),
        memory["pools"] // step.pools,
        step.kv_token_bytes or kv_bytes_of_token(model, dtype),
    )
    kernels, stacks = [], _stacks(model, step)
    sizes = {op.argument: op.bytes for op in program.entry.values() if op.opcode == "parameter"}
    for op in _layer(program, model.num_layers - 2):
        traffic = program.traffic(op, pool)
        read = traffic.read
        if traffic.pools:
            # A kernel with this shape serves decode tokens; any other serves the prompt.
            decodes = f"[{step.decodes * model.num_kv_heads}," in op.shape
            tokens = step.decodes * step.decode_tokens if decodes else step.prefill_tokens
            # One pool may be several operands.
            read += tokens * kv_bytes * min(traffic.pools, step.pools) // step.pools
        statistics = memory.get("statistics", 0)
        if statistics and any(program.entry[name].bytes == statistics for name in op.operands):
            # A custom call reads only the context's part of the statistics, by index.
            read += step.statistics_read - statistics if op.opcode == "custom-call" else 0
        for name in program.arguments(op):
            if name in stacks:  # the operand holds all layers and slots; few pages of it are read
                read += math.prod(stacks[name]) * jnp.dtype(dtype).itemsize - sizes[name]
        kernels.append(Kernel(op.name, program.kind(op), read, traffic.written))
    mosaic = [op for op in program if op.opcode == "custom-call" and MOSAIC in op.text]
    collectives = Counter(op.opcode.removesuffix("-start") for op in program)
    report = Report(
        kv_cache_tokens,
        seconds,
        memory,
        {name: collectives[name] for name in hlo.COLLECTIVES if collectives[name]},
        mosaic_kernels=len(mosaic),
        sgmv_kernels=sum(any(f"/{k}" in op.text for k in ADAPTER.kernels) for op in mosaic),
        spilled=spilled,
        plan_kernels=sum(PLAN_SCOPE in op.text for op in program.kernels()),
        kernels=kernels,
        floor=_layer_bytes(model, step, dtype)
        | _adapter_bytes(model, step, dtype)
        | ({"key statistics": step.statistics_read} if step.statistics_read else {}),
        faults=[],
    )
    report.faults.extend(_faults(report, program, model, gpu, step, tensor_parallel))
    return report


def _layer_bytes(model: ModelConfig, step: Step, dtype) -> dict[str, int]:
    floor = layer_bytes(model, *step.lengths, dtype)
    if step.kv_token_bytes is None:
        return floor
    dense = kv_bytes_of_token(model, dtype)
    return {
        name: size * step.kv_token_bytes // dense if name.startswith("KV") else size
        for name, size in floor.items()
    }


def _stacks(model: ModelConfig, step: Step) -> dict[str, tuple[int, ...]]:
    """Shapes [N, 16, W] of the rank pages that a layer reads, by name of the adapter argument."""
    declared = lora.declare(model, max(1, step.adapter_pages)) if step.adapters else {}
    return {
        f"adapters.pages['{name}']['{which}']": param.shape[1:]
        for name, matrices in declared.items()
        for which, param in matrices.items()
    }


def _adapter_bytes(model: ModelConfig, step: Step, dtype) -> dict[str, int]:
    """Floor of a layer's LoRA in bytes: adapters, and inputs and outputs of x·A and v·B."""
    stacks, itemsize = _stacks(model, step), jnp.dtype(dtype).itemsize
    if not stacks:
        return {}
    columns = sum(shape[-1] + lora.num_pages(step.rank) * PAGE_RANKS for shape in stacks.values())
    return {
        "adapters": sum(map(math.prod, stacks.values())) * itemsize,
        "LoRA activations": sum(step.lengths[1]) * columns * itemsize,
    }


def _faults(
    report: Report, program: hlo.Program, model: ModelConfig, gpu: Target, step: Step,
    tensor_parallel: int,
) -> list[str]:  # fmt: skip
    faults, memory, L, pools = [], report.memory, model.num_layers, report.memory["pools"]
    pool = pools // step.pools

    def check(good: bool, fault: str) -> None:
        if not good:
            faults.append(fault)

    held = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporary"]
    check(held <= gpu.memory, f"{held} bytes do not fit a {gpu.name} of {gpu.memory}")
    check(
        memory["aliased"] >= pools,
        f"KV pools of {pools} bytes are not updated in place: {memory['aliased']} are aliased",
    )
    check(
        memory["temporary"] <= MOST_TEMPORARY * pools,
        f"{memory['temporary']} bytes of temporaries, beside pools of {pools}",
    )
    expected = {"all-reduce": 2 * L} if tensor_parallel > 1 else {}
    check(report.collectives == expected, f"collectives {report.collectives}, not {expected}")
    hopper = gpu.gpu.compute_capability[0] == 9
    expected_kernels = step.kernels if hopper else 0
    if step.adapters and hopper:
        expected_kernels += len(ADAPTER.kernels) * len(family(model).PROJECTIONS)
    check(
        report.mosaic_kernels == expected_kernels * L,
        f"{report.mosaic_kernels} Mosaic kernels, not {expected_kernels} in each of {L} layers",
    )
    check(not report.spilled, f"Mosaic kernels spill {report.spilled} bytes")
    planning = [op.name for op in _layer(program, L - 2) if PLAN_SCOPE in op.text]
    check(not planning, f"a layer plans again: {', '.join(planning)}")
    check((report.plan_kernels > 0) == hopper, f"{report.plan_kernels} kernels of a plan")
    readers: dict[str, list[str]] = {}
    most = MOST_MOVED * sum(report.floor.values())
    for kernel in program.kernels():
        traffic = program.traffic(kernel, pool)
        moved = traffic.read + traffic.written
        check(
            program.kind(kernel) not in hlo.MOVING or moved <= most,
            f"{kernel.name} only moves {moved} bytes",
        )
        for name in set(program.arguments(kernel)):
            readers.setdefault(name, []).append(kernel.name)
    for op in program.entry.values():
        kernels = readers.get(op.argument, []) if op.opcode == "parameter" else []
        check(
            len(kernels) <= 1 or op.bytes <= most or not re.match(LAYER, op.argument),
            f"{op.argument} is read by {len(kernels)} kernels: {', '.join(kernels)}",
        )
    return faults


def _layer(program: hlo.Program, layer: int) -> list[hlo.Op]:
    """The kernels from a layer's first, which reads its weights, up to the next layer's first."""
    first: dict[int, int] = {}
    kernels = program.kernels()
    for i, kernel in enumerate(kernels):
        for name in program.arguments(kernel):
            if found := re.match(LAYER, name):
                first.setdefault(int(found[1]), i)
    return kernels[first[layer] : first[layer + 1]]


def show(report: Report) -> str:
    """The report as text: memory, and the kernels of a layer beside its floor."""
    memory = "  ".join(f"{name} {size / 1e9:.2f}" for name, size in report.memory.items())
    lines = [
        f"GB on each device: {memory}",
        f"KV cache: {report.kv_cache_tokens} tokens",
        f"collectives: {report.collectives or 'none'}",
        f"Mosaic kernels: {report.mosaic_kernels}, of SGMV {report.sgmv_kernels}; they spill "
        f"{report.spilled} bytes; of the step's plan: {report.plan_kernels}",
        f"compiled in {report.seconds_to_compile:.0f} s",
        "",
        f"{'kernel of a layer':<36} {'kind':<14} {'MB read':>9} {'written':>9}",
    ]
    for kernel in report.kernels:
        read, written = kernel.read / 1e6, kernel.written / 1e6
        lines.append(f"{kernel.name:<36} {kernel.kind:<14} {read:>9.2f} {written:>9.2f}")
    moved, floor = sum(k.read + k.written for k in report.kernels), sum(report.floor.values())
    parts = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in report.floor.items())
    moves = f"move {moved / 1e6:.2f} MB, {moved / floor:.2f} times the floor"
    lines += [f"{len(report.kernels)} kernels {moves} of {floor / 1e6:.2f} MB: {parts}"]
    return "\n".join(lines)
