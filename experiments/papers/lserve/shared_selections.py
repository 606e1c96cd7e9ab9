"""Which answers shared selections lose (LServe §3.5.3, Table 6).

python -m experiments.papers.lserve.shared_selections

An answer of `values` or `chain` is written from several records. After a letter, a key that names
records, tokens of another record follow. Each of --intervals is a system: the number of tokens that
share a selection. In further systems each name also selects pages anew, or as a control each token
after a name, one token too late, unless it is a name itself.

The prompts end at all places of an interval, so that no name is always near a selection.

Right answers pass through the model once for each system, with masks written from the definition of
page selection, without engine and kernels (`experiments/papers/masked.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from matplotlib.figure import Figure

from experiments.lib.plain_attention import check_model
from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.papers import masked
from experiments.papers.lserve.selection_masks import PAGE_SIZE, check_budget, seen, sources
from experiments.study import Run, Setting, Study, Values
from models import load_tokenizer
from models.config import ModelConfig

LOSS, LEFT, APART = 10, 5, 5  # percentage points
# Which tokens select anew -> suffix of values.
ANEW = {"none": "", "names": "_at_names", "after": "_after_names"}


@dataclass(frozen=True)
class SelectionFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    tasks: tuple[str, ...] = flag(("values", "chain"), "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag(
        tuple(range(2033, 2049)), "tokens of prompt and answer", least=1
    )
    num_prompts: int = flag(8, "prompts of each task and context", least=1)
    budget: int = flag(1024, "tokens that a query reads, in whole pages", least=3 * PAGE_SIZE)
    intervals: tuple[int, ...] = flag((1, 2, 4, 8, 16), "tokens that share a selection", least=1)
    seed: int = flag(8, "of the prompts", least=0)


@dataclass(frozen=True)
class Row:
    """A prompt under a system.

    interval: tokens that share a selection.
    anew: which tokens also select, a name in ANEW.
    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    task: str
    context: int
    prompt: int
    interval: int
    anew: str
    first_wrong: int


def anew_of(names_R: np.ndarray) -> dict[str, np.ndarray]:
    """[R] bool by the names of ANEW: rows that select whatever the interval."""
    after = np.concatenate([[False], names_R[:-1]]) & ~names_R
    return {"none": np.zeros_like(names_R), "names": names_R, "after": after}


def answers(
    flags: SelectionFlags, params, config: ModelConfig, question: masked.Question,
    names: Sequence[bool],
) -> Iterator[tuple[int, str, np.ndarray]]:  # fmt: skip
    """(interval, anew, the likeliest tokens after each but the last of the answer's) of each
    system. names: whether a token of the answer names a record."""
    asked, count = masked.Asked(params, config, question), flags.budget // PAGE_SIZE
    names_R = np.zeros(len(asked.tokens), bool)
    names_R[: asked.rows] = names[: asked.rows]
    found = anew_of(names_R)
    for interval, anew in product(flags.intervals, ANEW):
        rows = sources(asked.start, len(names_R), interval, found[anew])
        yield interval, anew, asked.likeliest(seen, rows, count=count)


def names_of(model: str, question: masked.Question) -> list[bool]:
    """Whether each token of the answer names a record."""
    tokenizer = load_tokenizer(model)
    return [tokenizer.decode([token]).isalpha() for token in question.answer]


def of_prompt(flags: SelectionFlags, case: tuple[str, int], index: int) -> masked.Rows:
    config, params = masked.loaded(flags.model)
    question = masked.questions_of(flags, *case)[index]
    found = answers(flags, params, config, question, names_of(flags.model, question))
    return masked.Rows(
        [[*case, index, n, anew, question.first_wrong(tokens)] for n, anew, tokens in found]
    )


def check(flags: SelectionFlags) -> None:
    check_model(flags.model, flags.contexts)
    if 1 not in flags.intervals or any(PAGE_SIZE % interval for interval in flags.intervals):
        raise ValueError(
            f"--intervals must divide {PAGE_SIZE}, the tokens of a page, with 1 among them, not "
            f"{flags.intervals}"
        )
    distinct = {"intervals": flags.intervals, "tasks": flags.tasks, "contexts": flags.contexts}
    masked.check_distinct(**distinct)
    for task, context in product(flags.tasks, flags.contexts):
        questions = masked.questions_of(flags, task, context)
        check_budget(flags.budget, context, questions)
        if not any(any(names_of(flags.model, each)) for each in questions):
            raise ValueError(
                f"no answer of {task} has a token that is a letter, the name of a record"
            )


def measure(flags: SelectionFlags, run: Run) -> Iterator[Row]:
    with refusals():
        masked.loaded(flags.model)
    cases = product(flags.tasks, flags.contexts)
    for fields in masked.fields_of(run, of_prompt, flags, cases, flags.num_prompts):
        yield Row(*fields)


def values(_: SelectionFlags, rows: Sequence[Row]) -> Values:
    """right_TASK_N, right_TASK_N_at_names and right_TASK_N_after_names: percent of right answers by
    task and interval N."""
    found: dict[str, list[int]] = {}
    for row in rows:
        name = f"right_{row.task}_{row.interval}{ANEW[row.anew]}"
        found.setdefault(name, []).append(row.first_wrong)
    return {name: masked.percent_right(first_wrong) for name, first_wrong in found.items()}


def holds(v: Mapping[str, float]) -> bool:
    alone = {name[: -len("_1")]: right for name, right in v.items() if name.endswith("_1")}
    names = [name for name in v if name.rpartition("_")[0] in alone]
    lost = [name for name in names if v[name] <= alone[name.rpartition("_")[0]] - LOSS]
    if not lost:
        raise ValueError("no interval loses answers, so there is nothing to explain")
    return all(
        v[f"{name}_at_names"] >= alone[name.rpartition("_")[0]] - LEFT
        and v[f"{name}_after_names"] <= v[f"{name}_at_names"] - APART
        for name in lost
    )


def draw(flags: SelectionFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers = values(flags, rows)
    labels = "by the interval alone", "names select too", "tokens after names select too"
    for axes, task in zip(figure.subplots(1, len(flags.tasks), squeeze=False)[0], flags.tasks):
        x = np.arange(len(flags.intervals))
        for i, (suffix, label) in enumerate(zip(ANEW.values(), labels)):
            right = [numbers[f"right_{task}_{n}{suffix}"] or 0.0 for n in flags.intervals]
            axes.bar(x + 0.27 * (i - 1), right, 0.25, label=label)
        axes.set(
            title=task, xlabel="tokens of a selection", ylabel="right answers (%)", xticks=x,
            xticklabels=[str(n) for n in flags.intervals], ylim=(0, 118),
        )  # fmt: skip
    figure.axes[0].legend(frameon=False, fontsize="small", ncols=2)


STUDY = Study(
    __file__,
    title="Answers that shared selections lose (LServe Table 6)",
    kind="analogue",
    claim="answers that are lost because tokens share a selection are right if each token that "
    "names a record selects pages itself",
    rule=f"where an interval loses {LOSS} points or more to a selection for each token, at most "
    f"{LEFT} are lost if names select too, and at least {APART} more if instead the tokens after "
    "names do",
    holds=holds,
    setting=Setting(
        "the judge model, values and chain at 2,033 to 2,048 tokens, 1,024 of them read; a forward "
        "pass",
        "the paper has no such figure",
        "reduced",
    ),
    flags=SelectionFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 2, "contexts": (2048,)},
    minutes=(1, 15),
    size=(10, 3.8),
)

if __name__ == "__main__":
    STUDY.run()
