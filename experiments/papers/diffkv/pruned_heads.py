"""Which heads lose answers when tokens are pruned (DiffKV §7.2, Fig. 9).

python -m experiments.papers.diffkv.pruned_heads

Each system prunes the same number of a prompt's tokens, summed over KV heads; the last 64 tokens
stay. Systems are named in `SYSTEMS`. A token's significance is DiffKV's (§4), the mean attention of
all later queries, or the mean attention of the prompt's last 64 queries, which include the
question. Retrieval heads are the KV heads of the highest DuoAttention gates.

Prompts and right answers pass through the model with masks (`experiments/papers/masked.py`). Only
prompts are pruned, not answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.papers import masked
from experiments.papers.lserve.gates import JUDGE_GATES, gates_of
from experiments.study import Run, Setting, Study, Values
from models import checkpoint
from models.config import ModelConfig
from paged.kv_cache.diffkv.compression import REPOSITORY_ROWS, Rules
from pallas_kernels.prompt_attention import prompt_attention

RULES = Rules()
LAST = Rules(prompt="repository")
LOSS, NEAR = 10, 5  # percentage points
WHOLE = "none"  # the system that prunes nothing
# Suffix of values -> what is pruned.
SYSTEMS = {
    "equal": "each head's least significant tokens, equally many of each head",
    "equal_last": "the same, by the last queries",
    "dynamic": "the tokens furthest below DiffKV's threshold, whichever their head",
    "dynamic_last": "the same, by the last queries",
    "dynamic_retrieval_whole": "as dynamic, but none of the retrieval heads' tokens",
    "dynamic_random_whole": "as dynamic, but none of the tokens of as many random heads (control)",
}


@dataclass(frozen=True)
class HeadFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    tasks: tuple[str, ...] = flag(
        ("multikey", "chain", "values"), "tasks of experiments/tasks/tasks.py"
    )
    context: int = flag(2048, "tokens of prompt and answer", least=128)
    num_prompts: int = flag(40, "prompts of each task", least=1)
    shares: tuple[float, ...] = flag(
        (0.05, 0.1, 0.2, 0.5), "of the tokens, pruned", above=0, most=0.7
    )
    retrieval: float = flag(0.25, "share of the KV heads", above=0, most=0.25)
    gates: str = flag(JUDGE_GATES, "as --lserve_gates", path=True)
    seed: int = flag(7, "of the prompts", least=0)


@dataclass(frozen=True)
class Row:
    """A prompt under a system.

    pruned, of_retrieval: percent of the tokens before the window that are pruned, of all heads and
        of the retrieval heads.
    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    task: str
    prompt: int
    system: str
    share: float
    pruned: float
    of_retrieval: float
    first_wrong: int


@cache
def scoring(config: ModelConfig, rules: Rules, tokens: int):
    """An attention of prompts of `tokens` tokens, padded, that stores the sums [L, T, K] of each
    token's attention probabilities as `rules` want them."""

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, sums):
        out, found = prompt_attention(
            q_TxHxD, k_TxKxD, v_TxKxD, jnp.array([0, tokens]), scale=config.attention.scale,
            **rules.prompt_scores,
        )  # fmt: skip
        return out, sums.at[layer].set(found)

    return attend


def asked(params, config: ModelConfig, question: masked.Question, rules: Rules) -> masked.Asked:
    T = len(question.prompt)
    sums = jnp.zeros((config.num_layers, len(masked.padded(question.prompt)), config.num_kv_heads))
    return masked.Asked(params, config, question, scoring(config, rules, T), sums)


