"""Accuracy of several systems on the same prompts, each system paired with the first.

A system is an engine configuration. Systems are scored as in `experiments.evaluate`: by right
answers, by the log-probability of the reference answers, and by the divergence of the system's
next-token distributions from the first system's, along the reference answers.

A study takes long, so answers are kept in its folder, or by `experiments.reproduce` in a folder
that studies share (`lib/kept_answers.py`). A later run in that folder reuses an answer unless its
inputs, the packages' versions, JAX's backend, or the sources that make prompts, generate answers
and score them have changed.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import evaluate
from experiments.lib import kept_answers, kv_held
from experiments.lib.answers import ALL, Accuracy, Evaluation, accuracies
from experiments.lib.engines import check_implementation, engine_config, load_engine
from experiments.lib.flags import loading
from experiments.lib.presets import padded
from experiments.lib.program import refusals
from experiments.lib.typed_flags import ModelFlags, flag
from experiments.policies import KEEP_PROMPTS
from experiments.study import Run, Setting, Study, Values
from experiments.tasks.files import MATCHES, Problems, read_problems
from models import checkpoint, load_tokenizer
from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.tensor_parallel import Shards

PAGE_SIZE = 64
PARTS = 5  # groups of prompts (by index modulo PARTS) for `Row.deviation`
# Field of `Row` to draw: (field of the lower bound, field of the upper bound, axis label).
MEASURES = {
    "difference": ("difference_low", "difference_high", "right answers, points to dense"),
    "logprob_difference": ("logprob_low", "logprob_high", "log-probability, to dense"),
    "divergence": ("divergence_low", "divergence_high", "divergence from dense (nats)"),
}
Systems = Mapping[str, EngineConfig]
# Compilation dominates small runs. With these flags a system compiles two programs: one for
# prefills of 512 to 1,024 tokens, and one for decode steps.
QUICK = {"at_once": 1, "contexts": (1024,), "num_prompts": 2}
# The judge model is asked because nearly all heads of the bundled model need all tokens.
ASKED = {"model": "judge", "at_once": 25, "keep_prompts": True}
# Flags of the full scale with 500 prompts a system.
JUDGE = ASKED | {
    "tasks": ("multikey", "chain", "values", "cot"), "contexts": (2048,), "num_prompts": 125,
}  # fmt: skip
# The same for long answers: chains of 24 statements, 340 tokens in all.
LONG_CHAINS = ASKED | {"tasks": ("cot_long",), "contexts": (1024,), "num_prompts": 500}
# (flags, rows) -> pairs (system, reference) to compare besides the pairs with the first system.
Compare = Callable[[Any, Sequence[Any]], Iterable[tuple[str, str]]]


@dataclass(frozen=True)
class AccuracyFlags(ModelFlags):
    """Each study sets its own defaults of `tasks`, `contexts` and `num_prompts`."""

    tasks: tuple[str, ...] = flag(("needle",), "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((1024,), "prompt and answer, in tokens")
    num_prompts: int = flag(50, "of each task and context", least=1, most=evaluate.MOST_PROMPTS)
    seed: int = flag(7, "of the prompts", least=0)
    at_once: int = flag(16, "prompts that are answered at once, at most", least=1)
    pad_steps: bool = flag(
        False, "whether steps are padded to the largest size, so that two programs are compiled"
    )
    keep_prompts: bool = flag(
        False,
        "whether keys and values of prompts are kept on disk, so that systems that compress them "
        "share them; 34 MB for a prompt of 2,048 tokens to the judge",
    )
    problems: tuple[str, ...] = flag(
        (), "files of problems, up to the longest of --contexts, in place of --tasks"
    )
    match: str = flag("exact", "how answers of --problems are scored", choices=tuple(MATCHES))
    output_tokens: int = flag(128, "output tokens of problems without max_tokens", least=1)

    @property
    def longest(self) -> int:
        """The longest context in tokens, rounded up to whole pages."""
        return -(-max(self.contexts, default=256) // PAGE_SIZE) * PAGE_SIZE


@dataclass(frozen=True)
class Row:
    """Results of a system on the prompts of one task and context, or on all prompts.

    Differences and the divergence compare the system with the system `reference`. Fields that end
    in _low and _high are the bounds of paired 95 % bootstrap intervals.

    score: right answers, in percent.
    deviation: standard deviation of `score` over PARTS parts of the prompts.
    difference: difference of `score`, in percentage points.
    logprob: log-probability of the reference answers, per token.
    divergence: KL divergence of next-token distributions from `reference`'s, in nats per token.
    kv_memory_fraction, high, low, top, kv_read_fraction: means of the fields of `kv_held.Held`. The
        baseline's keys and values have 16 bits. A field is None if the policy's layout has no
        `stored`; kv_read_fraction also if no step generated.
    """

    system: str
    reference: str
    task: str
    context: int
    prompts: int
    score: float
    deviation: float
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
    kv_read_fraction: float | None = None


def rows_of(system: str, found: Evaluation, reference: str, other: Evaluation) -> list[Row]:
    """A row for each task and context, and one for all prompts if there are several, paired with
    `reference`."""
    return [_row(system, reference, each, found) for each in accuracies(found, other)]


def _row(system: str, reference: str, of: Accuracy, found: Evaluation) -> Row:
    assert of.difference and of.logprob_difference and of.divergence
    points, low, high = (100 * x for x in of.difference)
    held, answers = found.held.get((of.task, of.context), []), found.answers
    if of.task == ALL:
        held = [each for of_setting in found.held.values() for each in of_setting]
    else:
        answers = [a for a in answers if (a.task, a.context) == (of.task, of.context)]
    parts = [[a.score for a in answers if a.index % PARTS == i] for i in range(PARTS)]
    mean = kv_held.mean(held)
    return Row(
        system, reference, of.task, of.context, of.prompts, 100 * of.score,
        float(np.std([100 * np.mean(part) for part in parts if part])), points, low, high,
        of.logprob, *of.logprob_difference, *of.divergence,
        *(() if mean is None else dataclasses.astuple(mean)),
    )  # fmt: skip


def pooled(rows: Sequence[Row]) -> dict[str, Row]:
    """Each system's row over all prompts, paired with the first system."""
    first = [row for row in rows if row.reference == rows[0].system]
    alone = {row.system for row in first if sum(r.system == row.system for r in first) == 1}
    return {row.system: row for row in first if row.task == ALL or row.system in alone}


