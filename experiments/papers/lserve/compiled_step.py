"""How the LServe policy's step is compiled for GPUs (`experiments.gpu.compile_step`)."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from experiments.gpu.step_report import Compiled, Step
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.kv_cache.lserve.layout import layout_of
from paged.tensor_parallel import Shards
from pallas_kernels.block_sparse_attention.specs import HYBRID
from pallas_kernels.page_selection.specs import SELECT
from pallas_kernels.paged_attention.specs import DECODE, PREFILL, QUANTISED


def options(model: ModelConfig, share: float, kv_bits: int) -> dict:
    """Options with random gates: trained gates exist for few models only."""
    gates = np.random.default_rng(0).random((model.num_layers, model.num_kv_heads))
    return {"gates": gates.tolist(), "streaming_share": share, "kv_bits": kv_bits}


def step_of(step: Step, config: EngineConfig, shards: Shards, dtype) -> Step:
    """The step with LServe's reads. `tokens_read` is the mean over the heads of all layers. A
    sequence's key statistics are read once in every `reuse` decode steps."""
    layout = layout_of(config, shards.sharded)
    P, heads, dense = layout.page_size, layout.heads, np.mean(layout.num_dense)
    selected = layout.selected * P if layout.selects else step.context
    window = (layout.sink + layout.local + 1) * P
    read = dense * min(step.context, selected) + (heads - dense) * min(step.context, window)
    page = P // layout.logical * 2 * shards.model.head_dim * jnp.dtype(dtype).itemsize
    scored = step.decodes / layout.reuse * dense * (step.context // P)
    per_token = 2 * heads * layout.format.token_bytes if layout.format else None
    return replace(
        step,
        kv_token_bytes=per_token,
        tokens_read=round(read / heads),
        statistics_read=round(scored * page) if layout.selects else 0,
        decode_ops=(*([SELECT] if layout.selects else []), QUANTISED if layout.format else DECODE),
        prompt_ops=(HYBRID if layout.streams else PREFILL,),
    )


COMPILED = Compiled(step_of, options, statistics=lambda cache: cache.statistics)
