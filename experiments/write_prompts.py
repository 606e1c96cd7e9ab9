"""Write a prompts file for `--workload=prompts:FILE` from the tasks of experiments/tasks.py.

python -m experiments.write_prompts --prompts=needle:256:8,story:160:4 --seed=2024 --output=FILE
"""

import json
import random
import sys
from pathlib import Path

from absl import app, flags

from experiments import tasks, workloads

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_list("prompts", None, "task:context length:number, ...", required=True)
    flags.DEFINE_string("output", None, "the file to write", required=True)
    flags.DEFINE_integer("seed", 0, "of the prompts and their order", lower_bound=0)


def lines(wanted: list[str], seed: int) -> list[str]:
    """JSON lines of the wanted prompts, shuffled. Raises ValueError for what cannot be made."""
    entries = []
    for spec in wanted:
        task, *numbers = spec.split(":")
        if len(numbers) != 2 or not all(n.isdigit() for n in numbers):
            raise ValueError(f"--prompts takes task:context length:number, not {spec!r}")
        context_length, count = map(int, numbers)
        for prompt in tasks.make_prompts(task, context_length, count, seed):
            entries.append(workloads.task_entry(prompt))
    random.Random(seed).shuffle(entries)
    return [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]


def main(argv: list[str]) -> None:
    try:
        made = lines(FLAGS.prompts, FLAGS.seed)
    except ValueError as error:
        sys.exit(f"error: {error}")
    Path(FLAGS.output).write_text("".join(made), encoding="utf-8")
    print(f"{len(made)} prompts in {FLAGS.output}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
