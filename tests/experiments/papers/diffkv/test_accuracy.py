"""DiffKV's accuracy studies: their systems, the memory that they measure, and their verdicts."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.lib import kept_answers, kv_held
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.program import Refused
from experiments.lib.shipped import ROOT
from experiments.papers.diffkv import (
    equal_bytes,
    fig11_frontier,
    joint_frontier,
    streaming_shares,
    systems,
    table3_thinking,
)
from experiments.papers.diffkv import fig08_key_value_formats as key_value_formats
from experiments.papers.diffkv import fig09_dynamic_sparsity as dynamic_sparsity
from experiments.papers.diffkv import fig10_thresholds as thresholds
from experiments.papers.diffkv import table1_accuracy_memory as accuracy_memory
from experiments.papers.diffkv.comparison import of_alpha
from experiments.papers.lserve import fig09_needle as needle
from experiments.papers.lserve import fig13_hierarchical_paging as paging
from experiments.papers.lserve import table4_long_chains
from experiments.papers.lserve.gates import BUNDLED_GATES
from experiments.study import Run
from models import checkpoint
from paged.kv_cache.policy import ShardedModel
from paged.requests.sampling_params import SamplingParams
from tests.experiments.papers.made_up import FLAGS, found_with, numbers_of, rows_of
from tests.paged.kv_cache import tova

MEMORY: dict[str, Any] = FLAGS | {
    "alphas": ("1/0", "3/0.02"), "budgets": (0.3, 0.5),
    "quest_budget": 64,
}  # fmt: skip


def test_systems_differ_in_what_their_names_say():
    found = accuracy_memory.make_systems(accuracy_memory.MemoryFlags(**MEMORY))
    assert list(found) == [
        "16 bits", "DiffKV 1/0", "H2O 0.3", "SnapKV 0.3", "H2O 0.5", "SnapKV 0.5", "K4V4",
        "K8V8", "KIVI", "QAQ", "DiffKV 3/0.02", "three levels 5/1/0", "DuoAttention", "Quest",
    ]  # fmt: skip
    chosen = {name: config.policy_options for name, config in found.items()}
    assert (chosen["DiffKV 3/0.02"].alpha_h, chosen["DiffKV 3/0.02"].alpha_l) == (3, 0.02)
    assert (chosen["K4V4"].high, chosen["K4V4"].low, chosen["K4V4"].keeps_all) == (
        "K4V4", "K4V4", True,
    )  # fmt: skip
    for name, rules in (("H2O 0.3", ("h2o", "h2o")), ("SnapKV 0.3", ("snapkv", "keep"))):
        one = chosen[name]
        assert (one.prompt_rule, one.generation_rule, one.budget) == (*rules, 0.3)
    assert found["16 bits"].kv_dtype == found["Quest"].kv_dtype == "float16"
    assert chosen["DuoAttention"].budget > 256 > chosen["Quest"].budget == 64
    assert chosen["DuoAttention"].gates and not chosen["Quest"].gates
    three = chosen["three levels 5/1/0"].levels
    assert [tuple(level)[1:] for level in three] == [("K16V16", 5), ("K8V4", 1), ("K4V2", 0)]
    flags = equal_bytes.BytesFlags(**FLAGS)
    for name, config in {
        "kivi": systems.kivi(flags),
        "kv_int8": systems.uniform(flags, "K8V8"),
        "kv_int4": systems.uniform(flags, "K4V4"),
        "h2o": systems.budgeted(flags, "H2O", 0.5),
        "snapkv": systems.budgeted(flags, "SnapKV", 0.5),
        "quest": systems.quest(flags, 1024),
        "duo_attention": systems.duo_attention(flags, BUNDLED_GATES, 0.5),
    }.items():
        assert config == equal_bytes.config_of(flags, name), name  # of the flag files
    # Pages of three levels hold 8 tokens, and KIVI's 12, in about the bytes of the others' pages.
    # DuoAttention has LServe's pages. All other settings are equal.
    page_sizes = {name: c.page_size for name, c in found.items()}
    assert page_sizes.pop("three levels 5/1/0") == page_sizes.pop("QAQ") == 8
    assert page_sizes.pop("DuoAttention") == 64
    assert page_sizes.pop("KIVI") == 12 and len(set(page_sizes.values())) == 1
    assert len({(c.max_num_seqs, c.max_model_len) for c in found.values()}) == 1


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (accuracy_memory, {"alphas": ()}, "--alphas must name at least one"),
        (accuracy_memory, {"alphas": ("1",)}, "--alphas must be pairs such as 1/0.02"),
        (accuracy_memory, {"alphas": ("0/1",)}, "alpha_l must be from 0 to alpha_h"),
        (accuracy_memory, {"three_levels": ("1/0",)}, "must be triples such as 5/1/0"),
        (accuracy_memory, {"three_levels": ("0/1/0",)}, "alpha_top must be at least alpha_h"),
        (accuracy_memory, {"budgets": ("half",)}, "--budgets must be numbers"),
        (key_value_formats, {"formats": ("INT4",)}, "a page format is named K8V4"),
        (dynamic_sparsity, {"alphas": ("1/0",)}, "--alphas must be numbers"),
        (thresholds, {"alphas_l": (0.1,)}, "--alphas_l must include 0, which drops nothing"),
    ],
)
def test_bad_flags_are_refused_before_any_model_is_loaded(tmp_path, module, changes, message):
    with pytest.raises((Refused, ValueError), match=message):
        module.STUDY.write(module.STUDY.flags(**FLAGS | changes), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_goal_and_baselines_at_no_less_memory():
    right, half = [True] * 40, [True, False] * 20
    found = {"16 bits": found_with(right), "DiffKV 1/0": found_with(right, 0.33)}
    found |= {f"{m} {b}": found_with(half, b + 0.01) for m in ("H2O", "SnapKV") for b in (0.3, 0.5)}
    found["K4V4"] = found_with(half, 0.3)
    found["DiffKV 3/0.02"] = found_with(right, 0.29)
    flags, study = accuracy_memory.MemoryFlags(**MEMORY), accuracy_memory.STUDY

    def report() -> dict[str, Any]:
        rows = rows_of(found, partial(accuracy_memory.compare, flags))
        accuracy_memory.draw(flags, Figure(), rows)
        paired = {(row.system, row.reference) for row in accuracy.pairs(rows)}
        assert ("DiffKV 1/0", "H2O 0.5") in paired and ("DiffKV 3/0.02", "K4V4") in paired
        return study.report(flags, rows)

    whole = report()
    numbers = numbers_of(whole)
    assert whole["holds"] is True and numbers["kv_memory_fraction"] == pytest.approx(0.33)
    assert numbers["points_diffkv_3_0_02_over_k4v4"] == 50
    assert numbers["points_diffkv_1_0_over_h2o_0_5"] == numbers["lost_h2o_0_5"] == 50
    assert (numbers["right_k4v4"], numbers["memory_k4v4"]) == (50, pytest.approx(0.3))
    found["DiffKV 1/0"] = found_with(right, 0.41)
    assert report()["holds"] is False


def test_every_dynamic_budget_needs_a_static_one_of_no_less_memory():
    flags = dynamic_sparsity.SparsityFlags(**FLAGS, alphas=(0.1, 1.0), budgets=(0.5,))
    right, half = [True] * 10, [True, False] * 5
    found = {"16 bits": found_with(right), "dynamic 0.1": found_with(right, 0.4)}
    found |= {"dynamic 1": found_with(right, 0.3), "static 0.5": found_with(half, 0.5)}
    found["static, SnapKV 0.5"] = found_with(half, 0.5)

    def verdict() -> bool | None:
        rows = rows_of(found, partial(dynamic_sparsity.compare, flags))
        return dynamic_sparsity.STUDY.report(flags, rows)["holds"]

    assert verdict() is True
    found["dynamic 0.1"] = found_with(right, 0.6)
    assert verdict() is None
    found["dynamic 0.1"], found["static 0.5"] = found_with(half, 0.4), found_with(right, 0.5)
    assert verdict() is False


@pytest.mark.parametrize("scale", ["quick", "full"])
@pytest.mark.parametrize(
    ("study", "make"),
    [
        (dynamic_sparsity.STUDY, dynamic_sparsity.make_systems),
        (thresholds.STUDY, thresholds.make_systems),
        (fig11_frontier.STUDY, fig11_frontier.make_systems),
        (accuracy_memory.STUDY, accuracy_memory.make_systems),
        (table3_thinking.STUDY, systems.thinking),
        (needle.STUDY, needle.systems),
        (paging.STUDY, paging.systems),
        (table4_long_chains.STUDY, table4_long_chains.systems),
    ],
)
def test_all_systems_of_both_scales_are_valid(study, make, scale):
    assert len(make(study.at(scale))) > 1


def test_calibration_is_the_papers_procedure():
    """Calibration chooses alpha_h first, with nothing dropped, then alpha_l; among equal
    accuracies, the least memory."""
    flags = thresholds.ThresholdFlags(**FLAGS, alphas_h=(1.0, 2.0), alphas_l=(0.0, 0.1))

    def chosen(cells):
        found = {"16 bits": found_with([True] * 10)}
        for cell, (right, memory) in cells.items():
            one = found_with([True] * right + [False] * (10 - right), memory)
            found[of_alpha(*cell)] = one
        rows = rows_of(found)
        thresholds.draw(flags, Figure(), rows)
        numbers = thresholds.values(flags, rows)
        return numbers["alpha_h"], numbers["alpha_l"]

    cells = {(1, 0): (10, 0.4), (2, 0): (10, 0.3), (1, 0.1): (10, 0.2), (2, 0.1): (9, 0.1)}
    assert chosen(cells) == (2, 0)
    assert chosen(cells | {(2, 0.1): (10, 0.1)}) == (2, 0.1)
    assert chosen(cells | {(2, 0): (9, 0.3)}) == (1, 0.1)


def test_calibration_asks_the_cells_of_two_steps_once_each(tmp_path, monkeypatch):
    flags = thresholds.ThresholdFlags(
        **FLAGS | {"model": "bundled"}, alphas_h=(1.0, 2.0, 3.0), alphas_l=(0.0, 0.02, 0.1)
    )
    first = ["16 bits", "DiffKV 1/0", "DiffKV 2/0", "DiffKV 3/0"]
    asked: list[list[str]] = []

    def answered(flags, run, make):
        asked.append(list(make(flags)))
        for name in asked[-1]:
            yield name, found_with([True] * 10 if name in ("16 bits", "DiffKV 2/0") else [False])

    monkeypatch.setattr(accuracy, "answered", answered)
    rows = list(thresholds.measure(flags, Run(tmp_path, tmp_path)))
    assert asked == [first, ["16 bits", "DiffKV 2/0", "DiffKV 2/0.02", "DiffKV 2/0.1"]]
    assert [row.system for row in rows] == [*first, "DiffKV 2/0.02", "DiffKV 2/0.1"]
    stored = json.loads((tmp_path / thresholds.THRESHOLDS).read_text())
    assert (stored["alpha_h"], stored["alpha_l"]) == (2.0, 0.0)


def test_memory_is_counted_in_whole_pages(tiny_folder):
    """A simulated device drops nothing.

    A token of K8V8 in one head takes 2 D bytes of codes, 2 * 4 of scales and 2 * 4 of score and
    position, against 4 D in 16 bits. Sections are multiples of 16 bytes.
    """
    D = checkpoint.load_config(tiny_folder).head_dim
    config = engine_config(
        checkpoint.load_config(tiny_folder), policy="diffkv", page_size=8, max_model_len=64,
        max_num_batched_tokens=64, chunked_prefill=False, kv_cache_tokens=1024,
        policy_options={"high": "K8V8", "low": "K8V8", "alpha_h": 0.0, "alpha_l": 0.0},
    )  # fmt: skip
    engine = load_engine(config, model=str(tiny_folder), executor="simulated")
    for length in (5, 20, 33):
        engine.add_request(list(range(3, 3 + length)))
    while engine.has_unfinished():
        engine.step()
    held = kv_held.of_sequences(engine)
    assert len(held) == 3
    for one in held:
        assert (one.fraction, one.high, one.low) == pytest.approx(((2 * D + 16) / (4 * D), 1, 0))
    engine.metrics.clear()
    assert kv_held.of_sequences(engine) == [] and kv_held.mean([]) is None


def test_memory_of_dense_and_streaming_heads(tiny_folder):
    """Half of the heads stream: they keep only their window, a page each for sink, local and a
    query's own tokens.

    No row is long enough to select pages, so no page has statistics.
    """
    model = checkpoint.load_config(tiny_folder)
    gates = [[head % 2 for head in range(model.num_kv_heads)]] * model.num_layers
    config = engine_config(
        model, policy="lserve", page_size=8, max_model_len=64, max_num_batched_tokens=64,
        chunked_prefill=False, kv_cache_tokens=1024, kv_dtype="float16",
        policy_options={
            "gates": gates, "budget": 64, "logical_page": 8, "sink": 8, "local": 8,
        },
    )  # fmt: skip
    engine = load_engine(config, model=str(tiny_folder), executor="simulated")
    engine.add_request(list(range(3, 52)), SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    (held,) = kv_held.of_sequences(engine)
    share = (7 + 3) / 14
    assert (held.fraction, held.high, held.low) == pytest.approx((share, share, 0))
    # The generated token is the second of its page. A dense head reads 50 tokens; a streaming head
    # reads 8 of sink, 8 local and 2 of that page. Queries and outputs are added.
    D, K, H = model.head_dim, model.num_kv_heads, model.num_heads
    queries = 2 * 4 * D * H
    read = K / 2 * (50 + 18) * 4 * D + queries
    assert held.read == pytest.approx(read / (K * 50 * 4 * D + queries))


@pytest.mark.slow  # two policies compile
def test_thresholds_are_written_for_the_policy_to_read(tmp_path):
    flags = thresholds.ThresholdFlags(
        **FLAGS | {"num_prompts": 1}, alphas_h=(1.0,), alphas_l=(0.0,)
    )
    assert thresholds.STUDY.write(flags, tmp_path) == 0
    stored = json.loads((tmp_path / thresholds.THRESHOLDS).read_text())
    assert (stored["alpha_h"], stored["alpha_l"]) == (1.0, 0.0)
    assert stored["weights_sha256"] == checkpoint.weights_hash("bundled")


def test_a_front_has_no_point_that_another_beats():
    points = {"a": (1.0, 90.0), "b": (0.5, 90.0), "c": (0.2, 70.0), "d": (0.3, 60.0)}
    assert equal_bytes.front(points) == ["c", "b"]


def test_a_share_of_streaming_heads_drops_a_fifth_of_the_tokens():
    flags = streaming_shares.ShareFlags(**FLAGS)
    made = streaming_shares.make_systems(flags)
    assert list(made) == [
        "16 bits", "30% streaming", "50% streaming", "30% random heads", "50% random heads"
    ]  # fmt: skip
    by_gates, _, at_random, _ = (one.policy_options for name, one in made.items() if "%" in name)
    assert by_gates.streaming_share == at_random.streaming_share == 0.3
    assert by_gates.gates != at_random.gates and by_gates.alpha_l == 0
    # Made-up sequences have a half of their tokens in high and a quarter in low precision.
    right = [True] * 100
    found = {"16 bits": found_with(right)} | dict.fromkeys([*made][1:], found_with(right, 0.3))

    def report() -> dict[str, Any]:
        rows = rows_of(found)
        streaming_shares.draw(flags, Figure(), rows)
        return streaming_shares.STUDY.report(flags, rows)

    numbers = numbers_of(report())
    assert numbers["dropped_30_streaming"] == 25 and "dropped_16_bits" not in numbers
    assert (numbers["share"], numbers["lost"]) == (0.3, 0) and report()["holds"] is True
    found["30% streaming"] = found_with(right, 0.31)
    assert numbers_of(report())["share"] == 0.5 and report()["holds"] is True
    found["50% streaming"] = found_with([False] * 2 + [True] * 98, 0.3)
    assert numbers_of(report())["lost_most"] >= 2 and report()["holds"] is False
    found["50% streaming"] = found_with(right, 0.31)
    assert numbers_of(report())["share"] is None and report()["holds"] is False


def test_a_policy_from_outside_stands_beside_the_baselines(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/paged/kv_cache"))
    file = tmp_path / "mine.flags"
    text = (ROOT / "tests/paged/kv_cache/tova.flags").read_text()
    file.write_text(text.replace("1024", "64"))
    flags = accuracy_memory.MemoryFlags(**MEMORY, others=(str(file),))
    mine = accuracy_memory.make_systems(flags)["mine"]
    assert (mine.policy, mine.policy_options.budget) == ("tova:TOVA", 64)
    assert accuracy_memory.families(flags)["mine"] == ["mine"]
    model = checkpoint.load_config("bundled")
    layout = tova.layout(mine, ShardedModel.split(model))
    held, kept = layout.stored(None, np.arange(2), np.array([40, 256]))
    token = 2 * 2 * model.head_dim * model.num_kv_heads * model.num_layers
    assert held.tolist() == [48 * token, 64 * token] and kept[:, 0].tolist() == [1, 0.25]
    twice = replace(flags, others=(str(file), str(file)))
    with pytest.raises(ValueError, match=r"mine\.flags has the name of another system"):
        accuracy_memory.make_systems(twice)
    bytes_flags = equal_bytes.BytesFlags(**FLAGS, systems=("diffkv",), others=(str(file),))
    assert list(equal_bytes.make_systems(bytes_flags)) == ["vllm", "diffkv", "mine"]
    ours, others = kept_answers.outside("diffkv"), kept_answers.outside(mine.policy)
    assert not ours and len(others["policy"]) == 64
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_policy.py").write_text("from own_parts import P")
    (tmp_path / "own_parts.py").write_text("P = 1")
    before = kept_answers.outside("own_policy:P")
    (tmp_path / "own_parts.py").write_text("P = 2")
    assert kept_answers.outside("own_policy:P") != before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "mine.flags: cannot be read: No such file"),
        ("# nothing", "mine.flags: holds no flag"),
        ("--page_size=16\npolicy=lserve", "mine.flags:2: flags are --name=value, not"),
        ("--page_size", "mine.flags:1: --page_size needs a value"),
        ("--policy_options=5", "must be an object of JSON"),
        ("--flagfile=FOLDER/mine.flags", "names itself as a --flagfile"),
        ("--policy=7", "policy must be one of .*, not '7'"),
        ("--page=16", "--page in .*mine.flags is no flag of an engine"),
        ("--policy=tova:NONE", "policy 'tova:NONE'"),
    ],
)
def test_a_bad_flag_file_is_refused_by_name(tmp_path, text, message):
    file = tmp_path / "mine.flags"
    if text:
        file.write_text(text.replace("FOLDER", str(tmp_path)))
    with pytest.raises(ValueError, match=message):
        systems.of_flags(accuracy_memory.MemoryFlags(**MEMORY), (str(file),))


def test_a_flag_file_is_read_as_absl_reads_it(tmp_path):
    file = tmp_path / "mine.flags"
    file.write_text(
        "\ufeff  --policy=diffkv\n\n// a comment\n-diffkv_alpha_l=.1\n--norun_ahead\n"
        f"--prefix_caching=0\n--flagfile={tmp_path}/more.flags",
        "utf-8",
    )
    (tmp_path / "more.flags").write_text("--page_size=32")
    config = systems.of_flags(accuracy_memory.MemoryFlags(**MEMORY), (str(file),))
    assert (config.policy, config.policy_options.alpha_l) == ("diffkv", 0.1)
    assert not config.run_ahead and not config.prefix_caching and config.page_size == 32
    (tmp_path / "quest.flags").write_text("--page_size=16")
    flags = accuracy_memory.MemoryFlags(**MEMORY, others=(str(tmp_path / "quest.flags"),))
    with pytest.raises(ValueError, match="has the name of another system, Quest"):
        accuracy_memory.make_systems(flags)


def test_every_system_of_the_flag_files_is_read():
    """The flag files set the systems' values, and the study sets the sizes."""
    flags = equal_bytes.BytesFlags(**FLAGS, systems=tuple(equal_bytes.SYSTEMS))
    found = equal_bytes.make_systems(flags)
    assert {config.max_model_len for config in found.values()} == {256}
    assert found["quest"].policy_options.select_per == "query_head"
    selected = found["diffkv_streaming_selected"]
    assert (selected.policy_options.read_pages, selected.policy_options.streaming_share) == (
        48,
        0.5,
    )
    assert selected.policy_options.gates == found["lserve"].policy_options.gates != ()
    assert found["kivi"].page_size == 12 and found["qaq"].policy_options.outliers == 1
    with pytest.raises(ValueError, match="--systems must be among vllm, lserve"):
        equal_bytes.make_systems(equal_bytes.BytesFlags(**FLAGS, systems=("unheard",)))


