"""Accuracy of several systems on the same prompts, each paired with the first one.

Used by the figures of `lserve` and `diffkv`. A system is an engine configuration; what it answers
is judged as `experiments.evaluate` judges it: right answers, the log-probability of the reference
answers, and how far the distributions along them are from the first system's.

A study takes long. Answers are kept in --output_dir (`lib/kept_answers.py`), and a later run with
the same output_dir does not ask a system the same again, unless the sources that ask, answer and
grade, the inputs, or JAX's version have changed. A run with other flags needs --overwrite to use
the folder, and keeps its answers.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import evaluate
from experiments.lib import kept_answers, kv_held, run_record, serving
from experiments.lib.answers import ALL, Accuracy, Evaluation, accuracies
from experiments.lib.engines import check_implementation, engine_config, load_engine
from experiments.lib.flags import define_model_flags, loading
from experiments.lib.kv_held import Held
from experiments.lib.program import Options, refusals
from models import checkpoint, load_tokenizer
from paged.config import EngineConfig
from paged.device.tensor_parallel import Shards
from paged.kv_cache.lserve.gates import Gates, read_gates

flags.disclaim_key_flags()  # --help lists the flags as the program's own
FILES = ("accuracy.csv", "accuracy.png")
PAGE_SIZE = 64
# What is drawn of `Row`: the bounds of its interval, and what it is.
MEASURES = {
    "difference": ("difference_low", "difference_high", "right answers, points to dense"),
    "logprob_difference": ("logprob_low", "logprob_high", "log-probability, to dense"),
    "divergence": ("divergence_low", "divergence_high", "divergence from dense (nats)"),
}
Systems = Mapping[str, EngineConfig]
Conclude = Callable[[Sequence["Row"], Mapping[str, Evaluation]], tuple[str, dict[str, float]]]
Draw = Callable[[Figure, Mapping[str, "Row"], Mapping[str, Evaluation]], None]


@dataclass(frozen=True)
class Row:
    """A system on the prompts of a task and context, or on all. score, difference: in percent and
    points. log-probabilities: of the answers, by token. divergence: in nats by token. Differences
    are to the first system, with the bounds of the paired 95 % bootstrap interval.
    kv_memory_fraction, high, low: means of what `kv_held.Held` is, where the policy tells."""

    system: str
    task: str
    context: int
    prompts: int
    score: float
    difference: float
    difference_low: float
    difference_high: float
    logprob: float
    logprob_difference: float
    logprob_low: float
    logprob_high: float
    divergence: float
    divergence_low: float
    divergence_high: float
    kv_memory_fraction: float | None = None
    high: float | None = None
    low: float | None = None
    top: float | None = None


def row_of(system: str, found: Accuracy, held: Held | None) -> Row:
    assert found.difference and found.logprob_difference and found.divergence
    points, low, high = (100 * x for x in found.difference)
    return Row(
        system, found.task, found.context, found.prompts, 100 * found.score, points, low, high,
        found.logprob, *found.logprob_difference, *found.divergence,
        *(() if held is None else dataclasses.astuple(held)),
    )  # fmt: skip


def rows_of(system: str, found: Evaluation, first: Evaluation) -> list[Row]:
    """Each task and context, and all together. first: what the first system answered."""
    return [
        row_of(system, accuracy, kv_held.mean(held_in(found, accuracy)))
        for accuracy in accuracies(found, first)
    ]


def held_in(found: Evaluation, of: Accuracy) -> list[Held]:
    """What sequences of a task and context held, or all."""
    if of.task != ALL:
        return found.held.get((of.task, of.context), [])
    return [each for held in found.held.values() for each in held]


def pooled(rows: Sequence[Row]) -> dict[str, Row]:
    """Of each system, all prompts together."""
    return {row.system: row for row in rows if row.task == ALL or sum(
        other.system == row.system for other in rows) == 1}  # fmt: skip


def config_of(options: Options, **fields: Any) -> EngineConfig:
    """An engine for the prompts of the flags. Raises ValueError for what cannot work."""
    longest = longest_of(options)
    common = {
        "page_size": PAGE_SIZE, "max_model_len": longest, "max_num_seqs": 16,
        "kv_cache_tokens": 17 * longest, "max_num_batched_tokens": 1024,
    }  # fmt: skip
    return engine_config(checkpoint.load_config(options.model), **common | fields)


def longest_context(options: Options) -> int:
    """What is no context is refused later."""
    return max((int(each) for each in options.contexts if each.isdecimal()), default=256)


def longest_of(options: Options) -> int:
    """The longest of the contexts, rounded up to whole pages."""
    return -(-longest_context(options) // PAGE_SIZE) * PAGE_SIZE


def require_some(options: Options, *names: str) -> None:
    """Raise ValueError for lists that are empty."""
    for name in names:
        if not getattr(options, name):
            raise ValueError(f"--{name} must name at least one")


def gates_of(options: Options) -> Gates:
    """Raises ValueError for a model or a file that is none."""
    checkpoint.load_config(options.model)  # Its errors are not the file's.
    if not options.gates:
        raise ValueError("--gates must name a file, not ''")
    return read_gates(options.gates, lambda: checkpoint.weights_hash(options.model))


def table(rows: Sequence[Row]) -> str:
    """A line a system, over all prompts."""
    lines = [
        f"{'of all prompts':<34} {'right %':>8} {'points (95 % interval)':>26} "
        f"{'log-probability (interval)':>32} {'divergence':>11}"
    ]
    for name, row in pooled(rows).items():
        points = f"{row.difference:+.1f} ({row.difference_low:+.1f} to {row.difference_high:+.1f})"
        logprob = (
            f"{row.logprob_difference:+.4f} ({row.logprob_low:+.4f} to {row.logprob_high:+.4f})"
        )
        lines.append(f"{name:<34} {row.score:>8.1f} {points:>26} {logprob:>32} "
                     f"{row.divergence:>11.4f}")  # fmt: skip
    return "\n".join(lines)


def study(
    options: Options,
    experiment: str,
    make: Callable[[Options], Systems],
    draw: Draw,
    conclude: Conclude,
) -> int:
    """Let each system of `make` answer, and write what is found after each of them; the exit
    status.

    draw: puts the systems' pooled rows, or their answers, on a figure. conclude: what is to be
    printed of all rows and answers, and numbers for summary.json.
    """
    with refusals():
        systems = make(options)
        pairs = evaluate.settings(options.tasks, options.contexts, next(iter(systems.values())))
        if not pairs:
            raise ValueError("no task fits the contexts")
        model = checkpoint.load_config(options.model)
        for config in systems.values():
            shards = Shards(model, config.tensor_parallel, dtype=options.dtype)
            check_implementation(options.attention_implementation, config, shards)
        problems = evaluate.own_problems(
            pairs, options.num_prompts, options.seed, load_tokenizer(options.model)
        )
    folder = Path(options.output_dir)
    environment = run_record.describe_environment()
    made_by = kept_answers.made_by(options.model, problems)
    asked = {
        name: run_record.plain({
            "config": config, "dtype": options.dtype, "seed": options.seed,
            "attention_implementation": options.attention_implementation,
            "prompts": {f"{task} {context}": len(p) for (task, context), p in problems.items()},
        } | made_by)
        for name, config in systems.items()
    }  # fmt: skip
    kept = {name: kept_answers.folder_of(folder, name, asked[name]) for name in systems}
    found = {name: kept_answers.answered_before(kept[name], asked[name]) for name in systems}
    known: dict[str, list[Row]] = {}

    def whole(name: str) -> bool:
        return len(found[name].answers) == sum(map(len, problems.values()))

    def rows() -> list[Row]:
        """Of the systems that have answered everything; none before the first one has."""
        first, *_ = systems
        for name in filter(whole, systems if whole(first) else ()):
            known[name] = known.get(name) or rows_of(name, found[name], found[first])
        return [row for name in systems for row in known.get(name, [])]

    def ask(name: str, stopped: Callable[[], bool]) -> None:
        one = found[name]
        changed = kept_answers.made_otherwise(folder, name, asked[name])
        if changed and not one.answers:
            print(f"{name} is asked again: {', '.join(changed)} changed since its kept answers")
        left = {key: each for key, each in problems.items() if key not in one.held}
        evaluate.evaluate(
            load_engine(systems[name], **loading(options)), left, found=one, stopped=stopped,
            measure_memory=True, after_each=lambda: kept_answers.keep(kept[name], asked[name], one),
        )  # fmt: skip

    def answer(stopped: Callable[[], bool]) -> None:
        for i, name in enumerate(systems, start=1):
            before = ", answered before" * whole(name)
            print(f"{i} of {len(systems)}: {name}{before}", flush=True)
            if not whole(name):
                ask(name, stopped)
                run_record.write_csv(folder, "accuracy.csv", rows())
            if stopped():
                break

    def write(cause: str | None) -> tuple[str, list[OSError]]:
        missing, all_rows = [name for name in systems if not whole(name)], rows()
        text, numbers = conclude(all_rows, found) if not missing else (f"PARTIAL: {cause}", {})
        facts = {
            "experiment": experiment,
            "flags": vars(options),
            **made_by,
            "systems": systems,
            "missing": missing,
            "conclusion": text,
            "accuracy": all_rows,
            **environment,
        }
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        if all_rows:
            draw(figure, pooled(all_rows), {name: found[name] for name in known})
        figure.supxlabel(run_record.hardware_line(environment), fontsize=7)
        failures = run_record.write_all([
            lambda: run_record.write_csv(folder, "accuracy.csv", all_rows),
            lambda: run_record.write_json(folder, "report.json", facts),
            lambda: run_record.write_summary(folder, numbers),
            lambda: run_record.save_figure(figure, folder / "accuracy.png", dpi=130),
        ])  # fmt: skip
        return f"{table(all_rows)}\n{text}", failures

    files = f"accuracy.csv, accuracy.png and more are in {options.output_dir}/"
    return serving.serve_and_write(answer, write, files)


def draw_measures(
    figure: Figure, lines: Mapping[str, Mapping[int, Row]], xlabel: str, legend: str
) -> None:
    """All measures beside each other, each over x: by label, a line."""
    for axes, measure in zip(figure.subplots(1, len(MEASURES)), MEASURES):
        _draw_lines(axes, lines, measure)
        axes.set_xscale("log", base=2)
        axes.set(xlabel=xlabel)
    figure.axes[0].legend(title=legend)


def _draw_lines(axes: Axes, lines: Mapping[str, Mapping[int, Row]], measure: str) -> None:
    """A line for each label, over x, of a measure of `Row` with its interval."""
    low, high, label = MEASURES[measure]
    for name, points in lines.items():
        values = np.array([
            [x, *(getattr(row, each) for each in (measure, low, high))]
            for x, row in points.items()
        ])  # fmt: skip
        x, middle = values[:, 0], values[:, 1]
        errors = np.abs(values[:, 2:].T - middle)
        axes.errorbar(x, middle, errors, label=name, marker="o", capsize=3, markersize=4)
    axes.set(ylabel=label)
    axes.spines[["top", "right"]].set_visible(False)


def define_flags(
    tasks: Sequence[str], contexts: Sequence[str], num_prompts: int, seed: int = 7
) -> None:
    """Define what all studies read, with these defaults."""
    flags.DEFINE_list("tasks", list(tasks), "tasks of experiments/tasks/tasks.py")
    flags.DEFINE_list("contexts", list(contexts), "prompt and answer, in tokens")
    flags.DEFINE_integer(
        "num_prompts", num_prompts, "of each task and context", 1, evaluate.MOST_PROMPTS
    )
    flags.DEFINE_integer("seed", seed, "of the prompts", lower_bound=0)
    define_model_flags()
