"""A paper's accuracy tables on public benchmarks. The user supplies the model and the problems.

A study scores several systems on the files of --problems (`experiments.tasks.files`): records of
LongBench or RULER, whose "dataset", or the file's name, names the task. Scores are percentages by
task; the average is the mean over the tasks. --match selects the score: `contains` for RULER, `f1`
for LongBench. For some of LongBench's tasks the paper uses ROUGE, edit distance or accuracy
instead.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.answers import ALL
from experiments.papers.drawing import grouped_bars
from experiments.study import Setting, Study, Values

NEEDS = "the paper's model, a GPU that holds it, and the benchmark's problems"
DIFFERS = (
    "answers are scored by --match alone; all systems answer the same prompts; LongBench's own "
    "records get one plain prompt for all tasks, not its templates"
)


def key(system: str, task: str) -> str:
    return f"{system}_{task}".lower().replace(" ", "_").replace("-", "_")


def scores(rows: Sequence[Row]) -> Values:
    """Numbers by name.

    SYSTEM_TASK: mean score of a task's prompts, in percent.
    SYSTEM_average: mean over the tasks.
    SYSTEM_TASK_CONTEXT, SYSTEM_average_CONTEXT: the same at one of several contexts.
    SYSTEM_memory: mean KV memory as a fraction of that of 16-bit pages, if the policy reports it.
    """
    numbers: dict[str, float | None] = {}
    first = rows[0].system if rows else ""
    for system in dict.fromkeys(row.system for row in rows):
        mine = [r for r in rows if r.system == system and r.reference == first and r.task != ALL]
        contexts, by_task = {row.context for row in mine}, dict[str, list[Row]]()
        for row in mine:
            by_task.setdefault(row.task, []).append(row)
            if len(contexts) > 1:
                numbers[key(system, f"{row.task}_{row.context}")] = row.score
        means = {task: _mean([(r.score, r.prompts) for r in of]) for task, of in by_task.items()}
        for context in sorted(contexts) if len(contexts) > 1 else ():
            at = [row.score for row in mine if row.context == context]
            means[f"average_{context}"] = float(np.mean(at))
        means["average"] = float(np.mean([means[task] for task in by_task]))
        numbers |= {key(system, name): mean for name, mean in means.items()}
        held = [
            (row.kv_memory_fraction, row.prompts)
            for row in mine if row.kv_memory_fraction is not None
        ]  # fmt: skip
        if held:
            numbers[key(system, "memory")] = _mean(held)
    return numbers


def _mean(of: Sequence[tuple[float, int]]) -> float:
    """The mean over prompts. of: pairs (mean of some prompts, number of these prompts)."""
    means, prompts = zip(*of, strict=True)
    return float(np.average(means, weights=prompts))


def draw(_: AccuracyFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers = scores(rows)
    tasks = [*dict.fromkeys(row.task for row in rows if row.task != ALL), "average"]
    groups = {
        system: [numbers.get(key(system, task)) or 0.0 for task in tasks]
        for system in dict.fromkeys(row.system for row in rows)
    }
    grouped_bars(figure.subplots(), tasks, groups, "score (%)", rotation=20)


def of_paper(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The paper's scores and averages, named as in `scores`. table: scores by system and task."""
    numbers: dict[str, float] = {}
    for system, by_task in table.items():
        numbers |= {key(system, task): score for task, score in by_task.items()}
        if "average" not in by_task:
            numbers[key(system, "average")] = float(np.mean(list(by_task.values())))
    return numbers


def check(make: Callable[..., accuracy.Systems]) -> Callable[[AccuracyFlags], None]:
    """Returns the `check` of a study that reads its problems from files only."""

    def checked(flags: AccuracyFlags) -> None:
        if not flags.problems:
            raise ValueError("--problems must name the benchmark's file, one problem a line")
        accuracy.checked(make)(flags)

    return checked


def study[F: AccuracyFlags](
    file: str, flags: type[F], systems: Callable[[F], accuracy.Systems], *, title: str, claim: str,
    ours: str, most_points: float, paper: Mapping[str, Mapping[str, float]], here: str,
    command: str, minutes: tuple[float, float] = (1, 1),
) -> Study[F, Row]:  # fmt: skip
    """A study without a committed result. Its claim holds if the average score of the system `ours`
    is at most `most_points` below the average score of the first system in `paper`.

    paper: scores by system, then task.
    """
    first = next(iter(paper))

    def holds(found: Mapping[str, float]) -> bool:
        return found[key(ours, "average")] >= found[key(first, "average")] - most_points

    return Study(
        file, title=title, kind="not run", claim=claim,
        rule=f"{ours}'s average over the tasks is at most {most_points:g} points below {first}'s",
        setting=Setting(here, DIFFERS, "paper"), flags=flags,
        measure=accuracy.measured(systems), values=lambda _, rows: scores(rows), holds=holds,
        paper=of_paper(paper), draw=draw, table=accuracy.table, check=check(systems), needs=NEEDS,
        command=command, minutes=minutes, tolerance=0.05, size=(10, 4.2),
    )  # fmt: skip