def test_thresholds_without_baselines_decide_nothing():
    flags = fig11_frontier.FrontierFlags(
        **FLAGS, alpha_h=(1.0, 2.0), alpha_l=(0.02,), formats=(), budgets=()
    )
    made = fig11_frontier.make_systems(flags)
    assert list(made) == ["16 bits", "DiffKV 1/0.02", "DiffKV 2/0.02"]
    found = {"16 bits": found_with([True] * 4)}
    rows = rows_of(found | dict.fromkeys([*made][1:], found_with([True] * 4, 0.3)))
    fig11_frontier.draw(flags, Figure(), rows)
    report = fig11_frontier.STUDY.report(flags, rows)
    assert report["holds"] is None and numbers_of(report)["memory_least"] == 0.3


def test_the_joint_frontier_refuses_reports_of_other_questions(tmp_path):
    flags = joint_frontier.FrontierFlags()
    first, other = map(joint_frontier.report_of, flags.reports[:2])
    for field, message in (("flags", r"--seed is 7 in .* and 8 in"), ("hardware", "one kind")):
        changed = other | {field: other[field] | {"seed": 8, "jax_devices": ["a GPU"]}}
        (tmp_path / "report.json").write_text(json.dumps(changed))
        mixed = (flags.reports[0], str(tmp_path / "report.json"))
        with pytest.raises(ValueError, match=message):
            joint_frontier.check(joint_frontier.FrontierFlags(mixed))
    odd = json.loads(json.dumps(other))
    odd["rows"] = [row | {"score": 1.0} for row in odd["rows"]]
    (tmp_path / "report.json").write_text(json.dumps(odd))
    with pytest.raises(ValueError, match="disagree on a system"):
        joint_frontier.check(joint_frontier.FrontierFlags(mixed))
    for text in ("", "[]", "{}", json.dumps(first | {"partial": "Ctrl-C"})):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ValueError, match=r"report\.json: "):
            joint_frontier.check(joint_frontier.FrontierFlags(mixed))


