"""Exact-match accuracy of a model on tasks with known answers, through the engine.

python -m experiments.evaluate --model=bundled --tasks=needle,chain --contexts=256,1024

Prompts are a function of task, context and --seed alone, so two runs (two models, two policies)
answer the same ones: `--compare_with=<prompts.csv of the other run>` gives their paired difference.
Writes to --output_dir: accuracy.csv, prompts.csv (each answer), accuracy.png, report.json and
summary.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from absl import flags
from tqdm import tqdm

from experiments.lib import report, run_record
from experiments.lib.bootstrap import mean_interval
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.flags import define_engine_flags, fields_of, loading
from experiments.lib.program import Options, Program, refusals
from experiments.lib.text_files import read_csv, shown
from experiments.tasks import tasks
from models import checkpoint
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams

EXACT_TASKS = [task for task in tasks.TASKS if task != "story"]


@dataclass(frozen=True)
class Answer:
    """One prompt's result; `index` names the prompt within its task and context."""

    task: str
    context: int
    index: int
    exact: bool
    expected: str
    text: str


@dataclass(frozen=True)
class Accuracy:
    """Share of exact answers, low and high of its 95 % bootstrap interval; `difference` has the
    same of the paired difference to another run on the same prompts, if one was given."""

    task: str
    context: int
    prompts: int
    exact: float
    low: float
    high: float
    difference: tuple[float, float, float] | None = None


def settings(
    names: Sequence[str], contexts: Sequence[str], config: EngineConfig
) -> list[tuple[str, int]]:
    """All (task, context) to evaluate; ValueError for one that cannot be."""
    for name in names:
        if name not in EXACT_TASKS:
            raise ValueError(f"unknown task {name!r}; allowed: {', '.join(EXACT_TASKS)}")
    lengths = []
    for context in contexts:
        if not context.isdigit() or not 256 <= int(context) <= config.max_model_len:
            raise ValueError(
                f"contexts are token counts from 256 to max_model_len ({config.max_model_len}), "
                f"not {context!r}"
            )
        lengths.append(int(context))
    if not names or not lengths:
        raise ValueError("--tasks and --contexts must name at least one each")
    return [(t, c) for t in names for c in lengths if c >= tasks.MIN_CONTEXT.get(t, 0)]


def evaluate(
    engine: Engine, pairs: Sequence[tuple[str, int]], prompts: int, seed: int, progress: bool = True
) -> list[Answer]:
    """Greedy answers of `engine` to `prompts` prompts of each (task, context)."""
    answers = []
    bar = tqdm(total=len(pairs) * prompts, desc="answering", unit=" prompts", disable=not progress)
    for task, context in pairs:
        asked = tasks.make_prompts(task, context, prompts, seed, engine.tokenizer)
        how = [SamplingParams(max_tokens=p.max_tokens, stop=p.stop) for p in asked]
        outputs = engine.generate([p.prompt for p in asked], how)
        for index, (prompt, output) in enumerate(zip(asked, outputs, strict=True)):
            exact = report.is_exact(output.text, prompt.answer, prompt.stop)
            answers.append(Answer(task, context, index, exact, prompt.answer, output.text))
        bar.update(len(asked))
        right = sum(a.exact for a in answers[-len(asked) :])
        bar.set_postfix_str(f"{task} at {context}: {right}/{len(asked)}")
    bar.close()
    return answers


def accuracies(
    answers: Sequence[Answer], others: dict[tuple[str, int, int], bool] | None = None
) -> list[Accuracy]:
    """Accuracy by (task, context), in order of appearance.

    others: another run's results by (task, context, index). Raises ValueError if it lacks a prompt.
    """
    groups: dict[tuple[str, int], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.task, answer.context), []).append(answer)
    rows = []
    for (task, context), group in groups.items():
        exact, low, high = mean_interval([a.exact for a in group])
        difference = None
        if others is not None:
            missing = [a.index for a in group if (task, context, a.index) not in others]
            if missing:
                raise ValueError(
                    f"the run to compare with lacks {len(missing)} prompts of {task} at {context}"
                )
            theirs = [others[task, context, a.index] for a in group]
            difference = mean_interval([a.exact - other for a, other in zip(group, theirs)])
        rows.append(Accuracy(task, context, len(group), exact, low, high, difference))
    return rows


