"""The answers of a run and their accuracy, alone or paired with another run on the same prompts.

Intervals come from resampling prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy import stats

from experiments.lib import reference
from experiments.lib.kv_held import Held
from experiments.lib.reference import Distributions, Key
from experiments.lib.text_files import read_csv, shown

ALL = "all"  # the task of the row over all prompts; the row's context is 0
Interval = tuple[float, float, float]
RESAMPLES = 2000


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt.

    index: number of the prompt within its task and context.
    score: 0 to 1; 1 for an exact answer.
    expected, text: the reference answer, and the generated one.
    logprob: log-probability of the reference answer, per token.
    """

    task: str
    context: int
    index: int
    score: float
    expected: str
    text: str
    logprob: float

    @property
    def key(self) -> Key:
        return self.task, self.context, self.index


@dataclass(frozen=True)
class Accuracy:
    """The accuracy on the prompts of one task and context, or on all prompts.

    score, low, high: mean score, and its 95 % bootstrap interval.
    logprob: mean log-probability of the reference answers, per token.

    Comparisons with another run on the same prompts are (mean, low, high); None without that run:

    difference, logprob_difference: paired differences, ours less the other run's.
    divergence: KL divergence from the other run's distributions, in nats per token.
    """

    task: str
    context: int
    prompts: int
    score: float
    low: float
    high: float
    logprob: float
    difference: Interval | None = None
    logprob_difference: Interval | None = None
    divergence: Interval | None = None


@dataclass(frozen=True)
class Evaluation:
    """The answers of a run.

    distributions: next-token distributions along the reference answer, by prompt.
    held: KV memory of each sequence, by task and context; empty unless measured.
    """

    answers: list[Answer] = field(default_factory=list)
    distributions: dict[Key, Distributions] = field(default_factory=dict)
    held: dict[tuple[str, int], list[Held]] = field(default_factory=dict)


def mean_interval(values, seed: int = 0) -> Interval:
    """(mean of `values` [n], lower bound, upper bound of its 95 % percentile bootstrap interval).

    To compare two systems on the same prompts, pass each prompt's difference, so that resampling
    keeps the pairs together. Raises ValueError if there is no value.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(
            f"an interval needs a list of at least one value, not shape {values.shape}"
        )
    mean = float(values.mean())
    if len(values) == 1:  # scipy needs two values
        return mean, mean, mean
    found = stats.bootstrap(
        [values], np.mean, n_resamples=RESAMPLES, method="percentile", rng=seed
    ).confidence_interval
    return mean, float(found.low), float(found.high)


def accuracies(ours: Evaluation, others: Evaluation | None = None) -> list[Accuracy]:
    """Accuracy by (task, context), in order of appearance; if several, also over all prompts.

    others: another run, which `require_all` has accepted.
    Raises ValueError if a reference answer differs between the runs.
    """
    groups: dict[tuple[str, int], list[Answer]] = {}
    for answer in ours.answers:
        groups.setdefault((answer.task, answer.context), []).append(answer)
    if len(groups) > 1:
        groups[ALL, 0] = ours.answers
    theirs = None if others is None else {answer.key: answer for answer in others.answers}
    rows = []
    for (task, context), group in groups.items():
        row = task, context, len(group), *mean_interval([a.score for a in group])
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
                difference=mean_interval([a.score - other.score for a, other in paired]),
                logprob_difference=mean_interval([a.logprob - b.logprob for a, b in paired]),
                divergence=mean_interval([
                    reference.divergence(ours.distributions[a.key], others.distributions[a.key])
                    for a in group
                ]),
            )
        )  # fmt: skip
    return rows


def read(path: str) -> Evaluation:
    """Load a run from its prompts.csv and the distributions.npz in the same folder. Raises
    ValueError, naming file and line, for an invalid file."""
    answers = []
    columns = "task", "context", "index", "score", "expected", "text", "logprob"
    for where, _, row in read_csv(path, columns):
        try:
            context, index = int(row["context"]), int(row["index"])
            score, logprob = float(row["score"]), float(row["logprob"])
        except ValueError:
            raise ValueError(
                f"{where}: context, index, score and logprob must be numbers"
            ) from None
        if not 0 <= score <= 1:
            raise ValueError(f"{where}: score must be from 0 to 1, not {shown(row['score'])}")
        answers.append(
            Answer(row["task"], context, index, score, row["expected"], row["text"], logprob)
        )
    return Evaluation(answers, reference.read(Path(path).parent / "distributions.npz"))


def require_all(
    others: Evaluation, problems: Mapping[tuple[str, int], Sequence], tokenizer
) -> None:
    """Raise ValueError if the run to compare with lacks a prompt, has another reference answer, or
    an answer of other length in tokens. Called before any prompt is answered."""
    expected = {answer.key: answer.expected for answer in others.answers}
    keys = expected.keys() & others.distributions.keys()
    for (task, context), prompts in problems.items():
        lacking = sum((task, context, index) not in keys for index in range(len(prompts)))
        if lacking:
            raise ValueError(
                f"the run to compare with lacks {lacking} prompts of {task} at {context}"
            )
        if any(expected[task, context, i] != p.answer for i, p in enumerate(prompts)):
            raise ValueError(f"the run to compare with had other prompts of {task} at {context}")
        for i, p in enumerate(prompts):
            theirs = len(others.distributions[task, context, i].logprobs)
            ours = len(reference.answer_tokens(tokenizer, p.prompt, p.answer))
            if ours != theirs:
                raise ValueError(
                    f"the run to compare with had another tokenizer: an answer of {task} at "
                    f"{context} has {theirs} tokens there and {ours} here"
                )
