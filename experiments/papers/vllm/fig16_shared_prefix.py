"""Translation after a prefix that all prompts share (vLLM Fig. 16), in simulated time.

    python -m experiments.papers.vllm.fig16_shared_prefix

LLaMA-13B translates sentences after an instruction with one example (80 tokens) or five (341).
vLLM computes the prefix once and keeps its blocks; Orca (Oracle) computes and holds it for each
request. The paper gives no lengths of WMT16's sentences; ours come from `synthetic_lengths`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.lib.typed_flags import flag
from experiments.papers.vllm import opt, rates
from experiments.papers.vllm.opt import Case
from experiments.papers.vllm.rates import RateFlags
from experiments.study import Setting

PREFIXES = {"1_shot": 80, "5_shot": 341}
PAPER = {"1_shot_vllm_over_orca_oracle": 1.67, "5_shot_vllm_over_orca_oracle": 3.58}
TOLERANCE = 0.15


@dataclass(frozen=True)
class PrefixFlags(RateFlags):
    duration_s: float = flag(120.0, "seconds of arrivals; an hour is the paper's", least=1)


def cases_of(name: str, flags: PrefixFlags) -> list[Case]:
    return [
        Case(
            "llama-13b", "translation", policy, 10.0, flags.sigma_of("alpaca"), flags.duration_s,
            flags.seed, flags.host, prefix_tokens=PREFIXES[name],
        )
        for policy in rates.COMPARED
    ]  # fmt: skip


def holds(found: Mapping[str, float]) -> bool:
    return all(abs(found[name] / paper - 1) <= TOLERANCE for name, paper in PAPER.items())


STUDY = rates.study(
    __file__,
    PrefixFlags,
    lambda flags: {name: cases_of(name, flags) for name in PREFIXES},
    holds,
    title="Translation after a shared prefix (vLLM Fig. 16)",
    claim="vLLM sustains 1.67 times Orca (Oracle)'s rate where 80 tokens are shared, and 3.58 "
    "times where 341 are",
    rule=f"both within {TOLERANCE:.0%}",
    setting=Setting(
        opt.setting("llama-13b", "vllm"),
        "the paper's sentences are those of WMT16, English to German; ours have means of 30 and 40 "
        "tokens, and Alpaca's sigma; arrivals last two minutes for an hour",
        "reduced",
    ),
    paper=PAPER,
    tolerance=TOLERANCE,
    quick={"duration_s": 30.0},
    minutes=(0.4, 3),
    size=(8.4, 3.6),
)

if __name__ == "__main__":
    STUDY.run()
