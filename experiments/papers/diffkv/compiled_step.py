"""How the DiffKV policy's step is compiled for GPUs (`experiments.gpu.compile_step`)."""

from dataclasses import replace

from experiments.gpu.step_report import Compiled, Step
from paged.config import EngineConfig
from paged.kv_cache.diffkv.layout import layout_of
from paged.tensor_parallel import Shards
from pallas_kernels.prompt_attention.specs import PROMPT
from pallas_kernels.quantized_attention.specs import DECODE


def step_of(step: Step, config: EngineConfig, shards: Shards, dtype) -> Step:
    """The step with DiffKV's ops, if every token has high precision, a score and a position."""
    layout = layout_of(config, shards.sharded)
    token_bytes = layout.heads * layout.formats[0].token_bytes
    return replace(
        step, pools=1, kv_token_bytes=token_bytes,
        decode_ops=(DECODE,), prompt_ops=(PROMPT,),
    )  # fmt: skip


COMPILED = Compiled(step_of, pools=lambda cache: cache.words)