def pairs(rows: Sequence[Row]) -> list[Row]:
    """Rows of systems that are paired with a system other than the first, over all prompts."""
    return [row for row in rows if row.reference != rows[0].system]


def config_of(flags: AccuracyFlags, **fields: Any) -> EngineConfig:
    """The configuration of an engine for the flags' prompts. Raises ValueError if it is invalid."""
    common = {
        "page_size": PAGE_SIZE, "max_model_len": flags.longest, "max_num_seqs": flags.at_once,
        "kv_cache_tokens": (flags.at_once + 1) * flags.longest, "max_num_batched_tokens": 1024,
    }  # fmt: skip
    return engine_config(checkpoint.load_config(flags.model), **common | fields)


def whole_prompts(flags: AccuracyFlags) -> dict[str, Any]:
    """EngineConfig fields for one whole prompt a step. Without padded steps at most 8 sequences
    run at once, so that few programs are compiled."""
    most = flags.at_once if flags.pad_steps else min(8, flags.at_once)
    return {
        "max_num_seqs": most, "max_prefills_per_step": 1, "max_num_batched_tokens": flags.longest,
        "kv_cache_tokens": (most + 1) * flags.longest, "chunked_prefill": False,
    }  # fmt: skip


def problems_of(flags: AccuracyFlags, systems: Systems) -> Problems:
    """The prompts, by task and context. Raises ValueError if a prompt does not fit, or if a system
    cannot run the model."""
    model = checkpoint.load_config(flags.model)
    for name, config in systems.items():
        shards = Shards(model, config.tensor_parallel, dtype=flags.dtype)
        check_implementation(flags.attention_implementation, config, shards)
        sizes = policy_of(config.policy).sizes(config, shards.sharded)
        if not sizes.fits(config.max_model_len, 1):
            raise ValueError(
                f"--at_once={flags.at_once} leaves {name} no memory for a sequence of "
                f"{config.max_model_len} tokens: more are needed"
            )
    tokenizer = load_tokenizer(flags.model)
    for path in flags.problems:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"{path} must be a file that can be read twice, not a pipe or folder")
    if flags.problems:
        return read_problems(flags.problems, tokenizer, flags.output_tokens, flags.longest)
    chosen = evaluate.settings(flags.tasks, flags.contexts, next(iter(systems.values())))
    if not chosen:
        raise ValueError("no task fits the contexts")
    return evaluate.own_problems(chosen, flags.num_prompts, flags.seed, tokenizer)


