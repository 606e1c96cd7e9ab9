"""Test whether a model suits studies of sparsity and compression: its answers, and its heads.

python -m experiments.qualify --model=judge

The program measures right answers on the tasks by context, and the share of KV heads that may
stream, with a gate below 0.3 (--gates; `experiments.papers.lserve.duo_gates`). It counts the tokens
that hold 95 % of a head's attention, over --spread_prompts prompts of each task at --spread_context
tokens:

* by query: number of keys of a query head, for one query that produces a token of the answer;
* by prompt: number of the most significant tokens of a KV head, for all queries of a prompt, with
  DiffKV's significance (§3, Figs. 4 and 5). A head that attends to the last 64 tokens alone needs
  nearly all tokens by this measure, because every token is among the last 64 of some query. The
  measure by query shows that such a head is local.

Goals: 95 % right on six of eight tasks; half of the KV heads with gates below 0.3; and a median
head that needs at most 20 % of the tokens by query.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import accuracy, evaluate
from experiments.accuracy import AccuracyFlags, Row, measured
from experiments.lib.answers import ALL
from experiments.lib.plain_attention import check_model
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import fig02_distributions as distributions
from experiments.papers.lserve import attention_concentration, duo_gates
from experiments.papers.lserve.gates import RETRIEVAL_GATE
from experiments.papers.lserve.gates import gates_of as named_gates
from experiments.study import Setting, Study, Values
from experiments.tasks.files import Problems
from experiments.tasks.tasks import MIN_CONTEXT
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from models.hub import find

RIGHT = 95.0
GOALS = {
    "tasks_at_95": (6, "at least"), "local_head_share": (0.5, "at least"),
    "median_share_of_tokens_for_95": (0.2, "at most"),
}  # fmt: skip


@dataclass(frozen=True)
class QualifyFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(
        tuple(evaluate.DEFAULT_TASKS), "tasks of experiments/tasks/tasks.py"
    )
    contexts: tuple[int, ...] = flag((512, 1024, 2048, 4096), "prompt and answer, in tokens")
    num_prompts: int = flag(32, "of each task and context", least=1, most=evaluate.MOST_PROMPTS)
    gates: str = flag("", "file of the model's gates; its own duo_gates.json by default", path=True)
    spread_context: int = flag(2048, "tokens of prompt and answer", least=256)
    spread_prompts: int = flag(4, "of each task", least=1)


@dataclass(frozen=True)
class Spread:
    """Numbers of tokens that hold 95 % of a head's attention, in N prompts of `tokens` tokens.

    by_query: [N, L, H] keys for one query, median over the queries of a prompt's answer.
    by_prompt: [N, L, K] tokens for 95 % of a whole prompt's significance.
    figures: the numbers of DiffKV's Figs. 2 to 5.
    """

    tokens: int
    by_query: np.ndarray
    by_prompt: np.ndarray
    figures: dict[str, float]

    def numbers(self) -> dict[str, float]:
        of_heads = self.by_query.mean(0)
        median = float(np.median(of_heads))
        found = {
            "median_tokens_for_95": median,
            "median_share_of_tokens_for_95": median / self.tokens,
            "median_significant_tokens_for_95": float(np.median(self.by_prompt.mean(0))),
        }
        for name, counts in (("tokens", self.by_query), ("significant_tokens", self.by_prompt)):
            found |= {
                f"{name}_deviation_across_heads": float(counts.mean(0).std()),
                f"{name}_deviation_across_requests": float(counts.std(0).mean()),
            }
        return found | self.figures


def problems_of(flags: QualifyFlags, tokenizer) -> Problems:
    """The prompts on which attention is measured. Raises ValueError if the model's context is too
    short, if its attention is not plain, or if no task fits."""
    check_model(flags.model, [flags.spread_context])
    pairs = [
        (task, flags.spread_context)
        for task in flags.tasks
        if flags.spread_context >= MIN_CONTEXT.get(task, 0)
    ]
    if not pairs:
        raise ValueError("no task fits --spread_context")
    return evaluate.own_problems(pairs, flags.spread_prompts, flags.seed, tokenizer)


def measure_spread(params, config: ModelConfig, tokenizer, problems: Problems) -> Spread:
    """The spread over `problems`, which must all have one context."""
    by_query: list[np.ndarray] = []
    of_tasks: dict[str, list[distributions.Prompt]] = {}
    for (task, _), asked in problems.items():
        found = attention_concentration.measured(
            params, config, tokenizer, asked, distributions.SHARE
        )
        by_query += [np.median(one[:, :, 0], -1) for one in found]
        of_tasks[task] = distributions.over_prompts(
            params, config, task, distributions.tokens_of(tokenizer, asked)
        )
    by_prompt = [prompt.critical() for prompts in of_tasks.values() for prompt in prompts]
    rows = [
        row for task, prompts in of_tasks.items() for row in distributions.rows_of(task, prompts)
    ]
    [tokens] = {context for _, context in problems}
    figures = distributions.summarise(rows, of_tasks)
    return Spread(tokens, np.stack(by_query), np.stack(by_prompt), figures)


def gates_of(flags: QualifyFlags) -> np.ndarray:
    """[L, K] the gates of the KV heads."""
    file = flags.gates or str(find(flags.model) / "duo_gates.json")
    return np.array(named_gates(flags.model, file))


@functools.lru_cache(maxsize=1)
def spread_of(flags: QualifyFlags) -> Spread:
    config, params = checkpoint.load(flags.model, "float32")
    tokenizer = load_tokenizer(flags.model)
    return measure_spread(params, config, tokenizer, problems_of(flags, tokenizer))


def dense(flags: QualifyFlags) -> accuracy.Systems:
    return {"dense": accuracy.config_of(flags)}


def check(flags: QualifyFlags) -> None:
    evaluate.settings(flags.tasks, flags.contexts, dense(flags)["dense"])
    problems_of(flags, load_tokenizer(flags.model))
    gates_of(flags)
    accuracy.checked(dense)(flags)


def values(flags: QualifyFlags, rows: Sequence[Row]) -> Values:
    return numbers_of(gates_of(flags), spread_of(flags), rows)


def numbers_of(gates: np.ndarray, spread: Spread, rows: Sequence[Row]) -> dict[str, float]:
    [whole] = accuracy.pooled(rows).values()
    scores = by_task(rows)
    return {
        "accuracy_pooled": whole.score / 100,
        "tasks": len(scores),
        "tasks_at_95": sum(bool(score >= RIGHT) for score in scores.values()),
        "kv_heads": gates.size,
        "local_head_share": float((gates < RETRIEVAL_GATE).mean()),
        "median_gate": float(np.median(gates)),
        **spread.numbers(),
    }


def by_task(rows: Sequence[Row]) -> dict[str, float]:
    """Right answers of each task over all contexts, in percent."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.task != ALL:
            found.setdefault(row.task, []).append(row)
    return {
        task: float(np.average([r.score for r in of], weights=[r.prompts for r in of]))
        for task, of in found.items()
    }


