"""Where pruned tokens cost answers (DiffKV §7.2, Fig. 9).

python -m experiments.papers.diffkv.pruned_heads

The systems of `SYSTEMS` prune a prompt's tokens, but for the last 64, from KV heads. They differ in
the significance by which tokens are ranked, in whether each head prunes equally many tokens, and in
the heads that prune at all. Retrieval heads are the KV heads whose DuoAttention gate is at least
0.3.

A prompt passes through the model whole. The right answer passes through it once for each system,
with a mask (`experiments/papers/masked.py`); its own tokens are not pruned.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.ndimage import maximum_filter1d

from experiments.lib.plain_attention import check_model
from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.papers import masked
from experiments.papers.lserve.gates import JUDGE_GATES, RETRIEVAL_GATE, gates_of
from experiments.study import Run, Setting, Study, Values
from models.config import ModelConfig
from paged.kv_cache.diffkv.compression import NEIGHBOURS, Rules
from pallas_kernels.prompt_attention import prompt_attention

RULES = Rules(), Rules(prompt="repository")
WINDOW = Rules.window
LOSS, NEAR = 10, 5  # percentage points
NOTHING, OTHERS = "nothing", "others_entirely"


@dataclass(frozen=True)
class System:
    """The tokens that a system prunes.

    text: the same in words.
    rules: index in RULES. The paper's significance is the mean attention of all later queries, the
        repository's that of the prompt's last 64 queries.
    equal: whether each head prunes equally many tokens; otherwise as many in all heads together.
    ratio: whether tokens are ranked by significance over threshold, as DiffKV prunes them;
        otherwise by significance. By the repository's rules both orders are one.
    pooled: whether a token has the largest significance of itself and its neighbours, as in SnapKV.
    heads: the heads that prune their part; others keep all tokens.
    """

    text: str
    rules: int = 0
    equal: bool = False
    ratio: bool = True
    pooled: bool = False
    heads: Literal["all", "retrieval", "others"] = "all"


SYSTEMS = {
    "dynamic": System("DiffKV's: furthest below the threshold, in whichever head"),
    "dynamic_retrieval": System("of DiffKV's, those in retrieval heads", heads="retrieval"),
    "dynamic_others": System("of DiffKV's, those in other heads", heads="others"),
    "dynamic_last": System("as DiffKV's, by the last 64 queries", rules=1),
    "equal_ratio": System("equally many in each head, furthest below the threshold", equal=True),
    "equal": System("equally many in each head, least significant", equal=True, ratio=False),
    "equal_last": System("equally many in each head, by the last 64 queries", rules=1, equal=True),
    "equal_pooled": System(
        "equally many in each head, by the last 64 queries, pooled over 7 tokens",
        rules=1,
        equal=True,
        pooled=True,
    ),
}


@dataclass(frozen=True)
class HeadFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    tasks: tuple[str, ...] = flag(
        ("multikey", "chain", "values"), "tasks of experiments/tasks/tasks.py"
    )
    context: int = flag(2048, "tokens of prompt and answer", least=256)
    num_prompts: int = flag(40, "prompts of each task", least=1)
    shares: tuple[float, ...] = flag(
        (0.01, 0.05, 0.2, 0.5), "of the tokens, pruned", above=0, most=0.9
    )
    gates: str = flag(JUDGE_GATES, "as --lserve_gates", path=True)
    seed: int = flag(7, "of the prompts", least=0)

    def __post_init__(self):
        super().__post_init__()
        masked.check_distinct(tasks=self.tasks, shares=self.shares)


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


@functools.cache
def scoring(config: ModelConfig):
    """An attention of padded prompts. Its state: the prompt's first row and the padding's; for each
    of RULES the sums [L, T, K] of each token's probabilities."""

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, state):
        starts, sums = state
        found = [
            prompt_attention(
                q_TxHxD, k_TxKxD, v_TxKxD, starts, scale=config.attention.scale,
                **rules.prompt_scores,
            )
            for rules in RULES
        ]  # fmt: skip
        return found[0][0], (starts, [x.at[layer].set(y) for x, (_, y) in zip(sums, found)])

    return attend


