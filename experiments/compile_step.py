"""Compile a model's whole step for GPUs that this machine lacks, and check what XLA made of it.

    python -m experiments.compile_step --model=llama-3-8b --target=h200 --tensor_parallel=8

Prints each device's memory, and the kernels of one layer with the bytes that they move, beside the
floor: weights, and keys and values of the context, read once; new ones written once; the input of
each product read and its output written once. Ends with an error if the program does not fit the
GPU, does not update both KV pools in place, sends anything but two all-reduces a layer, reads a
weight twice, or has a kernel that only copies much. Needs the extra `aot`, but no GPU.

Without a GPU to time them on, the compiler guesses which of its products are fast.
"""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import PartitionSpec

from experiments import hlo, run_record
from experiments.flags import values_of
from models import params, weights
from models.config import ModelConfig
from models.families import family
from paged.config import EngineConfig
from paged.step import StepProgram, unstacks
from paged.tensor_parallel import SPLIT, WHOLE, Shards
from pallas_kernels import aot, backend
from pallas_kernels.targets import TARGETS, Target

FLAGS = flags.FLAGS
MODELS = Path(__file__).parents[1] / "configs" / "models"
MEMORY_SHARE = 0.7  # of a GPU's memory, for weights and KV pools; JAX takes 0.75 by default
MOST_TEMPORARY = 0.05  # of one of the pools
MOST_MOVED = 0.02  # of a layer's floor, by a kernel that computes nothing
LAYER = r"params\['layers'\]\[(\d+)\]"  # begins the name of an argument
MOSAIC = "mosaic_gpu_v2"  # the custom call of a Pallas kernel


@dataclass(frozen=True)
class Step:
    """What is compiled: a decode token each of `decodes` sequences of `context` tokens and, if
    there are any, the `prefill_tokens` of a prompt."""

    decodes: int
    prefill_tokens: int
    context: int

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens


@dataclass(frozen=True)
class Kernel:
    """One that a layer runs, and the bytes that it reads and writes."""

    name: str
    kind: str
    read: int
    written: int


@dataclass(frozen=True)
class Report:
    """What a compiled step is, of each device. memory and floor: bytes by what they are for.
    collectives, mosaic_kernels: instructions of the whole step, by opcode and in all.
    kernels: of one layer.  faults: what should not be."""

    kv_cache_tokens: int
    seconds_to_compile: float
    memory: dict[str, int]
    collectives: dict[str, int]
    mosaic_kernels: int
    kernels: list[Kernel]
    floor: dict[str, int]
    faults: list[str]


def define_flags() -> list[str]:
    names = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
    flags.DEFINE_enum("model", "llama-3-8b", names, "whose shapes; weights are not read")
    flags.DEFINE_integer("layers", None, "compile so many of its layers", lower_bound=3)
    flags.DEFINE_enum("target", "h200", sorted(TARGETS), "GPU")
    flags.DEFINE_enum("dtype", "bfloat16", weights.DTYPES, "of weights, computation and KV cache")
    flags.DEFINE_integer("tensor_parallel", 1, "GPUs", lower_bound=1)
    flags.DEFINE_integer("page_size", 16, "tokens of a KV page", lower_bound=1)
    flags.DEFINE_integer("decodes", 64, "sequences that decode a token each", lower_bound=1)
    flags.DEFINE_integer("prefill_tokens", 0, "of a prompt beside them", lower_bound=0)
    flags.DEFINE_integer("context", 4096, "tokens of a sequence", lower_bound=2)
    flags.DEFINE_string("output_dir", "", "where report.json and step.hlo go; empty for nowhere")
    return [
        "model", "layers", "target", "dtype", "tensor_parallel", "page_size", "decodes",
        "prefill_tokens", "context",
    ]  # fmt: skip


