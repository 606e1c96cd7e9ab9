"""Exact-match accuracy of a model on tasks with known answers, through the engine.

python -m experiments.evaluate --model=bundled --tasks=needle,chain --contexts=256,1024

Beside exact answers it reports the log-probability of the reference answers (see lib/reference.py).
Prompts are a function of task, context and --seed alone, so two runs (two models, two policies)
answer the same ones: `--compare_with=<prompts.csv of the other run>` gives paired differences, and
the divergence of the distributions along the answers from the other run's, for each setting and for
all together. Writes to --output_dir: accuracy.csv, prompts.csv (each answer), distributions.npz,
accuracy.png, report.json and summary.json. Ctrl-C ends it after the setting that runs: those that
were answered are written, and marked as partial.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.lib import reference, report, run_record, serving
from experiments.lib.bootstrap import mean_interval
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.flags import define_engine_flags, fields_of, loading
from experiments.lib.program import Options, Program, refusals
from experiments.lib.reference import Distributions, Key
from experiments.lib.text_files import read_csv, shown
from experiments.tasks import tasks
from models import checkpoint
from models.sampling import MAX_LOGPROBS
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams

DEFAULT_TASKS = [task for task in tasks.TASKS if task != "story"]
EXACT_TASKS = [*DEFAULT_TASKS, *tasks.HARD_TASKS]
ALL = "all"  # the task of what is pooled over settings, with context 0
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Answer:
    """One prompt's result; `index` names the prompt within its task and context. logprob: of the
    expected answer, by token."""

    task: str
    context: int
    index: int
    exact: bool
    expected: str
    text: str
    logprob: float

    @property
    def key(self) -> Key:
        return self.task, self.context, self.index


@dataclass(frozen=True)
class Accuracy:
    """Share of exact answers, low and high of its 95 % bootstrap interval, and the mean
    log-probability of the expected answers, by token.

    difference, logprob_difference: the same of the paired differences to another run on the same
    prompts, if one was given; divergence: from its distributions, in nats by token. Each is a mean
    with low and high of its interval.
    """

    task: str
    context: int
    prompts: int
    exact: float
    low: float
    high: float
    logprob: float
    difference: Interval | None = None
    logprob_difference: Interval | None = None
    divergence: Interval | None = None


@dataclass(frozen=True)
class Evaluation:
    """Answers, and the distributions along the expected ones, by prompt."""

    answers: list[Answer] = field(default_factory=list)
    distributions: dict[Key, Distributions] = field(default_factory=dict)


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
    engine: Engine, pairs: Sequence[tuple[str, int]], prompts: int, seed: int,
    progress: bool = True, found: Evaluation | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation:  # fmt: skip
    """Greedy answers of `engine` to `prompts` prompts of each (task, context), until all are there
    or `stopped` says so. found: what they are added to, a setting at a time."""
    found = Evaluation() if found is None else found
    bar = tqdm(total=len(pairs) * prompts, desc="answering", unit=" prompts", disable=not progress)
    for task, context in pairs:
        if stopped():
            break
        asked = tasks.make_prompts(task, context, prompts, seed, engine.tokenizer)
        how = [
            SamplingParams(max_tokens=p.max_tokens, stop=p.stop, logprobs=MAX_LOGPROBS)
            for p in asked
        ]
        outputs = engine.generate([p.prompt for p in asked], how)
        along = reference.of_answers(
            engine, [p.prompt for p in asked], [p.answer for p in asked], outputs
        )
        for index, (prompt, output) in enumerate(zip(asked, outputs, strict=True)):
            exact = report.is_exact(output.text, prompt.answer, prompt.stop)
            logprob = float(along[index].logprobs.mean())
            answer = Answer(task, context, index, exact, prompt.answer, output.text, logprob)
            found.answers.append(answer)
            found.distributions[answer.key] = along[index]
        bar.update(len(asked))
        right = sum(a.exact for a in found.answers[-len(asked) :])
        bar.set_postfix_str(f"{task} at {context}: {right}/{len(asked)}")
    bar.close()
    return found


def accuracies(ours: Evaluation, others: Evaluation | None = None) -> list[Accuracy]:
    """Accuracy by (task, context), in order of appearance, and of all together, if there are more.

    others: another run, which `require_all` has accepted. Raises ValueError if a prompt of it had
    another answer.
    """
    groups: dict[tuple[str, int], list[Answer]] = {}
    for answer in ours.answers:
        groups.setdefault((answer.task, answer.context), []).append(answer)
    if len(groups) > 1:
        groups[ALL, 0] = ours.answers
    theirs = None if others is None else {answer.key: answer for answer in others.answers}
    rows = []
    for (task, context), group in groups.items():
        exact, low, high = mean_interval([a.exact for a in group])
        row = task, context, len(group), exact, low, high
        logprob = float(np.mean([a.logprob for a in group]))
        if others is None or theirs is None:
            rows.append(Accuracy(*row, logprob))
            continue
        paired = [(a, theirs[a.key]) for a in group]
        if any(a.expected != other.expected for a, other in paired):
            raise ValueError(f"the run to compare with had other prompts of {task} at {context}")
        rows.append(
            Accuracy(
                *row, logprob,
                difference=mean_interval([float(a.exact) - other.exact for a, other in paired]),
                logprob_difference=mean_interval([a.logprob - b.logprob for a, b in paired]),
                divergence=mean_interval([
                    reference.divergence(ours.distributions[a.key], others.distributions[a.key])
                    for a in group
                ]),
            )
        )  # fmt: skip
    return rows


def read(path: str) -> Evaluation:
    """A run by its prompts.csv, and the distributions.npz beside it; ValueError, by line, if it is
    none."""
    answers = []
    columns = "task", "context", "index", "exact", "expected", "text", "logprob"
    for where, _, row in read_csv(path, columns):
        try:
            context, index, logprob = int(row["context"]), int(row["index"]), float(row["logprob"])
        except ValueError:
            raise ValueError(f"{where}: context, index and logprob must be numbers") from None
        if row["exact"] not in ("True", "False"):
            raise ValueError(f"{where}: exact must be True or False, not {shown(row['exact'])}")
        exact = row["exact"] == "True"
        answers.append(
            Answer(row["task"], context, index, exact, row["expected"], row["text"], logprob)
        )
    return Evaluation(answers, reference.read(Path(path).parent / "distributions.npz"))


def require_all(others: Evaluation, pairs: Sequence[tuple[str, int]], prompts: int) -> None:
    """Raise ValueError if the run to compare with lacks a prompt, before any is answered."""
    keys = {answer.key for answer in others.answers} & others.distributions.keys()
    for task, context in pairs:
        lacking = sum((task, context, index) not in keys for index in range(prompts))
        if lacking:
            raise ValueError(
                f"the run to compare with lacks {lacking} prompts of {task} at {context}"
            )


def table(rows: Sequence[Accuracy]) -> str:
    """Markdown: a line a task, a column a context, accuracy in percent with its interval."""
    single = [row for row in rows if row.task != ALL]
    contexts = sorted({row.context for row in single})
    cells = {(r.task, r.context): f"{100 * r.exact:.1f} ({100 * r.low:.0f}–{100 * r.high:.0f})"
             for r in single}  # fmt: skip
    lines = [
        "| task | " + " | ".join(map(str, contexts)) + " |",
        "|---" * (len(contexts) + 1) + "|",
    ]
    for task in dict.fromkeys(row.task for row in single):
        lines.append(
            f"| {task} | " + " | ".join(cells.get((task, c), "–") for c in contexts) + " |"
        )
    for row in rows:
        name = "all" if row.task == ALL else f"{row.task} at {row.context}"
        line = f"{name}: log-probability of the answers {row.logprob:.4f} by token"
        if row.difference and row.logprob_difference and row.divergence:
            points = 100 * np.array(row.difference)
            line += (
                f"; against the other run {_shown(points, '.1f')} points, "
                f"{_shown(row.logprob_difference, '.4f')} log-probability, "
                f"divergence {row.divergence[0]:.2e} nats"
            )
        lines.append(line)
    return "\n".join(lines)


def _shown(interval, digits: str) -> str:
    mean, low, high = (format(x, "+" + digits) for x in interval)
    return f"{mean} ({low} to {high})"


def plot(rows: Sequence[Accuracy], path: Path, footer: str) -> None:
    """Accuracy over context, a line a task, with its interval."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row.task != ALL]
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