def asked(params, config: ModelConfig, question: masked.Question) -> masked.Asked:
    """The question, with the state of `scoring`."""
    T = len(question.prompt)
    empty = jnp.zeros((config.num_layers, len(masked.padded(question.prompt)), config.num_kv_heads))
    state = jnp.array([0, T]), [empty] * len(RULES)
    return masked.Asked(params, config, question, scoring(config), state)


def smallest(scores: np.ndarray, count: int) -> np.ndarray:
    """A mask of the `count` smallest scores along the last axis. Of equal scores the last count as
    the smallest, as in the engine."""
    mask = np.zeros(scores.shape, bool)
    order = np.argsort(scores[..., ::-1], -1, kind="stable")[..., :count]
    np.put_along_axis(mask, scores.shape[-1] - 1 - order, True, -1)
    return mask


def pruned(system: System, sums_LxTxK, share: float, retrieval_LxK: np.ndarray) -> np.ndarray:
    """[L, K, O] bool, the pruned ones of a prompt's O tokens before the window.

    sums: of the system's rules, for the prompt's T tokens.
    share: the part of all heads' tokens that is pruned, before `System.heads` is applied.
    """
    L, T, K = sums_LxTxK.shape
    significance, base = RULES[system.rules].prompt_significance(
        sums_LxTxK, jnp.arange(T)[:, None], T
    )
    scores = significance * base if system.ratio else significance
    scores_LxKxO = np.asarray(scores).transpose(0, 2, 1)[:, :, : T - WINDOW]
    if system.pooled:
        scores_LxKxO = maximum_filter1d(scores_LxKxO, 2 * NEIGHBOURS + 1)
    count = round(share * (T - WINDOW))
    if system.equal:
        mask = smallest(scores_LxKxO, count)
    else:
        mask = smallest(scores_LxKxO.ravel(), count * L * K).reshape(scores_LxKxO.shape)
    if system.heads != "all":
        mask &= (retrieval_LxK == (system.heads == "retrieval"))[..., None]
    return mask


def kept_only(layer, q_RxKxGxD, keys_SxKxD, at_R, kept_LxKxS):
    """Each KV head sees the tokens that it kept."""
    return kept_LxKxS[layer][None]


def rows_of(
    shares: Sequence[float], params, config: ModelConfig, retrieval_LxK: np.ndarray,
    question: masked.Question,
) -> Iterator[tuple]:  # fmt: skip
    """The fields of a prompt's rows, from `system` on."""
    T, found = len(question.prompt), asked(params, config, question)
    sums = [np.asarray(each)[:, :T] for each in found.found[1]]
    kept_LxKxS = np.ones((*retrieval_LxK.shape, found.places), bool)
    masks = {(NOTHING, 0.0): np.zeros((*retrieval_LxK.shape, T - WINDOW), bool)}
    masks[OTHERS, 1.0] = masks[NOTHING, 0.0] | ~retrieval_LxK[..., None]
    for name, system in SYSTEMS.items():
        for x in shares:
            masks[name, x] = pruned(system, sums[system.rules], x, retrieval_LxK)
    for (name, share), mask in masks.items():
        kept = kept_LxKxS.copy()
        kept[:, :, : T - WINDOW] = ~mask
        wrong = question.first_wrong(found.likeliest(kept_only, kept))
        of = mask[retrieval_LxK]
        yield name, share, 100 * float(mask.mean()), 100 * float(of.mean()), wrong


def of_prompt(flags: HeadFlags, task: str, index: int) -> masked.Rows:
    config, params = masked.loaded(flags.model)
    question = masked.questions_of(flags, task, flags.context)[index]
    found = rows_of(flags.shares, params, config, retrieval_heads(flags), question)
    return masked.Rows([[task, index, *each] for each in found])


def retrieval_heads(flags: HeadFlags) -> np.ndarray:
    """[L, K] bool. Raises ValueError as `gates_of` does, and for gates that are all on one side."""
    found = np.array(gates_of(flags.model, flags.gates)) >= RETRIEVAL_GATE
    if found.all() or not found.any():
        raise ValueError(f"--gates must have gates of at least {RETRIEVAL_GATE}, and some below")
    return found


