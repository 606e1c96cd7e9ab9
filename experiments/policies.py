"""Registries by policy name: a policy's part of the soak, of `experiments.gpu.compile_step`, and of
--keep_prompts (`experiments/accuracy.py`)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.gpu.step_report import Compiled
from experiments.papers.diffkv import compiled_step as diffkv_step
from experiments.papers.diffkv import kept_prompts as diffkv_prompts
from experiments.papers.diffkv import soaked as diffkv_soaked
from experiments.papers.lserve import compiled_step as lserve_step
from experiments.papers.lserve import soaked as lserve_soaked
from experiments.papers.vllm import compiled_step as vllm_step
from experiments.soak.checks import Soaked
from paged.engine import Engine

SOAKED: dict[str, Soaked] = {"lserve": lserve_soaked.SOAKED, "diffkv": diffkv_soaked.SOAKED}
COMPILED: dict[str, Compiled] = {
    "vllm": vllm_step.COMPILED,
    "lserve": lserve_step.COMPILED,
    "diffkv": diffkv_step.COMPILED,
}
# Functions (engine, folder, `kept_answers.made_by`) -> engine, in modules named kept_prompts.
KEEP_PROMPTS: dict[str, Callable[[Engine, Path, Mapping[str, Any]], Engine]] = {
    "diffkv": diffkv_prompts.keep_prompts
}
