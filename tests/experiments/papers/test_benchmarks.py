"""Tables on public benchmarks: their programs run on a small random model of the family, with ten
made-up problems in the benchmark's own records."""

import json
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
from tests.sweeps import swept

LLAMA = ModelConfig(
    model_type="llama", vocab_size=512, hidden_size=64, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=1,
    eos_token_ids=(2,),
)  # fmt: skip
QWEN = LLAMA.replace(model_type="qwen2", qkv_bias=True)
LONGBENCH = ("2wikimqa", "hotpotqa", "qasper", "trec", "triviaqa")


def made_up(folder, tasks, form: str) -> tuple[str, ...]:
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
        name = task if form == "RULER" else "made_up"
        lines.setdefault(name, []).append(json.dumps(record | {"max_tokens": 4}))
    for name, of in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(of))
    return tuple(str(folder / f"{name}.jsonl") for name in lines)


def model_folder(folder, config: ModelConfig) -> str:
    params = parameters.init(family(config).declare(config), jax.random.key(0))
    checkpoint.save(folder, config, params)
    build_tokenizer.build(folder)
    return str(folder)


@pytest.fixture(scope="module")
def compilations(tmp_path_factory) -> str:
    """A folder of compiled programs, which tables with systems in common share."""
    return str(tmp_path_factory.mktemp("compilations"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "config", "match", "form", "tasks"),
    swept(
        [
            (table2_longbench, LLAMA, "f1", "LongBench", LONGBENCH),
            (
                table3_ruler,
                LLAMA,
                "contains",
                "RULER",
                ("niah_multikey_1", "vt", "cwe", "fwe", "qa_1"),
            ),
            (
                table4_long_chains,
                LLAMA,
                "contains",
                "ours",
                ("aime24", "math500") * 2 + ("math500",),
            ),
            (table8_longbench, LLAMA, "f1", "LongBench", LONGBENCH),
            (diffkv_longbench, LLAMA, "f1", "LongBench", LONGBENCH),
            (table3_thinking, QWEN, "contains", "ours", ("math", "gpqa", "aime24", "math", "gpqa")),
        ],
        1,
    ),
)
def test_a_tables_command_runs_on_a_model_of_its_family(
    tmp_path, compilations, table, config, match, form, tasks
):
    study = table.STUDY
    flags = study.flags(
        model=model_folder(tmp_path / "model", config), contexts=(256,), match=match,
        problems=made_up(tmp_path, tasks, form), compilation_cache=compilations,
    )  # fmt: skip
    if hasattr(flags, "gates"):
        gates = tmp_path / "gates.tsv"
        gates.write_text("0.9\t0.1\n0.2\t0.8\n")
        flags = replace(flags, gates=str(gates))
    assert study.write(flags, tmp_path / "result") == 0
    report = json.loads((tmp_path / "result" / "report.json").read_text())
    found = {value["name"]: value["here"] for value in report["values"]}
    systems = {row["system"] for row in report["rows"]}
    for system in systems:
        scores = [found[benchmarks.key(system, task)] for task in set(tasks)]
        assert found[benchmarks.key(system, "average")] == pytest.approx(np.mean(scores))
    assert len(systems) > 1 and report["holds"] is not None
    assert f"{study.name.replace('/', '.')} --model" in report["command"]


def test_averages_are_of_tasks_and_problems_must_be_named(tmp_path):
    found = benchmarks.of_paper({"Dense": {"a": 10.0, "b": 20.0}, "Ours-2": {"average": 3.0}})
    assert found == {"dense_a": 10.0, "dense_b": 20.0, "dense_average": 15.0, "ours_2_average": 3.0}
    study = table2_longbench.STUDY
    with pytest.raises(ValueError, match="--problems must name the benchmark's file"):
        study.check(study.flags())
