"""Registries by policy name: a policy's part of the soak, and of `experiments.gpu.compile_step`."""

from experiments.gpu.step_report import Compiled
from experiments.papers.diffkv import compiled_step as diffkv_step
from experiments.papers.diffkv import soaked as diffkv_soaked
from experiments.papers.lserve import compiled_step as lserve_step
from experiments.papers.lserve import soaked as lserve_soaked
from experiments.papers.vllm import compiled_step as vllm_step
from experiments.soak.checks import Soaked

SOAKED: dict[str, Soaked] = {"lserve": lserve_soaked.SOAKED, "diffkv": diffkv_soaked.SOAKED}
COMPILED: dict[str, Compiled] = {
    "vllm": vllm_step.COMPILED,
    "lserve": lserve_step.COMPILED,
    "diffkv": diffkv_step.COMPILED,
}
