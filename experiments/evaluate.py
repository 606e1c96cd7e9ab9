"""Accuracy of a model on tasks with known answers, through the engine.

python -m experiments.evaluate --model=bundled --tasks=needle,chain --contexts=256,1024
python -m experiments.evaluate --model=my_checkpoint --problems=longbench.jsonl --match=f1

Reports the score of the answers, and the log-probability of the reference answers (see
lib/reference.py). With --problems, the prompts come from files (see tasks/files.py), and --match
scores the answers. Without --problems, the prompts come from our own tasks, and depend on task,
context and --seed alone, so that two runs (two models, two policies) answer the same prompts.
`--compare_with=<prompts.csv of the other run>` adds, for each setting and for all settings
together, the paired differences, and the divergence of the next-token distributions from the other
run's along the reference answers. Both models must have one tokenizer.

Writes to --output_dir: accuracy.csv, prompts.csv (each answer), distributions.npz, accuracy.png,
report.json and summary.json. Ctrl-C ends the run after the current setting: finished settings are
written, and marked as partial. They replace a complete run only with --overwrite.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from experiments.lib import kv_held, reference, run_record, serving
from experiments.lib.answers import ALL, Accuracy, Answer, Evaluation, accuracies, read, require_all
from experiments.lib.engines import load_engine
from experiments.lib.flags import loading
from experiments.lib.program import Program, refusals
from experiments.lib.typed_flags import ModelFlags, Output, flag, part
from experiments.tasks import files, tasks
from experiments.tasks.files import Problems
from models import checkpoint, load_tokenizer
from models.sampling import MAX_LOGPROBS
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams

DEFAULT_TASKS = [task for task in tasks.TASKS if task != "story"]
EXACT_TASKS = [*DEFAULT_TASKS, *tasks.HARD_TASKS]
MOST_PROMPTS = 10_000  # per task and context: all are in memory before the first is answered


@dataclass(frozen=True)
class EvaluateFlags(ModelFlags):
    tasks: tuple[str, ...] = flag(tuple(DEFAULT_TASKS), "of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((256, 512, 1024, 2048), "prompt and answer, in tokens")
    num_prompts: int = flag(100, "prompts of each task and context", least=1, most=MOST_PROMPTS)
    problems: tuple[str, ...] = flag((), "files of prompts and answers, instead of our own tasks")
    match: str = flag("exact", "how answers are scored", choices=tuple(files.MATCHES))
    output_tokens: int = flag(128, "output tokens of problems without max_tokens", least=1)
    compare_with: str = flag("", "prompts.csv of another run, for paired differences")
    engine: EngineConfig = part(EngineConfig())


def settings(
    names: Sequence[str], contexts: Sequence[int], config: EngineConfig
) -> list[tuple[str, int]]:
    """The (task, context) pairs to evaluate, each once, without contexts too short for their task.
    Raises ValueError for an unknown task, for a context outside 256 to max_model_len, and without a
    task or a context."""
    for name in names:
        if name not in EXACT_TASKS:
            raise ValueError(f"unknown task {name!r}; allowed: {', '.join(EXACT_TASKS)}")
    for context in contexts:
        if not 256 <= context <= config.max_model_len:
            raise ValueError(
                f"contexts are token counts from 256 to max_model_len ({config.max_model_len}), "
                f"not {context}"
            )
    if not names or not contexts:
        raise ValueError("--tasks and --contexts must name at least one each")
    return [
        (name, length)
        for name in dict.fromkeys(names)
        for length in dict.fromkeys(contexts)
        if length >= tasks.MIN_CONTEXT.get(name, 0)
    ]


def own_problems(pairs: Sequence[tuple[str, int]], prompts: int, seed: int, tokenizer) -> Problems:
    """`prompts` problems of each (task, context). Raises ValueError if a problem does not fit."""
    return {
        (task, context): tasks.make_prompts(task, context, prompts, seed, tokenizer)
        for task, context in pairs
    }


def evaluate(
    engine: Engine, problems: Problems, match: str = "exact", progress: bool = True,
    found: Evaluation | None = None, stopped: Callable[[], bool] = lambda: False,
    measure_memory: bool = False,
) -> Evaluation:  # fmt: skip
    """Greedy answers of `engine` to all problems, until all are answered or `stopped` returns True.

    match: a name in `files.MATCHES`.
    found: the evaluation to which answers are added, a setting at a time.
    measure_memory: whether to record the KV memory of sequences; clears the engine's events.
    """
    found, score = Evaluation() if found is None else found, files.MATCHES[match]
    total = sum(map(len, problems.values()))
    bar = tqdm(total=total, desc="answering", unit=" prompts", disable=not progress)
    for (task, context), asked in problems.items():
        if stopped():
            break
        how = [
            SamplingParams(max_tokens=p.max_tokens, stop=p.stop, logprobs=MAX_LOGPROBS)
            for p in asked
        ]
        outputs = engine.generate([p.prompt for p in asked], how)
        along = reference.of_answers(
            engine, [p.prompt for p in asked], [p.answer for p in asked], outputs
        )
        for index, (prompt, output) in enumerate(zip(asked, outputs, strict=True)):
            logprob = float(along[index].logprobs.mean())
            answer = Answer(
                task, context, index, score(output.text, prompt), prompt.answer, output.text,
                logprob,
            )  # fmt: skip
            found.answers.append(answer)
            found.distributions[answer.key] = along[index]
        if measure_memory:
            found.held[task, context] = kv_held.of_sequences(engine)
            engine.metrics.clear()
        bar.update(len(asked))
        points = sum(a.score for a in found.answers[-len(asked) :])
        bar.set_postfix_str(f"{task} at {context}: {points:g}/{len(asked)}")
    bar.close()
    return found


def table(rows: Sequence[Accuracy]) -> str:
    """Markdown: accuracy in percent with its interval, by task (lines) and context (columns)."""
    single = [row for row in rows if row.task != ALL]
    contexts = sorted({row.context for row in single})
    cells = {(r.task, r.context): f"{100 * r.score:.1f} ({100 * r.low:.0f}–{100 * r.high:.0f})"
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
    """Accuracy over context with its interval, a line for each task."""
    rows = [row for row in rows if row.task != ALL]
    figure = run_record.new_figure(7, 4.5)
    axes = figure.subplots()
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        scores = np.array([(100 * r.score, 100 * r.low, 100 * r.high) for r in mine]).T
        errors = np.abs(scores[1:] - scores[0])
        axes.errorbar(
            [r.context for r in mine], scores[0], errors, marker="o", capsize=3, label=task
        )
    axes.set_xscale("log", base=2)
    contexts = sorted({row.context for row in rows})
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set(xlabel="context (tokens)", ylabel="right answers (%)", ylim=(0, 103))
    axes.legend(ncols=2)
    figure.supxlabel(footer, fontsize=7)
    run_record.save_figure(figure, path, dpi=150)


def summary(rows: Sequence[Accuracy]) -> dict[str, float]:
    """Flat numbers: NAME_TASK_CONTEXT for each setting, and NAME_all for all settings together."""
    numbers: dict[str, float] = {}
    for row in rows:
        at = ALL if row.task == ALL else f"{row.task}_{row.context}"
        numbers |= {f"score_{at}": row.score, f"logprob_{at}": row.logprob}
        for name in ("difference", "logprob_difference", "divergence"):
            if interval := getattr(row, name):
                numbers |= {f"{name}_{at}": interval[0], f"{name}_low_{at}": interval[1]}
    return numbers


def write(
    folder: Path, rows: Sequence[Accuracy], found: Evaluation, facts: Mapping
) -> list[OSError]:
    """Write all files of an evaluation; returns the errors of files that were not written."""
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


def problems_of(flags: EvaluateFlags) -> Problems:
    """The problems of the flags. Raises ValueError for an invalid problem, with file and line."""
    tokenizer, config = load_tokenizer(flags.model), flags.engine
    if flags.problems:
        return files.read_problems(
            flags.problems, tokenizer, flags.output_tokens, config.max_model_len
        )
    pairs = settings(flags.tasks, flags.contexts, config)
    if not pairs:
        raise ValueError("no task fits the contexts")
    return own_problems(pairs, flags.num_prompts, config.seed, tokenizer)


def vocabulary_hash(model: str) -> str:
    """SHA-256, in hex, of the tokens of a model's tokenizer and their ids."""
    vocabulary = sorted(load_tokenizer(model).get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def check_vocabulary(folder: Path, ours: str) -> None:
    """Raise ValueError if the report in `folder` names another vocabulary."""
    try:
        theirs = json.loads((folder / "report.json").read_bytes()).get("vocabulary_sha256", ours)
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if theirs != ours:
        raise ValueError("--compare_with must be of a model with the same tokenizer")


def main(flags: EvaluateFlags, output: Output) -> int:
    with refusals():
        problems = problems_of(flags)
        others = read(flags.compare_with) if flags.compare_with else None
        if others is not None:
            require_all(others, problems, load_tokenizer(flags.model))
            check_vocabulary(Path(flags.compare_with).parent, vocabulary_hash(flags.model))
        engine = load_engine(flags.engine, **loading(flags))
    engine.warm_up()
    facts = {
        "experiment": "evaluate",
        "flags": flags,
        "seed": flags.engine.seed,
        "weights_sha256": checkpoint.weights_hash(flags.model),
        "vocabulary_sha256": vocabulary_hash(flags.model),
    }
    found = Evaluation()

    def answer(stopped: Callable[[], bool]) -> None:
        evaluate(engine, problems, flags.match, found=found, stopped=stopped)

    def write_found(cause: str | None) -> tuple[str, list[OSError]]:
        total = sum(map(len, problems.values()))
        missing = serving.missing(cause, total, ["stop"] * len(found.answers))
        if missing and not output.overwrite and run_record.is_complete(output.folder):
            return "ended early; the complete result of before stays", []
        rows = accuracies(found, others)
        failures = write(output.folder, rows, found, facts | {"partial": missing})
        return table(rows) + serving.partial_line(missing), failures

    written = f"accuracy.csv, prompts.csv, accuracy.png and more are in {output.output_dir}/"
    return serving.serve_and_write(answer, write_found, written)


PROGRAM = Program(
    main, EvaluateFlags, Output("results/evaluate"),
    ("accuracy.csv", "prompts.csv", "distributions.npz", "accuracy.png"),
)  # fmt: skip

if __name__ == "__main__":
    PROGRAM.run()