def check(flags: HeadFlags) -> None:
    check_model(flags.model, [flags.context])
    retrieval_heads(flags)
    for task in flags.tasks:
        questions = masked.questions_of(flags, task, flags.context)
        shortest = min(len(each.prompt) for each in questions) - WINDOW
        if round(min(flags.shares) * shortest) < 1:
            raise ValueError(
                f"--shares={min(flags.shares):g} of {task}'s shortest prompt, which has {shortest} "
                f"tokens before the last {WINDOW}, is less than a token"
            )


def measure(flags: HeadFlags, run: Run) -> Iterator[Row]:
    with refusals():
        masked.loaded(flags.model)
    for fields in masked.fields_of(run, of_prompt, flags, flags.tasks, flags.num_prompts):
        yield Row(*fields)


def label(system: str, share: float) -> str:
    return f"{system}_{share:g}"


def values(flags: HeadFlags, rows: Sequence[Row]) -> Values:
    """Percentages, but for retrieval_heads, the number of these heads.

    right_nothing: right answers if nothing is pruned.
    right_others_entirely: if all tokens before the window are pruned, but for retrieval heads.
    right_SYSTEM_SHARE: by system of SYSTEMS.
    of_retrieval_dynamic_SHARE: pruned tokens of the retrieval heads' tokens.
    pruned_others_entirely: pruned tokens of all heads' tokens.
    """
    found: dict[tuple[str, float], list[Row]] = {}
    for each in rows:
        found.setdefault((each.system, each.share), []).append(each)
    numbers: dict[str, float | None] = {"retrieval_heads": int(retrieval_heads(flags).sum())}
    for (system, share), mine in found.items():
        name = label(system, share) if system in SYSTEMS else system
        numbers[f"right_{name}"] = masked.percent_right(row.first_wrong for row in mine)
        if system == "dynamic":
            numbers[f"of_retrieval_{name}"] = float(np.mean([row.of_retrieval for row in mine]))
        if system == OTHERS:
            numbers[f"pruned_{name}"] = float(np.mean([row.pruned for row in mine]))
    return numbers


def holds(v: Mapping[str, float]) -> bool:
    everything, start = v[f"right_{NOTHING}"], "right_equal_ratio_"
    shares = [name.removeprefix(start) for name in v if name.startswith(start)]
    lost = [x for x in shares if v[f"right_dynamic_{x}"] <= everything - LOSS]
    if not lost:
        raise ValueError("no share loses answers, so there is nothing to explain")
    return all(
        v[f"right_dynamic_others_{x}"] >= everything - NEAR
        and v[f"right_dynamic_retrieval_{x}"] <= v[f"right_dynamic_{x}"] + NEAR
        for x in lost
    )


def draw(flags: HeadFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers, axes = values(flags, rows), figure.subplots()
    for name, system in SYSTEMS.items():
        right = [numbers[f"right_{label(name, x)}"] or 0.0 for x in flags.shares]
        style = {"all": "-", "retrieval": ":", "others": "--"}[system.heads]
        axes.plot([100 * x for x in flags.shares], right, style, marker="o", label=system.text)
    axes.set(xlabel="pruned tokens (%)", ylabel="right answers (%)", ylim=(-3, 103))
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


STUDY = Study(
    __file__,
    title="Where pruned tokens cost answers (DiffKV Fig. 9)",
    kind="analogue",
    claim="dropped tokens cost answers in retrieval heads alone",
    rule=f"at every share at which DiffKV's pruning loses {LOSS} points or more: its pruned tokens "
    f"of the other heads alone lose {NEAR} points at most, and those of the retrieval heads alone "
    f"at most {NEAR} fewer than all",
    holds=holds,
    setting=Setting(
        "the judge model at 2,048 tokens; a forward pass",
        "the paper has no such figure",
        "reduced",
    ),
    flags=HeadFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 1, "shares": (0.1,)},
    minutes=(1, 30),
    size=(11, 4),
)

if __name__ == "__main__":
    STUDY.run()