def read_answers(path: str) -> dict[tuple[str, int, int], bool]:
    """A run's prompts.csv by (task, context, index); ValueError, by line, if it is none."""
    answers = {}
    for where, _, row in read_csv(path, ("task", "context", "index", "exact")):
        try:
            key = row["task"], int(row["context"]), int(row["index"])
        except ValueError:
            raise ValueError(f"{where}: context and index must be numbers") from None
        if row["exact"] not in ("True", "False"):
            raise ValueError(f"{where}: exact must be True or False, not {shown(row['exact'])}")
        answers[key] = row["exact"] == "True"
    return answers


def table(rows: Sequence[Accuracy]) -> str:
    """Markdown: a line a task, a column a context, accuracy in percent with its interval."""
    contexts = sorted({row.context for row in rows})
    cells = {(r.task, r.context): f"{100 * r.exact:.1f} ({100 * r.low:.0f}–{100 * r.high:.0f})"
             for r in rows}  # fmt: skip
    lines = [
        "| task | " + " | ".join(map(str, contexts)) + " |",
        "|---" * (len(contexts) + 1) + "|",
    ]
    for task in dict.fromkeys(row.task for row in rows):
        lines.append(
            f"| {task} | " + " | ".join(cells.get((task, c), "–") for c in contexts) + " |"
        )
    for row in rows:
        if row.difference is not None:
            mean, low, high = (100 * x for x in row.difference)
            lines.append(
                f"{row.task} at {row.context}: {mean:+.1f} points ({low:+.1f} to {high:+.1f}) "
                "against the other run"
            )
    return "\n".join(lines)


def plot(rows: Sequence[Accuracy], path: Path, footer: str) -> None:
    """Accuracy over context, a line a task, with its interval."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        exact = [100 * r.exact for r in mine]
        errors = [[100 * (r.exact - r.low) for r in mine], [100 * (r.high - r.exact) for r in mine]]
        axes.errorbar([r.context for r in mine], exact, errors, marker="o", capsize=3, label=task)
    axes.set_xscale("log", base=2)
    contexts = sorted({row.context for row in rows})
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set(xlabel="context (tokens)", ylabel="exact answers (%)", ylim=(0, 103))
    axes.legend(ncols=2)
    figure.supxlabel(footer, fontsize=7)
    run_record.save_figure(figure, path, dpi=150)
    plt.close(figure)


def write(output_dir: Path, rows: Sequence[Accuracy], answers: Sequence[Answer], facts: dict):
    """All files of an evaluation."""
    environment = run_record.describe_environment()
    run_record.write_csv(output_dir, "accuracy.csv", rows)
    run_record.write_csv(output_dir, "prompts.csv", answers)
    run_record.write_json(output_dir, "report.json", facts | {"accuracy": rows} | environment)
    summary = {f"exact_{row.task}_{row.context}": row.exact for row in rows}
    run_record.write_summary(output_dir, summary)
    plot(rows, output_dir / "accuracy.png", run_record.hardware_line(environment))


def main(options: Options) -> None:
    with refusals():
        config = engine_config(
            checkpoint.load_config(options.model), **fields_of(EngineConfig, options)
        )
        pairs = settings(options.tasks, options.contexts, config)
        others = read_answers(options.compare_with) if options.compare_with else None
        engine = load_engine(config, **loading(options))
        engine.warm_up()
        answers = evaluate(engine, pairs, options.num_prompts, options.seed)
        rows = accuracies(answers, others)
    facts = {
        "experiment": "evaluate",
        "flags": vars(options),
        "seed": options.seed,
        "weights_sha256": checkpoint.weights_hash(options.model),
    }
    write(Path(options.output_dir), rows, answers, facts)
    print(table(rows))
    print(f"accuracy.csv, prompts.csv, accuracy.png and more are in {options.output_dir}/")


def define_flags() -> None:
    flags.DEFINE_list("tasks", EXACT_TASKS, "comma-separated tasks of experiments/tasks/tasks.py")
    flags.DEFINE_list("contexts", ["256", "512", "1024", "2048"], "prompt and answer, in tokens")
    flags.DEFINE_integer("num_prompts", 100, "prompts of each task and context", lower_bound=1)
    flags.DEFINE_string("compare_with", "", "prompts.csv of another run, for paired differences")
    define_engine_flags()


PROGRAM = Program(
    main, define_flags, "results/evaluate", ("accuracy.csv", "prompts.csv", "accuracy.png")
)

if __name__ == "__main__":
    PROGRAM.run()
