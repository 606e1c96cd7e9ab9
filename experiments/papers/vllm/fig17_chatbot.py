"""A chatbot with long prompts (vLLM Fig. 17), in simulated time.

    python -m experiments.papers.vllm.fig17_chatbot

OPT-13B answers the ends of conversations with ShareGPT's lengths. A prompt is the last 1,024 tokens
of history and query; an answer has at most 1,024 tokens. Orca's buddy allocator reserves chunks of
one size for nearly all such requests, whether the output length is known or not. We chose the
number of rounds in a conversation (`synthetic_lengths`); in the paper most prompts reach 1,024
tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiments.lib.typed_flags import flag
from experiments.papers.vllm import opt, rates
from experiments.papers.vllm.opt import Case
from experiments.papers.vllm.rates import RateFlags
from experiments.study import Setting, Values

SYSTEMS = ("orca_max", "orca_pow2", "orca_oracle", "vllm")
ORCAS = SYSTEMS[:-1]
PAPER = {f"chatbot_vllm_over_{system}": 2.0 for system in ORCAS}
TOLERANCE, ALIKE = 0.15, 1.15


@dataclass(frozen=True)
class ChatFlags(RateFlags):
    duration_s: float = flag(3600.0, "seconds of arrivals; an hour is the paper's", least=1)


def cases_of(flags: ChatFlags) -> list[Case]:
    return [
        Case(
            "13b", "chatbot", policy, 0.25, flags.sigma_of("sharegpt"), flags.duration_s,
            flags.seed, flags.host,
        )
        for policy in SYSTEMS
    ]  # fmt: skip


def full_prompts(flags: ChatFlags, _) -> Values:
    """full_prompts: the share of prompts of 1,024 tokens."""
    drawn = opt.requests_of("chatbot", 1.0, 1000.0, flags.sigma_of("sharegpt"), flags.seed)
    full = [len(request.prompt) == opt.CONTEXT // 2 for request in drawn]
    return {"full_prompts": float(np.mean(full))}


def holds(found: Mapping[str, float]) -> bool:
    gains = [found[name] for name in PAPER]
    near = all(abs(gain / 2 - 1) <= TOLERANCE for gain in gains)
    return near and max(gains) <= ALIKE * min(gains)


STUDY = rates.study(
    __file__,
    ChatFlags,
    lambda flags: {"chatbot": cases_of(flags)},
    holds,
    title="A chatbot with long prompts (vLLM Fig. 17)",
    claim="vLLM sustains twice the rate of the three Orcas, which behave alike",
    rule=f"2 within {TOLERANCE:.0%} over each, and no Orca {ALIKE} times as good as another",
    setting=Setting(
        opt.setting("13b", "vllm") + "; prompts cut to 1,024 tokens, 1,024 to generate at most",
        "conversations have 5 rounds in the mean (ours), of log-normal lengths with the sigma that "
        "Fig. 13's Orca (Oracle) calibrates; the paper's are ShareGPT's",
        "paper",
    ),
    paper=PAPER,
    more=full_prompts,
    tolerance=TOLERANCE,
    quick={"duration_s": 600.0},
    minutes=(0.7, 6),
    size=(5, 3.6),
)

if __name__ == "__main__":
    STUDY.run()
