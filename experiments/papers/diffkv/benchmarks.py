"""DiffKV's tables on public benchmarks: DiffKV and its baselines on the user's model and problems
(§7.2)."""

from dataclasses import dataclass
from typing import Any

from experiments import accuracy
from experiments.accuracy import AccuracyFlags
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
from models import checkpoint
from paged.config import EngineConfig

FP16, DIFFKV, INT4, KIVI, QUEST, SNAPKV = "FP16", "DiffKV", "INT4", "KIVI", "Quest", "SnapKV"
KIVI_GROUP = 32  # channels of a value, or tokens of a key's channel, that share a scale


@dataclass(frozen=True)
class DiffKVFlags(AccuracyFlags):
    contexts: tuple[int, ...] = flag((32768,), "the longest prompt and answer, in tokens")
    alpha_h: float = flag(1.0, "of high precision", least=0)
    alpha_l: float = flag(0.02, "of low precision", least=0)
    budget: float = flag(0.25, "of SnapKV, share of the tokens", above=0, most=1)
    quest_budget: int = flag(8192, "tokens that a query of Quest reads", least=48)


def kivi(flags: AccuracyFlags) -> EngineConfig:
    """The configuration of configs/kivi.flags, at the model's head dim."""
    groups = max(1, checkpoint.load_config(flags.model).head_dim // KIVI_GROUP)
    chosen: dict[str, Any] = {
        "high": "K16V16", "low": "K2V2", "prompt_rule": "kivi", "generation_rule": "kivi",
        "window": 128, "key_group": KIVI_GROUP, "groups": groups,
    }  # fmt: skip
    whole = accuracy.whole_prompts(flags)
    return accuracy.config_of(flags, policy="diffkv", policy_options=chosen, page_size=12, **whole)


def long_context(flags: DiffKVFlags) -> accuracy.Systems:
    """The systems of Table 2."""
    return {
        FP16: systems.reference(flags),
        DIFFKV: systems.policy(flags, alpha_h=flags.alpha_h, alpha_l=flags.alpha_l),
        QUEST: systems.quest(flags, flags.quest_budget),
        SNAPKV: systems.budgeted(flags, "SnapKV", flags.budget),
    }


def thinking(flags: DiffKVFlags) -> accuracy.Systems:
    """The systems of Table 3."""
    found = dict(long_context(flags))
    return {
        FP16: found.pop(FP16), DIFFKV: found.pop(DIFFKV), INT4: systems.uniform(flags, "K4V4"),
        KIVI: kivi(flags), **found,
    }  # fmt: skip