def summary(rows: Sequence[Accuracy]) -> dict[str, float]:
    """Flat numbers: of each setting, and without a context of all together."""
    numbers: dict[str, float] = {}
    for row in rows:
        at = ALL if row.task == ALL else f"{row.task}_{row.context}"
        numbers |= {f"exact_{at}": row.exact, f"logprob_{at}": row.logprob}
        for name in ("difference", "logprob_difference", "divergence"):
            if interval := getattr(row, name):
                numbers |= {f"{name}_{at}": interval[0], f"{name}_low_{at}": interval[1]}
    return numbers


def write(
    folder: Path, rows: Sequence[Accuracy], found: Evaluation, facts: Mapping
) -> list[OSError]:
    """All files of an evaluation; what could not be written."""
    environment = run_record.describe_environment()
    facts = {**facts, "accuracy": rows, **environment}
    return run_record.write_all([
        lambda: run_record.write_csv(folder, "accuracy.csv", rows),
        lambda: run_record.write_csv(folder, "prompts.csv", found.answers),
        lambda: reference.write(folder / "distributions.npz", found.distributions),
        lambda: run_record.write_json(folder, "report.json", facts),
        lambda: run_record.write_summary(folder, summary(rows)),
        lambda: plot(rows, folder / "accuracy.png", run_record.hardware_line(environment)),
    ])  # fmt: skip


