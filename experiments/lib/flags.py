"""Flags of every program that serves a model, and the engine that they describe.

Programs define flags in functions, called under `if __name__ == "__main__"`, so that any two of
them can be imported together.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from absl import flags

from models import checkpoint
from models.config import ModelConfig
from paged.device.step import StepProgram
from paged.device.step_inputs import Buckets
from paged.device.tensor_parallel import Shards
from paged.engine import Engine, EngineConfig
from paged.requests.validation import check_model
from paged.simulator.executor import SimulatedExecutor
from pallas_kernels import backend
from pallas_kernels.paged_attention.api import DECODE, PREFILL

FLAGS = flags.FLAGS
# Or transformers advises at every start to install torch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Or absl's log shows JAX looking for TPUs.
logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
INTERPRETER_THREADS = 8
ENGINE_HELP = {
    "policy": "KV-cache policy",
    "page_size": "tokens of a KV page",
    "kv_cache_tokens": "tokens that all KV pages hold",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "tokens of one step",
    "max_prefills_per_step": "prompts that are prefilled in one step",
    "watermark": "share of KV blocks that admission leaves free",
    "chunked_prefill": "whether a prompt may be spread over steps",
    "prefix_caching": "whether full KV blocks are kept for later prompts that begin alike",
    "tensor_parallel": "devices that share the model's heads and MLP",
    "multi_step": "tokens that a step without prompts computes for each sequence",
    "preemption_mode": "'recompute', 'swap', or 'auto': swap groups of several sequences",
    "admit_after_swap": "whether new requests wait until swapped ones 'completed' or 'resumed'",
    "run_ahead": "whether a step is dispatched before the last one's tokens are read",
}
_DEFINE: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


class _FiniteParser(flags.FloatParser):
    """Bounds alone let nan pass, and one bound infinity."""

    def convert(self, argument) -> float:
        value = super().convert(argument)
        if not math.isfinite(value):
            raise ValueError(f"{argument} is not a finite number")
        return value


def define_float(
    name: str,
    default: float,
    help: str,
    lower_bound: float | None = None,
    upper_bound: float | None = None,
) -> None:
    """As `flags.DEFINE_float`, of a flag that takes finite numbers only."""
    parser = _FiniteParser(lower_bound, upper_bound)
    flags.DEFINE(parser, name, default, help, serializer=flags.ArgumentSerializer())


def define_fields(dataclass, helps: dict[str, str]) -> list[str]:
    """Define a flag for each named field, with its default and type; returns the names."""
    defaults = {field.name: field.default for field in dataclasses.fields(dataclass)}
    for name, text in helps.items():
        _DEFINE[type(defaults[name])](name, defaults[name], text)
    return list(helps)


def define_model_flags() -> list[str]:
    """Define what `load_engine` reads; returns the names."""
    flags.DEFINE_string("model", "bundled", "'bundled', a Hugging Face folder or a hub id")
    flags.DEFINE_enum("dtype", "float32", checkpoint.DTYPES, "of weights, computation and KV cache")
    flags.DEFINE_enum(
        "attention_implementation",
        "",
        ["", *(name for name in DECODE if name in PREFILL)],
        "of the attention ops; empty for the device's own. mosaic_gpu runs in Pallas's interpreter "
        "where there is no GPU",
    )
    flags.DEFINE_string(
        "compilation_cache",
        os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/paged_jax/compilations"),
        "folder that keeps compiled programs for the next run; empty for none",
    )
    return ["model", "dtype", "attention_implementation", "compilation_cache"]


def define_executor_flag() -> list[str]:
    """Define --executor, which goes to `load_engine`; its name."""
    flags.DEFINE_enum("executor", "device", ["device", "simulated"], "what runs the steps")
    return ["executor"]


def define_engine_flags() -> list[str]:
    """Define what `engine_config` and `load_engine` read, and --seed; returns the names."""
    names = define_model_flags()
    flags.DEFINE_integer(
        "max_model_len",
        None,
        f"longest sequence in tokens; the model's by default, up to {EngineConfig.max_model_len}",
    )
    flags.DEFINE_integer("seed", 0, "of the workload and of sampling", lower_bound=0)
    return [*names, "max_model_len", "seed", *define_fields(EngineConfig, ENGINE_HELP)]


def engine_config(model: ModelConfig) -> EngineConfig:
    """The flags as a checked EngineConfig; ValueError names what cannot work."""
    longest = FLAGS.max_model_len
    if longest is None:
        longest = min(EngineConfig.max_model_len, model.max_position_embeddings)
    config = EngineConfig(max_model_len=longest, seed=FLAGS.seed, **values_of(ENGINE_HELP))
    check_model(model, config)
    # Or what it refuses would be refused after the weights are read.
    StepProgram.declare(config, Shards(model, config.tensor_parallel))
    return config


def values_of(names: Iterable[str]) -> dict[str, Any]:
    """The values of some flags by name."""
    return {name: FLAGS[name].value for name in names}


def load_engine(config: EngineConfig, tokenizer, executor: str = "device") -> Engine:
    """An engine over the weights of --model, not yet warmed up; 'simulated' reads none and makes
    tokens up.

    Raises ValueError where --attention_implementation cannot run the model in --dtype.
    """
    if executor == "simulated":
        config_of_model = checkpoint.load_config(FLAGS.model)
        simulated = SimulatedExecutor(vocab_size=config_of_model.vocab_size)
        return Engine(config_of_model, config, simulated, tokenizer)
    implementation = FLAGS.attention_implementation or None
    if implementation:  # Before the weights are read; the device's own runs anything.
        check_interpreter(implementation)
        shards = Shards(checkpoint.load_config(FLAGS.model), config.tensor_parallel)
        program = StepProgram.declare(config, shards, implementation)
        with_prompts, *_, decodes = Buckets.declare(config).shapes()
        program.check(with_prompts, FLAGS.dtype)
        program.check(decodes, FLAGS.dtype)
    cache = str(Path(FLAGS.compilation_cache).expanduser()) if FLAGS.compilation_cache else None
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    shards = Shards(checkpoint.load_config(FLAGS.model), config.tensor_parallel)
    model, params = checkpoint.load(FLAGS.model, FLAGS.dtype, shards.place_one)
    return Engine.from_model(params, model, config, tokenizer, implementation)


def check_interpreter(implementation: str) -> None:
    """A warpgroup of an interpreted kernel takes a thread of JAX's while it waits for another, and
    those of two kernels may run at once: with fewer threads they would wait for ever."""
    if not implementation.startswith("mosaic_gpu") or backend.current_gpu() is not None:
        return
    threads = int(os.environ.get("PJRT_NPROC") or os.cpu_count() or 1)
    if threads < INTERPRETER_THREADS:
        raise ValueError(
            f"--attention_implementation={implementation} is interpreted where there is no GPU, "
            f"which needs {INTERPRETER_THREADS} threads, not {threads}: set the environment "
            f"variable PJRT_NPROC={INTERPRETER_THREADS}"
        )
