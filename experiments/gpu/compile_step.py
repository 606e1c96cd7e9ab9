"""Compile a model's whole step for GPUs that this machine lacks, and check the compiled program.

    python -m experiments.gpu.compile_step --model=llama-3-8b --target=h200 --tensor_parallel=8
    python -m experiments.gpu.compile_step --policy=lserve --page_size=64 --context=32768

Prints each device's memory, and the kernels of one layer with the bytes that they move, beside the
floor. The floor reads weights and the context's keys and values once, writes new keys and values
once, and reads the input and writes the output of each matrix product once. Ends with an error if

- the program does not fit the GPU;
- the KV pools are not updated in place, or temporaries exceed 5 % of them;
- collectives are not exactly two all-reduces a layer with tensor parallelism, and none without;
- the Mosaic kernels are not the expected ones, or spill registers;
- a layer assigns tiles to thread blocks again, instead of once per step;
- two kernels read the same large weight;
- a kernel that only copies moves more than 2 % of the floor.

Needs the extra `aot`, but no GPU.

Without a GPU to time matrix products on, the compiler guesses which implementations are fast, and
splits many products along the contraction (split-K). Their partial sums fit a GPU's L2 cache, but
are most of the bytes that the report counts beyond the floor of a decode step. --whole_products
disables split-K, so that the report shows the other bytes.
"""

import math
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.gpu.step_report import MOST_TEMPORARY, Report, Step, report_of, show
from experiments.lib import run_record, shipped
from experiments.lib.engines import GPU_PAGE_SIZE
from experiments.lib.program import Program, refusals
from experiments.lib.typed_flags import Flags, ModelFlags, Output, flag
from experiments.policies import COMPILED
from models import checkpoint
from paged.adapters.pool import AdapterPool
from paged.checks import help_of
from paged.config import EngineConfig
from paged.device.mover import UnitMover
from paged.device.step import GPU_OPTIONS, StepProgram, stacks
from paged.kv_cache.work import kv_bytes_of_token
from paged.tensor_parallel import REPLICATED, SPLIT, SPLIT_UNITS, Shards
from pallas_kernels import backend
from pallas_kernels.tools import aot
from pallas_kernels.tools.compiled import spilled_bytes
from pallas_kernels.tools.targets import TARGETS

WHOLE_PRODUCTS = {"xla_gpu_experimental_force_split_k": 1}
MEMORY_SHARE = 0.7  # share of a GPU's memory for weights and KV pools; JAX's default is 0.75
HELP = help_of(EngineConfig)


@dataclass(frozen=True)
class StepFlags(Flags):
    model: str = flag(
        "llama-3-8b", "whose shapes; weights are not read",
        choices=sorted(path.parent.name for path in shipped.MODELS.glob("*/config.json")),
    )  # fmt: skip
    layers: int | None = flag(None, "compile so many of its layers", least=3)
    target: str = flag("h200", "GPU", choices=sorted(TARGETS))
    dtype: str = flag("bfloat16", help_of(ModelFlags)["dtype"], choices=tuple(checkpoint.DTYPES))
    tensor_parallel: int = flag(1, "GPUs", least=1)
    whole_products: bool = flag(False, "split no product along its contraction")
    page_size: int = flag(GPU_PAGE_SIZE, HELP["page_size"], least=1)
    decodes: int = flag(64, "sequences that decode a token each", least=1)
    prefill_tokens: int = flag(0, "of a prompt beside them", least=0)
    context: int = flag(4096, "tokens of a sequence", least=2)
    adapter_slots: int = flag(0, HELP["adapter_slots"], least=0)
    adapter_rank: int = flag(16, "of the adapters", least=1)
    policy: str = flag("vllm", HELP["policy"], choices=tuple(COMPILED))
    kv_bits: int = flag(16, "of keys and values: 16, or 8 or 4 if the policy can")
    streaming_share: float = flag(
        0.5, "KV heads that stream, of a policy with such, drawn at random", least=0, most=1
    )


