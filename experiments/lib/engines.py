"""Build engines from weights and an executor, after checks of their configurations."""

import os
from pathlib import Path
from typing import Any

import jax

from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from paged.checks import refusal
from paged.device.buckets import Buckets
from paged.device.step import StepProgram
from paged.engine import Engine, EngineConfig
from paged.simulator.executor import SimulatedExecutor
from paged.tensor_parallel import Shards
from paged.validation import check_model
from pallas_kernels import backend

COMPILATION_CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/paged_jax/compilations")
EXECUTORS = ("device", "simulated")
INTERPRETER_THREADS = 8
# With pages of 64 tokens a tile of decode attention is one copy of keys and one of values.
GPU_PAGE_SIZE = 64


def engine_config(
    model: ModelConfig,
    max_model_len: int | None = None,
    page_size: int | None = None,
    **fields: Any,
) -> EngineConfig:
    """An EngineConfig for the model, checked before any weights are loaded.

    max_model_len: None for the model's longest context, up to EngineConfig's default.
    page_size: None for EngineConfig's default, or GPU_PAGE_SIZE on a GPU.

    Raises ValueError for a configuration that the model or its policy cannot run.
    """
    if max_model_len is None:
        max_model_len = min(EngineConfig.max_model_len, model.max_position_embeddings)
    if page_size is None:
        page_size = GPU_PAGE_SIZE if backend.current_gpu() else EngineConfig.page_size
    config = EngineConfig(max_model_len=max_model_len, page_size=page_size, **fields)
    check_model(model, config)
    # Otherwise the step program would refuse a configuration only after weights are loaded.
    StepProgram.declare(config, Shards(model, config.tensor_parallel))
    return config


def load_engine(
    config: EngineConfig,
    tokenizer=None,
    *,
    model: str = "bundled",
    dtype: str = "float32",
    attention_implementation: str = "",
    compilation_cache: str = COMPILATION_CACHE,
    executor: str = "device",
) -> Engine:
    """An engine over a model's weights, not yet warmed up.

    tokenizer: None for the model's own.
    model: 'bundled', 'judge', a Hugging Face folder or a hub id.
    dtype: dtype of weights, computation and KV cache.
    attention_implementation: implementation of the attention ops; empty for the device's default.
    compilation_cache: folder that keeps compiled programs for later processes; empty for none.
    executor: 'device', or 'simulated', which loads no weights and invents tokens.

    Raises ValueError for an unknown executor or dtype, or an attention implementation that cannot
    run the model in this dtype.
    """
    if executor not in EXECUTORS:
        raise refusal("executor", " or ".join(map(repr, EXECUTORS)), executor)
    dtype = checkpoint.checked_dtype(dtype).name
    declared = checkpoint.load_config(model)
    if tokenizer is None:
        tokenizer = load_tokenizer(model)
    if executor == "simulated":
        simulated = SimulatedExecutor(vocab_size=declared.vocab_size, dtype=dtype)
        return Engine(declared, config, simulated, tokenizer)
    shards = Shards(declared, config.tensor_parallel, dtype=dtype)
    check_implementation(attention_implementation, config, shards)
    keep_compilations(compilation_cache)
    loaded, params = checkpoint.load(model, dtype, shards.place_one)
    return Engine.from_model(params, loaded, config, tokenizer, attention_implementation or None)


def keep_compilations(folder: str) -> None:
    """Keep compiled programs in this folder for later processes; an empty name keeps none."""
    cache = str(Path(folder).expanduser()) if folder else None
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def check_implementation(implementation: str, config: EngineConfig, shards: Shards) -> None:
    """Raise ValueError if this implementation of the attention ops cannot run the model, before its
    weights are loaded. An empty name is the device's default, which runs every model."""
    if not implementation:
        return
    check_interpreter(implementation)
    program, dtype = StepProgram.declare(config, shards, implementation), shards.sharded.dtype
    with_prompts, *_, decodes = Buckets.declare(config).shapes()
    program.check(with_prompts, dtype)
    program.check(decodes, dtype)


def check_interpreter(implementation: str) -> None:
    """Raise ValueError if an interpreted Mosaic kernel would have too few threads. Each of its warp
    groups occupies a JAX thread while it waits for another, and two kernels may run at once: with
    fewer than INTERPRETER_THREADS threads they would deadlock."""
    if not implementation.startswith("mosaic_gpu") or backend.current_gpu() is not None:
        return
    threads = int(os.environ.get("PJRT_NPROC") or os.cpu_count() or 1)
    if threads < INTERPRETER_THREADS:
        raise ValueError(
            f"--attention_implementation={implementation} is interpreted where there is no GPU, "
            f"which needs {INTERPRETER_THREADS} threads, not {threads}: set the environment "
            f"variable PJRT_NPROC={INTERPRETER_THREADS}"
        )