def answered[F: AccuracyFlags](
    flags: F, run: Run, make: Callable[[F], Systems]
) -> Iterator[tuple[str, Evaluation]]:
    """Yields (system, answers) for each system of `make`, in order. Kept answers are reused. Ends
    early when the run is stopped."""
    systems = make(flags)
    problems, made_by = problems_of(flags, systems), kept_answers.made_by(flags.model)
    how = flags.dtype, flags.seed, flags.attention_implementation, flags.match, flags.pad_steps
    for i, (name, config) in enumerate(systems.items(), start=1):
        made = made_by | kept_answers.outside(config.policy)
        paths = {
            key: kept_answers.path_of(run.shared, name, [config, how, made, key, asked])
            for key, asked in problems.items()
        }
        kept = {key: kept_answers.read(path) for key, path in paths.items()}
        before = ", answered before" * (None not in kept.values())
        print(f"{i} of {len(systems)}: {name}{before}", flush=True)
        with refusals():
            engine = None if before else load_engine(config, **loading(flags))
        if engine and flags.pad_steps:
            engine = padded(engine)
        if engine and flags.keep_prompts and config.policy in KEEP_PROMPTS:
            engine = KEEP_PROMPTS[config.policy](engine, run.shared / "prompts", made)
        found = Evaluation()
        for key, one in kept.items():
            if run.stopped():
                return
            if one is None:
                assert engine
                one = evaluate.evaluate(
                    engine, {key: problems[key]}, flags.match, measure_memory=True
                )
                kept_answers.keep(paths[key], one)
            found.answers.extend(one.answers)
            found.distributions.update(one.distributions)
            found.held.update(one.held)
        yield name, found


def measured[F: AccuracyFlags](
    make: Callable[[F], Systems], compare: Compare = lambda flags, rows: ()
) -> Callable[[F, Run], Iterator[Row]]:
    """A study's `measure`, which yields the rows of all systems."""

    def measure(flags: F, run: Run) -> Iterator[Row]:
        found: dict[str, Evaluation] = {}
        rows: list[Row] = []
        for name, one in answered(flags, run, make):
            found[name] = one
            first = next(iter(found))
            rows += (mine := rows_of(name, one, first, found[first]))
            yield from mine
        if not run.stopped():
            for name, other in compare(flags, rows):
                yield rows_of(name, found[name], other, found[other])[-1]

    return measure


def checked[F: AccuracyFlags](make: Callable[[F], Systems]) -> Callable[[F], None]:
    """A study's `check`, which raises ValueError for invalid systems or prompts."""

    def check(flags: F) -> None:
        problems_of(flags, make(flags))

    return check


