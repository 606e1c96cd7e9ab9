"""Write a prompts file for `--workload=prompts:FILE` from the tasks of experiments/tasks/tasks.py.

python -m experiments.workloads.write_prompts --prompts=needle:256:8,story:160:4 --seed=1 --output=F
"""

import json
import random

from absl import flags

from experiments.lib import run_record
from experiments.lib.program import Options, Program, refusals
from experiments.tasks import tasks
from experiments.workloads import workloads


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


def main(options: Options) -> None:
    with refusals():
        made = lines(options.prompts, options.seed)
    run_record.write_whole(options.output, "".join(made))
    print(f"{len(made)} prompts in {options.output}")


PROGRAM = Program(main, define_flags)

if __name__ == "__main__":
    PROGRAM.run()
