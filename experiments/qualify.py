"""Whether a model can judge sparsity and compression: its answers, and how its heads differ.

python -m experiments.qualify --model=judge

Right answers on the tasks by context; the share of KV heads that may stream, by a gate below .3
(--gates; `experiments.train.duo_gates`); and, over --spread_prompts of each task at
--spread_context tokens, how many tokens hold 95 % of a head's attention:

* of a query that produces a token of the answer, by query head: the keys that it needs;
* of a prompt, by KV head: the tokens with most significance, as DiffKV counts them (§3, Figs. 4 and
  5). By this measure alone a head that sees the last 64 tokens needs most tokens, since every token
  is among the last 64 of some query: the first measure shows whether a head is local.

Goals: 95 % right on six of eight tasks, half of the KV heads below .3, and a median head that needs
20 % of the tokens by query. Writes to --output_dir: accuracy.csv, accuracy.png, report.json and
summary.json. Answers are kept there, and a later run does not ask again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import evaluate
from experiments.figures import accuracy, attention_concentration
from experiments.figures.accuracy import Row
from experiments.figures.diffkv import distributions
from experiments.lib.answers import ALL
from experiments.lib.program import Options, Program, refusals
from experiments.tasks.files import Problems
from experiments.tasks.tasks import MIN_CONTEXT
from experiments.train import duo_gates
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from models.hub import find

LOCAL_GATE, RIGHT = 0.3, 95.0
GOALS = {
    "tasks_at_95": (6, "at least"), "local_head_share": (0.5, "at least"),
    "median_share_of_tokens_for_95": (0.2, "at most"),
}  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """How many of `tokens` tokens hold 95 % of a head's attention, over N prompts.

    by_query: [N, L, H] keys for one query, the median over the queries of a prompt's answer.
    by_prompt: [N, L, K] tokens for the significance of a whole prompt.
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


def problems_of(options: Options, tokenizer) -> Problems:
    """The prompts that attention is measured on. Raises ValueError if the model's context is too
    short, or no task fits."""
    longest = checkpoint.load_config(options.model).max_position_embeddings
    if options.spread_context > longest:
        raise ValueError(f"--spread_context must be at most the model's longest, {longest}")
    pairs = [
        (task, options.spread_context)
        for task in options.tasks
        if options.spread_context >= MIN_CONTEXT.get(task, 0)
    ]
    if not pairs:
        raise ValueError("no task fits --spread_context")
    return evaluate.own_problems(pairs, options.spread_prompts, options.seed, tokenizer)


def measure(params, config: ModelConfig, tokenizer, problems: Problems) -> Spread:
    """Over problems of one context."""
    by_query: list[np.ndarray] = []
    of_tasks: dict[str, list[distributions.Prompt]] = {}
    for (task, _), asked in problems.items():
        found = attention_concentration.measure(
            params, config, tokenizer, asked, distributions.SHARE
        )
        by_query += [np.median(one[:, :, 0], -1) for one in found]
        of_tasks[task] = distributions.measure(params, config, tokenizer, asked)
    by_prompt = [prompt.critical() for prompts in of_tasks.values() for prompt in prompts]
    rows = [row for task, prompts in of_tasks.items() for row in distributions.table(task, prompts)]
    [tokens] = {context for _, context in problems}
    figures = distributions.summarise(rows, of_tasks)
    return Spread(tokens, np.stack(by_query), np.stack(by_prompt), figures)


def conclude(
    gates: np.ndarray, spread: Spread, rows: Sequence[Row]
) -> tuple[str, dict[str, float]]:
    [whole] = accuracy.pooled(rows).values()
    names = dict.fromkeys(row.task for row in rows if row.task != ALL)
    # All contexts have equally many prompts.
    scores = {task: np.mean([row.score for row in rows if row.task == task]) for task in names}
    numbers = {
        "accuracy_pooled": whole.score / 100,
        "tasks": len(names),
        "tasks_at_95": sum(bool(score >= RIGHT) for score in scores.values()),
        "kv_heads": gates.size,
        "local_head_share": float((gates < LOCAL_GATE).mean()),
        "median_gate": float(np.median(gates)),
        **spread.numbers(),
    }
    lines = [f"{task:10}{score:7.1f} % right" for task, score in scores.items()]
    for name, (goal, bound) in GOALS.items():
        met = numbers[name] >= goal if bound == "at least" else numbers[name] <= goal
        lines.append(
            f"{name} {numbers[name]:.2f}, goal {bound} {goal:g}: {'no' * (not met) or 'met'}"
        )
    return "\n".join(lines), numbers


def draw(gates: np.ndarray, spread: Spread, figure: Figure, rows: Sequence[Row]) -> None:
    figure.set_size_inches(13, 9)
    answers, of_gates, by_query, by_prompt = figure.subplots(2, 2).flat
    _draw_answers(answers, [row for row in rows if row.task != ALL])
    duo_gates.draw(of_gates, gates)
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
    """counts [N, L, heads]: each head's mean, sorted, with its range over the prompts."""
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


def main(options: Options) -> int:
    with refusals():
        dense, tokenizer = accuracy.config_of(options), load_tokenizer(options.model)
        evaluate.settings(options.tasks, options.contexts, dense)
        problems = problems_of(options, tokenizer)
        options.gates = options.gates or str(find(options.model) / "duo_gates.json")
        gates = np.array(accuracy.gates_of(options))
        config, params = checkpoint.load(options.model, "float32")
    spread = measure(params, config, tokenizer, problems)
    return accuracy.study(
        options, "qualify", lambda _: {"dense": dense},
        lambda figure, _, found: draw(gates, spread, figure, accuracy.rows_of(
            "dense", found["dense"], found["dense"])),
        lambda rows, _: conclude(gates, spread, rows),
    )  # fmt: skip


def define_flags() -> None:
    contexts = ["512", "1024", "2048", "4096"]
    # 8 tasks at 4 contexts: 1,024 prompts
    accuracy.define_flags(evaluate.DEFAULT_TASKS, contexts, num_prompts=32)
    flags.DEFINE_string("gates", "", "file of the model's gates; its own duo_gates.json by default")
    flags.DEFINE_integer("spread_context", 2048, "tokens of prompt and answer", lower_bound=256)
    flags.DEFINE_integer("spread_prompts", 4, "of each task", lower_bound=1)


PROGRAM = Program(main, define_flags, "results/qualify", accuracy.FILES)

if __name__ == "__main__":
    PROGRAM.run()