def table(_: AccuracyFlags, rows: Sequence[Row]) -> str:
    """A line for each system and for each pair of systems, over all prompts."""
    lines = [
        f"{'of all prompts':<34} {'right %':>8} {'points (95 % interval)':>26} "
        f"{'log-probability (interval)':>32} {'divergence':>11} {'memory':>7} {'high %':>7} "
        f"{'low %':>6} {'read':>6}"
    ]
    for row in [*pooled(rows).values(), *pairs(rows)]:
        name = row.system if row.reference == rows[0].system else f"{row.system} to {row.reference}"
        points = f"{row.difference:+.1f} ({row.difference_low:+.1f} to {row.difference_high:+.1f})"
        logprob = (
            f"{row.logprob_difference:+.4f} ({row.logprob_low:+.4f} to {row.logprob_high:+.4f})"
        )
        line = f"{name:<34} {row.score:>8.1f} {points:>26} {logprob:>32} {row.divergence:>11.4f}"
        if row.kv_memory_fraction is not None:
            shares = f"{100 * (row.high or 0):>7.1f} {100 * (row.low or 0):>6.1f}"
            line += f" {row.kv_memory_fraction:>7.3f} {shares}"
        if row.kv_read_fraction is not None:
            line += f" {row.kv_read_fraction:>6.3f}"
        lines.append(line)
    return "\n".join(lines)


def draw_measures(
    figure: Figure, lines: Mapping[str, Mapping[int, Row]], xlabel: str, legend: str
) -> None:
    """Draw all MEASURES side by side, over x. lines: label -> {x: row}."""
    x = sorted({each for points in lines.values() for each in points})
    for axes, measure in zip(figure.subplots(1, len(MEASURES)), MEASURES):
        for name, points in lines.items():
            draw_line(axes, list(points), list(points.values()), measure, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{each:,}" for each in x])
        axes.set(xlabel=xlabel)
    figure.axes[0].legend(title=legend)


def draw_line(
    axes: Axes, x: Sequence[float], rows: Sequence[Row], measure: str, reference: str = "dense",
    **style: Any,
) -> None:  # fmt: skip
    """Draw a measure of MEASURES over x, with its interval. reference: name of the first system."""
    low, high, label = MEASURES[measure]
    lower, middle, upper = (
        np.array([getattr(row, name) for row in rows]) for name in (low, measure, high)
    )
    errors = np.abs([lower - middle, upper - middle])
    axes.errorbar(x, middle, errors, marker="o", markersize=4, capsize=3, **style)
    axes.set(ylabel=label.replace("dense", reference))


def draw_controls(axes: Axes, x: float, rows: Iterable[Row], measure: str) -> None:
    """Draw a measure of MEASURES of each control at x, in grey, with the control's name."""
    for row, marker in zip(rows, itertools.cycle("xv^<>1234")):
        axes.plot(x, getattr(row, measure), marker, color="grey", label=row.system)


def study[F: AccuracyFlags](
    file: str, make: Callable[[F], Systems], *, title: str, claim: str, rule: str,
    holds: Callable[[Mapping[str, float]], bool], here: str, differs: str, flags: type[F],
    values: Callable[[F, Sequence[Any]], Values],
    draw: Callable[[F, Figure, Sequence[Any]], object], quick: Mapping[str, Any],
    minutes: tuple[float, float], measure: Callable[[F, Run], Iterable[Any]] | None = None,
    compare: Compare = lambda flags, rows: (),
    table: Callable[[F, Sequence[Any]], str] = table,
    paper: Mapping[str, float | tuple[float, float]] = MappingProxyType({}),
    full: Mapping[str, Any] = MappingProxyType({}),
    size: tuple[float, float] = (11, 4.5), needs: str = "", command: str = "",
) -> Study[F, Any]:  # fmt: skip
    """A study of the accuracy of the systems of `make`, on a model smaller than the paper's.

    measure: replaces `measured`. For the other parameters see `Study` and `measured`.
    """
    return Study(
        file, title=title, kind="analogue", claim=claim, rule=rule, holds=holds,
        setting=Setting(here, differs, "reduced"), flags=flags,
        measure=measure or measured(make, compare), values=values, paper=paper,
        check=checked(make), draw=draw, table=table, quick=quick, full=full,
        minutes=minutes, size=size, needs=needs, command=command,
    )  # fmt: skip