def test_the_joint_frontier_has_each_system_of_the_committed_reports_once():
    rows = list(joint_frontier.measure(joint_frontier.FrontierFlags(), None))
    families = {row.system: joint_frontier.family(row.system) for row in rows}
    assert len(families) == len(rows)
    assert {"INT4", "KIVI", "QAQ", "Quest", "DuoAttention", "SnapKV 0.5"} <= families.keys()
    assert {"LServe", "TOVA"} <= families.keys()
    for system, family in families.items():
        if "streaming" in system or "selection" in system:
            assert family == "combined", system
        assert (family == "DiffKV") == system.startswith("DiffKV"), system
    assert joint_frontier.family("three levels 5/1/0.02") == "DiffKV"
    only = joint_frontier.FrontierFlags((joint_frontier.REPORTS[3],))  # formats alone
    numbers = joint_frontier.values(only, list(joint_frontier.measure(only, None)))
    assert not joint_frontier.holds({n: x for n, x in numbers.items() if x is not None})


def test_the_joint_frontier_compares_each_baseline_with_diffkv_in_no_more_bytes():
    def row(system: str, right: float, held: float) -> joint_frontier.Row:
        return joint_frontier.Row(system, "", right, held, held)

    rows = [
        row("16 bits", 99, 1), row("INT4", 98, 0.31), row("KIVI", 93, 0.24),
        row("H2O 0.5", 52, 0.52), row("DiffKV 3/0", 99, 0.3), row("DiffKV 1/0.02", 96, 0.3),
        row("1/0 and 30% streaming", 98, 0.25),
    ]  # fmt: skip
    numbers = joint_frontier.values(joint_frontier.FrontierFlags(), rows)
    assert (numbers["over_int4"], numbers["pruning_over_int4"]) == (1, -2)
    assert numbers["over_kivi"] is None and numbers["pruning_over_h2o_0_5"] == 44
    assert (numbers["compared"], numbers["smaller"]) == (2, 1)
    assert (
        numbers["behind_1_0_and_30_streaming"] == 0 and "over_1_0_and_30_streaming" not in numbers
    )
    measured = {name: value for name, value in numbers.items() if value is not None}
    assert not joint_frontier.holds(measured)
    assert joint_frontier.holds(measured | {"pruning_over_int4": 0})