def table(_: QualifyFlags, rows: Sequence[Row]) -> str:
    """Right answers in percent, a line for each task."""
    return "\n".join(f"{task:10}{score:7.1f} % right" for task, score in by_task(rows).items())


def draw(flags: QualifyFlags, figure: Figure, rows: Sequence[Row]) -> None:
    spread = spread_of(flags)
    answers, of_gates, by_query, by_prompt = figure.subplots(2, 2).flat
    _draw_answers(answers, [row for row in rows if row.task != ALL])
    duo_gates.draw_gates(of_gates, gates_of(flags))
    for axes, counts, what in (
        (by_query, spread.by_query, "query head: keys that a query needs"),
        (by_prompt, spread.by_prompt, "KV head: tokens with a prompt's significance"),
    ):
        _draw_spread(axes, counts, spread.tokens, what)


def _draw_answers(axes: Axes, rows: Sequence[Row]) -> None:
    names, contexts = (
        list(dict.fromkeys(getattr(r, x) for r in rows)) for x in ("task", "context")
    )
    scores = np.full((len(names), len(contexts)), np.nan)
    for row in rows:
        at = names.index(row.task), contexts.index(row.context)
        scores[at] = row.score
        axes.text(at[1], at[0], f"{row.score:.0f}", ha="center", va="center", fontsize=8)
    axes.imshow(scores, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="context (tokens)", title="right answers (%)")


def _draw_spread(axes: Axes, counts: np.ndarray, tokens: int, what: str) -> None:
    """Draw each head's mean, sorted, with its range over prompts. counts: [N, L, heads]."""
    flat = counts.reshape(len(counts), -1)
    flat = flat[:, np.argsort(flat.mean(0))]
    heads = np.arange(flat.shape[1])
    axes.fill_between(
        heads, flat.min(0), flat.max(0), alpha=0.3, label="least and most, of prompts"
    )
    axes.plot(heads, flat.mean(0), label="mean")
    axes.axhline(tokens, color="#999999", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="head, sorted", ylabel=f"tokens of {tokens:,}", title=f"95 % by {what}")
    axes.legend()


STUDY = Study(
    __file__,
    title="Whether a model can judge sparsity and compression",
    kind="analogue",
    claim="the model answers, half of its KV heads may stream, and its heads need few tokens",
    rule="95 % right on six tasks, half of the gates below 0.3, and a median of 20 % of the tokens",
    holds=lambda v: all(
        v[name] >= goal if bound == "at least" else v[name] <= goal
        for name, (goal, bound) in GOALS.items()
    ),
    setting=Setting("eight tasks at 512 to 4,096 tokens", "no paper has this", "reduced"),
    flags=QualifyFlags,
    measure=measured(dense),
    values=values,
    check=check,
    draw=draw,
    table=table,
    quick={"num_prompts": 1, "contexts": (512,), "spread_context": 512, "spread_prompts": 1},
    minutes=(2, 30),
    size=(13, 9),
)

if __name__ == "__main__":
    STUDY.run()
