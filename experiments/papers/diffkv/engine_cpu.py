"""Prefill and decode of whole engines on this machine, with DiffKV's policy and vLLM's.

python -m experiments.papers.diffkv.engine_cpu

As experiments.papers.lserve.engine_cpu. Here fewer bytes save memory, but no time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.lib.typed_flags import flag
from experiments.papers.lserve.engine_cpu import VLLM, EngineFlags, Row, draw, race, values
from experiments.study import Run, Setting, Study
from paged.config import EngineConfig

DIFFKV = "diffkv"


@dataclass(frozen=True)
class QuantisedFlags(EngineFlags):
    context: int = flag(1024, "tokens of a prompt", least=64)
    batch: int = flag(8, "prompts", least=1)
    alpha_l: float = flag(0.02, "as --diffkv_alpha_l", least=0, most=1)


def configs_of(flags: QuantisedFlags) -> dict[str, EngineConfig]:
    options = {"alpha_l": flags.alpha_l}
    return {VLLM: flags.config(16), DIFFKV: flags.config(16, policy=DIFFKV, policy_options=options)}


def check(flags: QuantisedFlags) -> None:
    configs_of(flags)


def measure(flags: QuantisedFlags, _: Run) -> Iterator[Row]:
    yield from race(flags, configs_of(flags))


STUDY = Study(
    __file__,
    title="Prefill and decode of engines on this machine: DiffKV and vLLM (DiffKV §7.3 in small)",
    kind="measured",
    claim="on this machine DiffKV decodes at three quarters of vLLM's speed or more",
    rule="at least 0.75 of vLLM's speed in decode",
    holds=lambda v: v["decode_over_vllm_diffkv"] >= 0.75,
    setting=Setting(
        "the bundled model, 8 prompts of 1,024 tokens",
        "the paper has models of 7B and more on GPUs, where DiffKV is faster than vLLM",
        "reduced",
    ),
    flags=QuantisedFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"batch": 4, "output_tokens": 17, "rounds": 2},
    minutes=(1, 2),
    size=(6, 3),
)

if __name__ == "__main__":
    STUDY.run()
