"""Flags made from the fields of dataclasses."""

import re
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from absl import flags as absl_flags

from experiments.diff_events import DiffFlags
from experiments.lib import flags, shipped
from experiments.lib.typed_flags import ModelFlags
from experiments.serve import ServeFlags
from experiments.serve_http import ServerFlags
from experiments.train.trainer import Options as TrainerOptions
from experiments.workloads.workloads import WorkloadConfig
from paged.checks import described, help_of
from paged.engine import EngineConfig
from paged.kv_cache.lserve import Options as LServeOptions
from paged.requests.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Nested:
    depth: int = 3


@dataclass(frozen=True)
class Config:
    made_whole: int = described(3, "a whole number")
    made_or_none: float | None = described(None, "a number, or none")
    made_literal: Literal["a", "b"] = described("a", "a letter")
    made_left_out: bool = described(False, "told to be left out")
    made_mixed: bool | Literal["never"] = described(False, "two kinds of values")
    made_tuple: tuple[int, ...] = described((), "several values")
    made_nested: Nested = field(default=Nested(), metadata={"help": "no word of a command line"})
    made_silent: int = 5
    made_required: str = field(kw_only=True, metadata={"help": "without a default"})


@pytest.fixture
def defined(monkeypatch):
    """A new set of flags, without those of other tests and pytest."""
    values = absl_flags.FlagValues()

    def define(define_one):
        return lambda *args, **kwargs: define_one(*args, **kwargs, flag_values=values)

    made = {kind: define(one) for kind, one in flags._DEFINE.items()}
    monkeypatch.setattr(flags, "_DEFINE", made)
    monkeypatch.setattr(absl_flags, "DEFINE", define(absl_flags.DEFINE))
    return values


def test_flags_are_the_described_fields_whose_values_are_words(defined):
    flags.define_fields(Config, leave_out=("made_left_out",))
    made = {name for name in defined if name.startswith("made_")}
    assert made == {"made_whole", "made_or_none", "made_literal", "made_tuple"}
    defined(["program", "--made_or_none=2.5", "--made_tuple=3,4"])
    assert defined.made_tuple == (3, 4)
    assert (defined.made_whole, defined.made_or_none, defined.made_literal) == (3, 2.5, "a")
    assert defined["made_whole"].help == "a whole number"


def test_an_instance_gives_the_defaults(defined):
    flags.define_fields(Config(made_whole=8, made_required="x"))
    defined(["program"])
    assert (defined.made_whole, defined.made_required) == (8, "x")


def test_values_go_back_to_the_fields():
    assert flags.fields_of(Config, {"made_whole": 4, "seed": 1}) == {"made_whole": 4}
    loaded = flags.loading(ServerFlags(dtype="float16", port=1, compilation_cache=""))
    assert loaded == {
        "model": "bundled", "dtype": "float16", "executor": "device", "compilation_cache": "",
        "attention_implementation": "",
    }  # fmt: skip


def test_parts_share_flags_of_one_name_and_arguments_fill_their_field():
    values = {
        "workload": "sharegpt", "seed": 3, "policy": "vllm", "max_model_len": None, "page_size": 8,
        "temperature": 0.5, **vars(ModelFlags()), "adapters": "", "popularity": "uniform",
    }  # fmt: skip
    found = flags.typed(ServeFlags, values)
    assert found.workload.seed == found.engine.seed == found.sampling.seed == 3
    assert (found.engine.page_size, found.sampling.temperature) == (8, 0.5)
    assert flags.typed(DiffFlags, {"context": 1}, ["a", "b"]) == DiffFlags(("a", "b"), 1)
    with pytest.raises(ValueError, match="unexpected argument 'a': flags are --name=value"):
        flags.typed(ServeFlags, values, ["a"])


@pytest.mark.parametrize(
    "config", [EngineConfig, SamplingParams, WorkloadConfig, TrainerOptions, LServeOptions]
)
def test_every_field_that_users_set_says_what_it_is(config):
    silent = {each.name for each in fields(config)} - help_of(config).keys()
    assert silent <= {"policy_options"}


def test_options_of_the_chosen_policy_are_flags(tmp_path):
    gates = tmp_path / "full_attention_heads.tsv"
    gates.write_text("0.5\t1.0\n0.25\t0\n")
    given = {"policy": "lserve", "lserve_budget": 512, "lserve_reuse": 4}
    given["lserve_gates"] = str(gates)
    values = flags.fields_of(EngineConfig, given)
    options: dict[str, Any] = {"budget": 512, "gates": ((0.5, 1.0), (0.25, 0.0))}
    assert values == {"policy": "lserve", "policy_options": options}
    assert EngineConfig(**values).policy_options == LServeOptions(**options)
    given["policy"] = "vllm"
    with pytest.raises(ValueError, match="--lserve_gates is an option of --policy=lserve, not of"):
        flags.fields_of(EngineConfig, given)


def test_help_lists_all_flags_in_groups():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.serve_http", "--help"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    groups: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if re.fullmatch(r"\S+:", line):
            groups[line] = []
        elif flag := re.match(r"  --(?:\[no\])?(\w+): ", line):
            list(groups.values())[-1].append(flag[1])
    policies = "--policy=MODULE:ATTRIBUTE --policy=lserve --policy=diffkv"
    names = f"program model engine {policies} limits output"
    assert list(groups) == [f"{name}:" for name in names.split()]
    assert groups["--policy=MODULE:ATTRIBUTE:"] == ["policy_options"]
    assert {"host", "port", "executor", "adapters"} < set(groups["program:"])
    assert set(groups["output:"]) == {"output_dir", "overwrite"}
    assert {"model", "dtype"} < set(groups["model:"])
    assert {"policy", "page_size"} < set(groups["engine:"])
    assert all(name.startswith("lserve_") for name in groups["--policy=lserve:"])


def test_what_ships_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo = "configs/demo_prompts.jsonl"
    assert shipped.found(demo) == str(ROOT / demo)
    assert shipped.found(f"prompts:{demo}") == f"prompts:{ROOT / demo}"
    for other in ("sharegpt", "", "configs/none.flags", "README.md", "prompts:mine.txt", "16"):
        assert shipped.found(other) == other
    (tmp_path / "configs").mkdir()
    (tmp_path / demo).write_text("a prompt of one's own")
    assert shipped.found(demo) == demo
