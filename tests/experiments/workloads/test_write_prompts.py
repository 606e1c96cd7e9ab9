import json
import re
from pathlib import Path

import pytest

from experiments.workloads import write_prompts

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_demos_prompts_are_what_their_command_writes():
    flags = (CONFIGS / "demo.flags").read_text()
    (seed,) = re.findall(r"#.* --seed=(\d+)", flags)
    (prompts,) = re.findall(r"#.* --prompts=(\S+)", flags)
    made = write_prompts.lines(prompts.split(","), int(seed))
    assert "".join(made) == (CONFIGS / "demo_prompts.jsonl").read_text()
    entries = [json.loads(line) for line in made]
    assert sum(entry["task"] == "needle" for entry in entries) == 24
    assert all(("answer" in entry) == (entry["task"] != "story") for entry in entries)


@pytest.mark.parametrize(
    "spec, complaint",
    [
        ("needle", "task:context length:number, not 'needle'"),
        ("needle:x:3", "not 'needle:x:3'"),
        ("nonsense:256:3", "unknown task 'nonsense'"),
        ("needle:8:3", "8"),
    ],
)
def test_prompts_that_cannot_be_made_are_refused(spec, complaint):
    with pytest.raises(ValueError, match=complaint):
        write_prompts.lines([spec], seed=0)