def to_threshold(rules: Rules, sums_LxTxK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[L, T, K] the significance of a prompt's tokens, and its ratio to the threshold's 1 / i or
    1 / N (`compression.py`)."""
    N = sums_LxTxK.shape[1]
    at = np.arange(N)[:, None]
    if rules.prompt == "paper":
        mean = sums_LxTxK / np.maximum(N - 1 - at, 1)
        return mean, mean * (at + 1)
    mean = sums_LxTxK / np.clip(N - at, 1, REPOSITORY_ROWS)
    return mean, mean * N


def least(scores: np.ndarray, count: int) -> np.ndarray:
    """A mask of the `count` smallest scores along the last axis."""
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, np.argsort(scores, -1, kind="stable")[..., :count], True, -1)
    return mask


def pruned(system: str, significance, ratio, share: float, whole_LxK) -> np.ndarray:
    """[L, T, K] bool, the tokens that a system prunes of tokens that are all before the window.

    significance, ratio: see `to_threshold`.
    whole: heads of which nothing is pruned, where the system's name says so.
    """
    L, T, K = ratio.shape
    count = round(share * T)
    if system.startswith("equal"):
        return least(significance.transpose(0, 2, 1), count).transpose(0, 2, 1)
    if system.endswith("whole"):
        ratio = np.where(whole_LxK[:, None], np.inf, ratio)
    return least(ratio.ravel(), count * L * K).reshape(ratio.shape)


def kept_see(layer, q_RxKxGxD, keys_SxKxD, at_R, kept_LxKxS):
    return kept_LxKxS[layer][None]


def rows_of(flags: HeadFlags, params, config, gates, task: str, i: int, question) -> Iterator[Row]:
    """The rows of a prompt. gates: [L, K]."""
    L, K, T = config.num_layers, config.num_kv_heads, len(question.prompt)
    old, heads = T - RULES.window, round(flags.retrieval * L * K)
    retrieval = least(-gates.ravel(), heads).reshape(L, K)
    at_random = np.random.default_rng([flags.seed, i]).permutation(L * K).reshape(L, K) < heads
    by_last = asked(params, config, question, LAST)
    ours = asked(params, config, question, RULES)
    scores = {
        rules: to_threshold(rules, np.asarray(each.found)[:, :T])
        for rules, each in ((RULES, ours), (LAST, by_last))
    }

    def row(system: str, share: float, mask_LxNxK) -> Row:
        kept = np.ones((L, K, ours.places), bool)
        kept[:, :, :old] = ~mask_LxNxK.transpose(0, 2, 1)
        wrong = question.first_wrong(ours.likeliest(kept_see, kept))
        of = mask_LxNxK.transpose(0, 2, 1)[retrieval]
        return Row(task, i, system, share, 100 * mask_LxNxK.mean(), 100 * of.mean(), wrong)

    yield row(WHOLE, 0.0, np.zeros((L, old, K), bool))
    for system in SYSTEMS:
        by = scores[LAST if system.endswith("last") else RULES]
        significance, ratio = by[0][:, :old], by[1][:, :old]
        whole = at_random if "random" in system else retrieval
        for share in flags.shares:
            yield row(system, share, pruned(system, significance, ratio, share, whole))


def check(flags: HeadFlags) -> None:
    masked.check_model(flags.model, [flags.context])
    gates_of(flags.model, flags.gates)
    for task in flags.tasks:
        questions_of(flags, task)


def questions_of(flags: HeadFlags, task: str) -> list[masked.Question]:
    return masked.questions(flags.model, task, flags.context, flags.num_prompts, flags.seed)


def measure(flags: HeadFlags, run: Run) -> Iterator[Row]:
    with refusals():
        config, params = checkpoint.load(flags.model)
    gates = np.array(gates_of(flags.model, flags.gates))
    for task in flags.tasks:
        for i, question in enumerate(tqdm(questions_of(flags, task), task)):
            if run.stopped():
                return
            yield from rows_of(flags, params, config, gates, task, i, question)


def label(system: str, share: float) -> str:
    return f"{system}_{share:g}"


def values(_: HeadFlags, rows: Sequence[Row]) -> Values:
    """Percentages by system and share, but for right_none: right_SYSTEM_SHARE, right answers;
    of_retrieval_dynamic_SHARE, pruned tokens of the retrieval heads' tokens."""
    found: dict[tuple[str, float], list[Row]] = {}
    for each in rows:
        found.setdefault((each.system, each.share), []).append(each)
    numbers: dict[str, float | None] = {}
    for (system, share), mine in found.items():
        name = system if system == WHOLE else label(system, share)
        numbers[f"right_{name}"] = masked.percent_right(row.first_wrong for row in mine)
        if system == "dynamic":
            numbers[f"of_retrieval_{name}"] = float(np.mean([row.of_retrieval for row in mine]))
    return numbers


def holds(v: Mapping[str, float]) -> bool:
    def at(system: str) -> dict[str, float]:
        start = f"right_{system}_"
        return {k.removeprefix(start): x for k, x in v.items() if k.startswith(start)}

    whole = v["right_none"]
    dynamic = {x: right for x, right in at("dynamic").items() if x[0].isdigit()}
    lost = [share for share, right in dynamic.items() if right <= whole - LOSS]
    spared, control = at("dynamic_retrieval_whole"), at("dynamic_random_whole")
    return bool(lost) and all(
        spared[share] >= whole - NEAR and control[share] <= spared[share] - NEAR for share in lost
    )


def draw(flags: HeadFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers, axes = values(flags, rows), figure.subplots()
    for system, name in SYSTEMS.items():
        right = [numbers[f"right_{label(system, x)}"] or 0.0 for x in flags.shares]
        style = "--" if system.endswith("last") else "-"
        axes.plot([100 * x for x in flags.shares], right, style, marker="o", label=name)
    axes.axhline(numbers["right_none"] or 0, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(xlabel="pruned tokens (%)", ylabel="right answers (%)", ylim=(-3, 103))
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


STUDY = Study(
    __file__,
    title="Which heads lose answers when tokens are pruned (DiffKV Fig. 9)",
    kind="analogue",
    claim="the pruned tokens that cost answers are those of the retrieval heads",
    rule=f"wherever dynamic pruning loses {LOSS} points or more: with as many tokens pruned, but "
    f"none of the retrieval heads', {NEAR} are lost at most, and with none of as many random "
    f"heads' {NEAR} more",
    holds=holds,
    setting=Setting(
        "the judge model, three tasks at 2,048 tokens; a forward pass",
        "the paper has no such figure",
        "reduced",
    ),
    flags=HeadFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 1, "shares": (0.1,)},
    minutes=(1, 25),
    size=(11, 4),
)

if __name__ == "__main__":
    STUDY.run()
