"""Write a prompts file for `--workload=prompts:FILE` from the tasks of experiments/tasks/tasks.py.

python -m experiments.workloads.write_prompts --prompts=needle:256:8,story:160:4 --seed=1 --output=F
"""

import json
import random
from collections.abc import Sequence

from absl import flags

from experiments.lib import program, run_record
from experiments.tasks import tasks
from experiments.workloads import workloads

FLAGS = flags.FLAGS


def define_flags() -> list[str]:
    """Define this program's flags; returns their names."""
    flags.DEFINE_list("prompts", None, "task:context length:number, ...", required=True)
    flags.DEFINE_string("output", None, "the file to write", required=True)
    flags.DEFINE_integer("seed", 0, "of the prompts and their order", lower_bound=0)
    return ["prompts", "output", "seed"]


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


def main(names: Sequence[str]) -> None:
    with program.refusals():
        made = lines(FLAGS.prompts, FLAGS.seed)
    run_record.write_whole(FLAGS.output, "".join(made))
    print(f"{len(made)} prompts in {FLAGS.output}")


if __name__ == "__main__":
    program.run(main, define_flags)
