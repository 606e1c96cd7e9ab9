"""Write a prompts file for `--workload=prompts:FILE` from the tasks of experiments/tasks/tasks.py.

python -m experiments.workloads.write_prompts --prompts=needle:256:8,story:160:4 --seed=1 --output=F
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.lib import run_record
from experiments.lib.program import Program, refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.tasks import tasks
from experiments.workloads import workloads


@dataclass(frozen=True)
class PromptFlags(Flags):
    prompts: tuple[str, ...] = flag((), "task:context length:number, ...")
    output: str = flag("", "the file to write")
    seed: int = flag(0, "of the prompts and their order", least=0)

    def __post_init__(self):
        super().__post_init__()
        for name in ("prompts", "output"):
            if not getattr(self, name):
                raise ValueError(f"--{name} must name at least one")


def lines(wanted: Sequence[str], seed: int) -> list[str]:
    """JSON lines of the wanted prompts, shuffled. Raises ValueError for an invalid spec."""
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


def main(flags: PromptFlags, _: None) -> None:
    with refusals():
        made = lines(flags.prompts, flags.seed)
    run_record.write_whole(flags.output, "".join(made))
    print(f"{len(made)} prompts in {flags.output}")


PROGRAM = Program(main, PromptFlags, None)

if __name__ == "__main__":
    PROGRAM.run()
