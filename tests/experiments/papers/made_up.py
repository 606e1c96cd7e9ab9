"""Made-up answers of systems, for studies of accuracy."""

from typing import Any

import numpy as np

from experiments import accuracy
from experiments.lib.answers import Answer, Evaluation
from experiments.lib.kv_held import Held
from experiments.lib.reference import Distributions

FLAGS: dict[str, Any] = {
    "seed": 1, "tasks": ("values",), "contexts": (256,), "num_prompts": 4,
}  # fmt: skip


def found_with(right: list[bool], fraction: float | None = None) -> Evaluation:
    """Answers of one setting with equal distributions, and sequences that hold equal memory."""
    along = Distributions(np.full(1, -0.1), np.array([[3, 4]], np.int32), np.array([[-0.1, -3.0]]))
    answers = [Answer("values", 256, i, float(ok), "1;", "1;", -0.1) for i, ok in enumerate(right)]
    held = {} if fraction is None else {("values", 256): [Held(fraction, 0.5, 0.25)] * 2}
    return Evaluation(answers, {answer.key: along for answer in answers}, held)


def rows_of(found: dict[str, Evaluation], compare=lambda rows: ()) -> list[accuracy.Row]:
    """The rows of all systems, each paired with the first, and the rows of `compare`'s pairs."""
    reference, whole = next(iter(found.items()))
    rows = [row for n, one in found.items() for row in accuracy.rows_of(n, one, reference, whole)]
    for name, other in compare(rows):
        rows.append(accuracy.rows_of(name, found[name], other, found[other])[-1])
    return rows


def numbers_of(report: dict[str, Any]) -> dict[str, float]:
    return {value["name"]: value["here"] for value in report["values"]}