def main(options: Options) -> int:
    with refusals():
        config = engine_config(
            checkpoint.load_config(options.model), **fields_of(EngineConfig, options)
        )
        pairs = settings(options.tasks, options.contexts, config)
        others = read(options.compare_with) if options.compare_with else None
        if others is not None:
            require_all(others, pairs, options.num_prompts)
        engine = load_engine(config, **loading(options))
    engine.warm_up()
    facts = {
        "experiment": "evaluate",
        "flags": vars(options),
        "seed": options.seed,
        "weights_sha256": checkpoint.weights_hash(options.model),
    }
    found = Evaluation()

    def answer(stopped: Callable[[], bool]) -> None:
        evaluate(engine, pairs, options.num_prompts, options.seed, found=found, stopped=stopped)

    def write_found(cause: str | None) -> tuple[str, list[OSError]]:
        rows = accuracies(found, others)
        total = len(pairs) * options.num_prompts
        missing = serving.missing(cause, total, ["stop"] * len(found.answers))
        failures = write(Path(options.output_dir), rows, found, facts | {"partial": missing})
        return table(rows) + serving.partial_line(missing), failures

    files = f"accuracy.csv, prompts.csv, accuracy.png and more are in {options.output_dir}/"
    return serving.serve_and_write(answer, write_found, files)


def define_flags() -> None:
    flags.DEFINE_list("tasks", DEFAULT_TASKS, "comma-separated tasks of experiments/tasks/tasks.py")
    flags.DEFINE_list("contexts", ["256", "512", "1024", "2048"], "prompt and answer, in tokens")
    flags.DEFINE_integer("num_prompts", 100, "prompts of each task and context", lower_bound=1)
    flags.DEFINE_string("compare_with", "", "prompts.csv of another run, for paired differences")
    define_engine_flags()


PROGRAM = Program(
    main,
    define_flags,
    "results/evaluate",
    ("accuracy.csv", "prompts.csv", "distributions.npz", "accuracy.png"),
)

if __name__ == "__main__":
    PROGRAM.run()
