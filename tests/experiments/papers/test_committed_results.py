"""Committed results equal a new run's, for studies that take seconds without XLA's optimisation."""

import json

import jax
import pytest

from experiments import reproduce
from experiments.reproduce import RESULTS, ROOT

STUDIES = reproduce.studies()
COUNTS_OPERATIONS = "diffkv/fig14_memory_management"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vllm/fig03_mechanisms", "punica/fig02_mechanisms", "diffkv/fig01_mechanisms",
        "lserve/fig03_mechanisms", "vllm/fig11_lengths", "vllm/table1_kv_slots",
        "lserve/kv_memory", "diffkv/fig14_memory_management", "punica/fig10_transformer_layer",
        "diffkv/fig15b_batch_latency",
    ],
)  # fmt: skip
def test_a_run_gives_the_committed_numbers(name, tmp_path):
    study = STUDIES[name]
    committed = json.loads((ROOT / RESULTS / name / "report.json").read_text())
    if name == COUNTS_OPERATIONS and committed["versions"]["jax"] != jax.__version__:
        pytest.skip("another version of JAX may lower to other operations")
    assert study.write(study.at("full"), tmp_path) == 0
    ours = json.loads((tmp_path / "report.json").read_text())
    assert ours["holds"] == committed["holds"]
    names, found = ([v["name"] for v in r["values"]] for r in (ours, committed))
    assert names == found
    numbers, expected = ([v["here"] for v in r["values"]] for r in (ours, committed))
    assert numbers == pytest.approx(expected, rel=1e-9)
    assert (tmp_path / "figure.png").exists() == bool(study.draw)