def compile_step(flags: StepFlags) -> tuple[Report, str]:
    """Compile the engine's step at the model's shapes, with KV pools that fill the GPU. Returns the
    report, and the program's HLO text.

    Raises ValueError if the model or the sequences do not fit, and without the extra `aot`.
    """
    model = checkpoint.load_config(shipped.MODELS / flags.model)
    if flags.layers:
        model = model.replace(num_layers=flags.layers)
    step = Step(
        flags.decodes, flags.prefill_tokens, flags.context, flags.adapter_slots, flags.adapter_rank
    )
    if step.prefill_tokens > step.context:
        raise ValueError(
            f"a prompt of {step.prefill_tokens} tokens is longer than the context of {step.context}"
        )
    gpu, dtype, tensor_parallel = TARGETS[flags.target], flags.dtype, flags.tensor_parallel
    shards = Shards(model, tensor_parallel, aot.devices(flags.target, tensor_parallel), dtype)
    abstract = shards.abstract_params(dtype)
    weight_bytes = sum(map(_bytes_on_device, jax.tree.leaves(abstract)))
    token_bytes = kv_bytes_of_token(shards.model, dtype) * model.num_layers
    compiled_as = COMPILED[flags.policy]
    options = compiled_as.options(model, flags.streaming_share, flags.kv_bits)
    can = EngineConfig(policy=flags.policy, policy_options=options).parts
    whole = not can.chunked_prefill
    config = EngineConfig(
        max_num_seqs=step.decodes,
        max_num_batched_tokens=max(step.context if whole else step.prefill_tokens, step.decodes),
        chunked_prefill=not whole,
        max_model_len=step.context,
        page_size=flags.page_size,
        tensor_parallel=tensor_parallel,
        adapter_slots=step.adapters,
        max_adapter_rank=step.rank,
        policy=flags.policy,
        policy_options=options,
    )
    slots = AdapterPool.declare(config, None)
    adapters = slots and slots.abstract(shards, dtype)
    adapter_bytes = sum(map(_bytes_on_device, jax.tree.leaves(adapters)))
    room = int(MEMORY_SHARE * gpu.memory) - weight_bytes - adapter_bytes
    kv_cache_tokens = room // token_bytes
    needed = step.decodes * step.context + step.prefill_tokens
    if needed > kv_cache_tokens:
        raise ValueError(
            f"{step.decodes} sequences of {step.context} tokens and a prompt of "
            f"{step.prefill_tokens} need a KV cache of {needed} tokens, but {flags.target} has "
            f"room for {max(0, kv_cache_tokens)}"
        )
    config = replace(config, kv_cache_tokens=kv_cache_tokens)
    step = compiled_as.step(step, config, shards, dtype)
    layer_bytes = weight_bytes // model.num_layers
    assert not stacks(shards.platform, layer_bytes), "layers in a loop are not told apart"
    program = StepProgram.declare(config, shards)
    cache, state = jax.eval_shape(program.init(dtype))
    cache, state = shards.abstract(cache, SPLIT), shards.abstract(state, REPLICATED)

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, backend.compiling_for(gpu.gpu):
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        shape = step.prefill_tokens, step.decodes
        how = GPU_OPTIONS | (WHOLE_PRODUCTS if flags.whole_products else {})
        compiled = program.compile(shape, abstract, adapters, cache, state, how)
        reports = [path.read_text() for path in Path(folder).glob("*.ptxas")]
    del os.environ["MOSAIC_GPU_DUMP_TO"]
    assert reports or gpu.gpu.compute_capability[0] < 9, "the compiler has left no reports"
    seconds = time.perf_counter() - began
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    pools = sum(map(_bytes_on_device, jax.tree.leaves(compiled_as.pools(cache))))
    sizes = {
        "weights": weight_bytes,
        "adapters": adapter_bytes,
        "pools": pools,
        "statistics": sum(map(_bytes_on_device, jax.tree.leaves(compiled_as.statistics(cache)))),
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
    report = report_of(
        text, shards.model, gpu, step, dtype, kv_cache_tokens, tensor_parallel, seconds, sizes,
        spilled=sum(map(spilled_bytes, reports)),
    )  # fmt: skip
    moves = _block_moves(program, cache)
    for name, (aliased, temporary) in moves.items():
        report.memory[f"temporary, {name}"] = temporary
        if aliased < pools or temporary > MOST_TEMPORARY * pools:
            report.faults.append(f"{name} does not write the pools in place")
    return report, text


def _block_moves(program: StepProgram, cache) -> dict[str, tuple]:
    """(aliased, temporary) bytes of the programs that copy blocks and swap blocks in, by name."""
    shards = program.shards
    programs: dict[str, jax.stages.Lowered] = {}
    for pool in program.pools:
        mover = UnitMover(shards, program.policy, pool)
        ids = shards.abstract(jax.ShapeDtypeStruct((pool.units_per_call,), jnp.int32), REPLICATED)
        content = shards.abstract(jax.eval_shape(mover.export_program, cache, ids), SPLIT_UNITS)
        kind = f" of {pool.name}" if len(program.pools) > 1 else ""
        programs |= {
            f"block copy{kind}": mover.copy_program.lower(cache, ids, ids),
            f"swap in{kind}": mover.import_program.lower(cache, ids, content),
        }
    found = {}
    for name, lowered in programs.items():
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        found[name] = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    return found


def _bytes_on_device(x: jax.ShapeDtypeStruct) -> int:
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def main(flags: StepFlags, output: Output) -> None:
    with refusals():
        report, text = compile_step(flags)
    print(show(report))
    if output.output_dir:
        environment = run_record.describe_environment()
        content = {"flags": flags, **asdict(report), **environment}
        run_record.write_json(output.folder, "report.json", content)
        run_record.write_whole(output.folder / "step.hlo", text)
    if report.faults:
        sys.exit("\n".join(f"error: {fault}" for fault in report.faults))


PROGRAM = Program(main, StepFlags, Output(), ("step.hlo",))

if __name__ == "__main__":
    PROGRAM.run()