def compile_step(
    model: ModelConfig, target: str, step: Step, *, tensor_parallel: int = 1, page_size: int = 16,
    dtype="bfloat16",
) -> tuple[Report, str]:  # fmt: skip
    """The engine's step at the model's shapes, with KV pools that fill the GPU: what is to be said
    of it, and the program's text.

    Raises ValueError if the model or the sequences do not fit, and without the extra `aot`.
    """
    if step.prefill_tokens > step.context:
        raise ValueError(
            f"a prompt of {step.prefill_tokens} tokens is longer than the context of {step.context}"
        )
    gpu = TARGETS[target]
    shards = Shards(model, tensor_parallel, aot.devices(target, tensor_parallel))
    abstract = shards.abstract_params(dtype)
    weight_bytes = sum(map(_bytes_on_device, jax.tree.leaves(abstract)))
    token_bytes = _kv_bytes(shards.model, dtype) * model.num_layers
    kv_cache_tokens = int(MEMORY_SHARE * gpu.memory - weight_bytes) // token_bytes
    needed = step.decodes * step.context + step.prefill_tokens
    if needed > kv_cache_tokens:
        raise ValueError(
            f"{step.decodes} sequences of {step.context} tokens and a prompt of "
            f"{step.prefill_tokens} need a KV cache of {needed} tokens, but {target} has room for "
            f"{max(0, kv_cache_tokens)}"
        )
    config = EngineConfig(
        max_num_seqs=step.decodes,
        max_num_batched_tokens=max(step.prefill_tokens, step.decodes),
        max_model_len=step.context,
        page_size=page_size,
        kv_cache_tokens=kv_cache_tokens,
        tensor_parallel=tensor_parallel,
    )
    layer_bytes = weight_bytes // model.num_layers
    assert unstacks(shards.platform, layer_bytes), "layers in a loop are not told apart"
    program = StepProgram.declare(config, shards)
    cache, state = jax.eval_shape(program.init(dtype))
    cache, state = shards.abstract(cache, SPLIT), shards.abstract(state, WHOLE)

    began = time.perf_counter()
    with backend.compiling_for(gpu.gpu):
        shape = step.prefill_tokens, step.decodes
        compiled = program.compile(shape, _unstacked(shards, abstract), cache, state)
    seconds = time.perf_counter() - began
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    pool = _bytes_on_device(cache.k_pages)
    sizes = {
        "weights": weight_bytes,
        "pools": 2 * pool,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
    report = _report(
        text, shards.model, gpu, step, dtype, kv_cache_tokens, tensor_parallel, seconds, sizes
    )
    return report, text


def _bytes_on_device(x: jax.ShapeDtypeStruct) -> int:
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _kv_bytes(model: ModelConfig, dtype) -> int:
    """Of a token's keys and values in a layer."""
    return 2 * model.num_kv_heads * model.head_dim * jnp.dtype(dtype).itemsize


def _unstacked(shards: Shards, abstract):
    """`params.unstack` of abstract parameters."""
    specs = shards.specs(abstract)
    layer = {name: PartitionSpec(*spec[1:]) for name, spec in specs["layers"].items()}
    unstacked = jax.eval_shape(params.unstack, abstract)
    specs |= {"layers": [layer] * len(unstacked["layers"])}
    return jax.tree.map(shards.abstract, unstacked, specs)


def _report(
    text: str, model: ModelConfig, gpu: Target, step: Step, dtype, kv_cache_tokens: int,
    tensor_parallel: int, seconds: float, memory: dict[str, int],
) -> Report:  # fmt: skip
    """`model` is what one device computes."""
    program, pool, kv_bytes = hlo.Program(text), memory["pools"] // 2, _kv_bytes(model, dtype)
    kernels = []
    for op in _layer(program, model.num_layers - 2):
        traffic = program.traffic(op, pool)
        read = traffic.read
        if traffic.pools:
            decodes = f"[{step.decodes}," in op.shape  # else it computes the prompt
            tokens = step.decodes * step.context if decodes else step.prefill_tokens
            read += tokens * kv_bytes * traffic.pools // 2
        kernels.append(Kernel(op.name, program.kind(op), read, traffic.written))
    collectives = Counter(op.opcode.removesuffix("-start") for op in program)
    report = Report(
        kv_cache_tokens,
        seconds,
        memory,
        {name: collectives[name] for name in hlo.COLLECTIVES if collectives[name]},
        mosaic_kernels=sum(MOSAIC in op.text for op in program if op.opcode == "custom-call"),
        kernels=kernels,
        floor=_floor(model, step, dtype),
        faults=[],
    )
    report.faults.extend(_faults(report, program, model, gpu, step, tensor_parallel))
    return report


def _floor(model: ModelConfig, step: Step, dtype) -> dict[str, int]:
    """Bytes that a layer cannot do without, each array moved once."""
    E, F = model.hidden_size, model.intermediate_size
    HD, KD = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    item, kv_bytes = jnp.dtype(dtype).itemsize, _kv_bytes(model, dtype)
    layers = family(model).declare(model)["layers"].values()
    return {
        "weights": sum(math.prod(param.shape[1:]) for param in layers) * item,
        "KV read": (step.decodes * step.context + step.prefill_tokens) * kv_bytes,
        "KV written": step.tokens * kv_bytes,
        # What goes into the products q/k/v, o, gate/up and down, and what comes out.
        "activations": step.tokens * item * ((E + HD + 2 * KD) + (HD + E) + (E + 2 * F) + (F + E)),
    }


def _faults(
    report: Report, program: hlo.Program, model: ModelConfig, gpu: Target, step: Step,
    tensor_parallel: int,
) -> list[str]:  # fmt: skip
    faults, memory, L, pool = [], report.memory, model.num_layers, report.memory["pools"] // 2

    def check(good: bool, fault: str) -> None:
        if not good:
            faults.append(fault)

    held = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporary"]
    check(held <= gpu.memory, f"{held} bytes do not fit a {gpu.name} of {gpu.memory}")
    check(
        memory["aliased"] >= 2 * pool,
        f"KV pools of {pool} bytes are not updated in place: {memory['aliased']} bytes are aliased",
    )
    check(
        memory["temporary"] <= MOST_TEMPORARY * pool,
        f"{memory['temporary']} bytes of temporaries, beside pools of {pool}",
    )
    expected = {"all-reduce": 2 * L} if tensor_parallel > 1 else {}
    check(report.collectives == expected, f"collectives {report.collectives}, not {expected}")
    attentions = (2 if step.prefill_tokens else 1) if gpu.gpu.compute_capability[0] == 9 else 0
    check(
        report.mosaic_kernels == attentions * L,
        f"{report.mosaic_kernels} Mosaic kernels, not {attentions} in each of {L} layers",
    )
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
    """The kernels of one layer, from the first that gets weights of it to that of the next."""
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
        f"Mosaic kernels: {report.mosaic_kernels}",
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


def main(argv: list[str], names: Sequence[str] = ()) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags are --name=value")
    model = weights.load_config(MODELS / FLAGS.model)
    if FLAGS.layers:
        model = model.replace(num_layers=FLAGS.layers)
    step = Step(FLAGS.decodes, FLAGS.prefill_tokens, FLAGS.context)
    try:
        if FLAGS.output_dir:
            run_record.check_output_dir(FLAGS.output_dir)
        report, text = compile_step(
            model,
            FLAGS.target,
            step,
            tensor_parallel=FLAGS.tensor_parallel,
            page_size=FLAGS.page_size,
            dtype=FLAGS.dtype,
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(show(report))
    if FLAGS.output_dir:
        environment = run_record.describe_environment()
        content = {"flags": values_of(names), **asdict(report), **environment}
        run_record.write_json(FLAGS.output_dir, "report.json", content)
        (Path(FLAGS.output_dir) / "step.hlo").write_text(text)
    if report.faults:
        sys.exit("\n".join(f"error: {fault}" for fault in report.faults))


if __name__ == "__main__":
    defined = define_flags()
    app.run(lambda argv: main(argv, defined))
