"""How the vLLM policy's step is compiled for GPUs (`experiments.gpu.compile_step`)."""

from dataclasses import replace

from experiments.gpu.step_report import Compiled, Step
from pallas_kernels.paged_attention import specs


def step_of(step: Step, config, shards, dtype) -> Step:
    return replace(step, decode_ops=(specs.DECODE,), prompt_ops=(specs.PREFILL,))


COMPILED = Compiled(step_of)
