"""A policy that a user keeps outside the tree serves, and its logs replay."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged.config import EngineConfig

ROOT = Path(__file__).parents[2]
POLICY = "--policy=tova:TOVA"


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"experiments.{program}", *flags]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/paged/kv_cache")])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_it_serves_and_its_log_replays_once_it_is_named(tiny_folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time there was an old sailor who\nThe sea\n")
    model, options = f"--model={tiny_folder}", json.dumps({"budget": 8})
    served = run(
        "serve", POLICY, f"--policy_options={options}", model, f"--workload=prompts:{prompts}",
        "--max_tokens=12", "--max_model_len=64", "--max_num_batched_tokens=64", "--max_num_seqs=1",
        "--max_prefills_per_step=1", "--kv_cache_tokens=64",
        f"--output_dir={tmp_path / 'served'}",
    )  # fmt: skip
    assert served.returncode == 0, served.stderr
    log = tmp_path / "served" / "events.jsonl"
    config = json.loads(log.read_text("utf-8").splitlines()[0])["config"]
    assert config["policy"] == "tova:TOVA"
    assert config["policy_options"] == {"budget": 8}
    assert config["chunked_prefill"] is False

    again = (model, f"--log={log}", "--executor=simulated", f"--output_dir={tmp_path / 'again'}")
    unnamed = run("replay", *again)
    assert unnamed.returncode == 2
    assert "the log's policy is not imported: set --policy='tova:TOVA'" in unnamed.stderr
    named = run("replay", POLICY, *again)
    assert named.returncode == 0, named.stderr
    assert "same schedule, page operations and tokens" in named.stdout


def test_a_module_that_ends_the_program_is_no_policy(tmp_path, monkeypatch):
    """A script without `if __name__ == "__main__"` exits when it is imported: its exit status would
    become the program's."""
    (tmp_path / "a_script.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="policy 'a_script:POLICY': its module ends the program"):
        EngineConfig(policy="a_script:POLICY")
