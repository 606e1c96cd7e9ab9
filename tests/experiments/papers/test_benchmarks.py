"""Tables on public benchmarks: their commands run on a small random model of the family, with ten
made-up problems in the benchmark's own records."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments.papers import benchmarks
from experiments.papers.diffkv import table2_longbench as diffkv_longbench
from experiments.papers.diffkv import table3_thinking
from experiments.papers.lserve import (
    table2_longbench,
    table3_ruler,
    table4_long_chains,
    table8_longbench,
)
from experiments.train import build_tokenizer
from models import checkpoint
from models import params as parameters
from models.config import ModelConfig
from models.families import family
from tests.experiments.papers.made_up import found_with, rows_of
from tests.sweeps import swept

LLAMA = ModelConfig(
    model_type="llama", vocab_size=512, hidden_size=64, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=1,
    eos_token_ids=(2,),
)  # fmt: skip
QWEN = LLAMA.replace(model_type="qwen2", qkv_bias=True)
LONGBENCH = ("2wikimqa", "hotpotqa", "qasper", "trec", "triviaqa")


def made_up(folder, tasks, form: str) -> None:
    """Write ten problems, two of each task, as records of a benchmark; every third has several
    answers, as RULER's may. A form without records of its own has ours."""
    lines: dict[str, list[str]] = {}
    for i, task in enumerate([*tasks] * 2):
        text, answers = f"#{i}4; once there was a cat.", [f"#{i}4;", f"#{i}5;"][: 1 + (i % 3 == 0)]
        match form:
            case "RULER":
                record = {"index": i, "input": f"{text} ?{i}", "outputs": answers, "length": 20}
            case "LongBench":
                record = {
                    "input": f"?{i}", "context": text, "answers": answers, "length": 20,
                    "dataset": task, "language": "en", "all_classes": None, "_id": str(i),
                }  # fmt: skip
            case _:
                record = {"prompt": f"{text} ?{i}", "task": task, "answers": answers}
        name = f"ruler/{task}/validation" if form == "RULER" else "made_up"
        lines.setdefault(name, []).append(json.dumps(record | {"max_tokens": 4}))
    for name, of in lines.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(of))


def model_folder(folder, config: ModelConfig) -> str:
    params = parameters.init(family(config).declare(config), jax.random.key(0))
    checkpoint.save(folder, config, params)
    build_tokenizer.build(folder)
    return str(folder)


def run(folder, line: str, changes: dict[str, str]) -> None:
    """Run a line of the shell in a folder. changes: values of flags in place of the line's own."""
    for name, value in changes.items():
        line = re.sub(rf"--{name}=(\$\(.*?\)|\S+)", f"--{name}={value}", line)
    line = line.replace("python ", f"{sys.executable} ", 1)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "config", "form", "tasks"),
    swept(
        [
            (table3_ruler, LLAMA, "RULER", ("niah_multikey_1", "vt", "cwe", "fwe", "qa_1")),
            (table2_longbench, LLAMA, "LongBench", LONGBENCH),
            (table4_long_chains, LLAMA, "ours", ("aime24", "math500") * 2 + ("math500",)),
            (table8_longbench, LLAMA, "LongBench", LONGBENCH),
            (diffkv_longbench, LLAMA, "LongBench", LONGBENCH),
            (table3_thinking, QWEN, "ours", ("math", "gpqa", "aime24", "math", "gpqa")),
        ],
        1,
    ),
)
def test_a_tables_command_runs_on_a_model_of_its_family(tmp_path, table, config, form, tasks):
    """The row's own command, with this model, its problems, and two steps of training the gates."""
    study, model = table.STUDY, model_folder(tmp_path / "model", config)
    made_up(tmp_path, tasks, form)
    *before, line = study.command.split(" && ")
    assert len(before) == study.name.startswith("lserve/")
    for training in before:
        run(tmp_path, f"{training} --lengths=512", {"model": model, "steps": "2"})
    changes = {"model": model, "contexts": "256"}
    if form != "RULER":
        changes["problems"] = "made_up.jsonl"
    run(tmp_path, f"{line} --output_dir=result", changes)
    report = json.loads((tmp_path / "result" / "report.json").read_text())
    found = {value["name"]: value["here"] for value in report["values"]}
    systems = {row["system"] for row in report["rows"]}
    for system in systems:
        scores = [found[benchmarks.key(system, task)] for task in set(tasks)]
        assert found[benchmarks.key(system, "average")] == pytest.approx(np.mean(scores))
    assert len(systems) > 1 and report["holds"] is not None


def test_averages_are_of_tasks_and_problems_must_be_named(tmp_path):
    found = benchmarks.of_paper({"Dense": {"a": 10.0, "b": 20.0}, "Ours-2": {"average": 3.0}})
    assert found == {"dense_a": 10.0, "dense_b": 20.0, "dense_average": 15.0, "ours_2_average": 3.0}
    study = table2_longbench.STUDY
    with pytest.raises(ValueError, match="--problems must name the benchmark's file"):
        study.check(study.flags())


def test_a_tasks_score_is_the_mean_of_its_prompts_of_all_lengths():
    rows = rows_of({"Dense": found_with([True] * 3, 0.5)})
    short, long = (replace(rows[0], context=c) for c in (256, 512))
    found = benchmarks.scores([short, replace(long, prompts=1, score=0, kv_memory_fraction=0.1)])
    assert found["dense_values"] == 75 and found["dense_average"] == 75
    assert found["dense_values_512"] == 0
    assert found["dense_memory"] == pytest.approx((3 * 0.5 + 0.1) / 4)
