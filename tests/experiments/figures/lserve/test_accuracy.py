"""Studies of accuracy: what is asked of which system, and what is said of the answers."""

import csv
import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.figures import accuracy
from experiments.figures.lserve import formats, frontier, needle, page_size, reuse
from experiments.lib.answers import Answer, Evaluation
from experiments.lib.program import Options, Refused
from experiments.lib.reference import Distributions

FLAGS = {
    "model": "bundled", "dtype": "float32", "attention_implementation": "", "seed": 1,
    "compilation_cache": "", "tasks": ["values"], "contexts": ["256"], "num_prompts": 4,
}  # fmt: skip


@pytest.fixture
def gates(tmp_path) -> str:
    """The first KV head of each layer is a retrieval head."""
    path = tmp_path / "gates.tsv"
    path.write_text("\n".join("\t".join(["0.9", *["0.1"] * 3]) for _ in range(4)))
    return str(path)


def test_systems_differ_in_what_their_names_say(gates):
    options = Options(
        **FLAGS, gates=gates, shares=["0", "0.5"], budgets=["192", "all"], controls=True,
        random_splits=2,
    )  # fmt: skip
    found = frontier.systems(options)
    assert list(found) == [
        "dense", "0% streaming, budget 192", "50% streaming, budget 192",
        "50% streaming, budget all", "gates turned around", "random pages", "random heads 1",
        "random heads 2",
    ]  # fmt: skip
    chosen = found["50% streaming, budget 192"].policy_options
    assert (chosen.budget, chosen.streaming_share, chosen.gates[0][0]) == (192, 0.5, 0.9)
    turned = found["gates turned around"].policy_options
    assert turned.gates[0] == pytest.approx((0.1, 0.9, 0.9, 0.9)) and turned.budget == 192
    pages = page_size.systems(Options(**FLAGS, budgets=["192"]))
    assert [config.page_size for config in pages.values()] == [64, 16, 64, 64]
    assert len({config.policy_options.reuse for config in list(pages.values())[1:]}) == 1
    of = formats.systems(Options(**FLAGS, gates=gates, share=0.25, budget=192, with_bits="4"))
    both = of["sparse and quantised"]
    assert (both.quantization, both.policy_options.kv_bits, both.policy_options.budget) == (
        "w8a8", 4, 192,
    )  # fmt: skip
    assert not of["quantised"].policy_options.gates and of["sparse"].quantization == "none"


@pytest.mark.parametrize(
    ("program", "changes", "message"),
    [
        (frontier, {"shares": ["half"]}, "--shares must be numbers"),
        (frontier, {"budgets": ["some"]}, "--budgets must be tokens or 'all'"),
        (page_size, {"budgets": ["all"]}, "--budgets must be tokens"),
        (reuse, {"intervals": ["3"]}, "reuse must be a divisor of page_size"),
        (needle, {"tasks": ["values"]}, "--tasks must be needle"),
        (reuse, {"tasks": ["nothing"]}, "unknown task 'nothing'"),
        (reuse, {"contexts": []}, "--tasks and --contexts must name at least one"),
        (reuse, {"tasks": ["cot_32"]}, "no task fits the contexts"),
        (frontier, {"contexts": ["many"]}, "contexts are token counts from 256 .* not 'many'"),
        (frontier, {"budgets": ["128"]}, "budget must be at least 3 pages of 64, not 128"),
        (frontier, {"shares": []}, "--shares must name at least one"),
        (needle, {"tasks": ["needle"], "budgets": []}, "--budgets must name at least one"),
        (frontier, {"gates": ""}, "--gates must name a file"),
        (frontier, {"model": "/none"}, "^there is no folder /none"),
        (formats, {"with_bits": "4", "attention_implementation": "mosaic_gpu"}, "must all be"),
    ],
)  # fmt: skip
def test_bad_flags_are_refused_before_any_model_is_loaded(
    gates, tmp_path, program, changes, message
):
    of_programs = {"shares": ["0.5"], "budgets": ["192"], "intervals": ["2"], "budget": 192}
    options = Options(
        **FLAGS | of_programs
        | {"gates": gates, "share": 0.5, "controls": False, "random_splits": 0}
        | {"output_dir": str(tmp_path)} | changes
    )  # fmt: skip
    with pytest.raises(Refused, match=message):
        program.main(options)
    assert not (tmp_path / "accuracy.csv").exists()


def _found(right: list[bool]) -> Evaluation:
    """Answers of one setting, all with the same distributions."""
    along = Distributions(np.full(1, -0.1), np.array([[3, 4]], np.int32), np.array([[-0.1, -3.0]]))
    answers = [Answer("values", 256, i, float(ok), "1;", "1;", -0.1) for i, ok in enumerate(right)]
    return Evaluation(answers, {answer.key: along for answer in answers})


def _rows(found: dict[str, Evaluation]) -> list[accuracy.Row]:
    dense = found["dense"]
    return [row for name, one in found.items() for row in accuracy.rows_of(name, one, dense)]


def test_the_goal_is_judged_by_the_lower_bound_over_all_prompts():
    options = Options(
        **FLAGS, shares=["0.5"], budgets=["64"], controls=True, random_splits=1, gates=""
    )
    right, half = [True] * 40, [True, False] * 20
    at = frontier.label(*frontier.goal(options))
    rows = _rows({"dense": _found(right), at: _found(right), "random heads 1": _found(half)})
    text, numbers = frontier.conclude(options, rows)
    assert "+0.0, met" in text and numbers["difference_low"] == 0
    assert numbers["difference_random_heads_1"] == -50 and numbers["random_splits_beaten"] == 1
    text, numbers = frontier.conclude(
        options, _rows({"dense": _found(right), at: _found([False, *right[1:]])})
    )
    assert numbers["difference_points"] == -2.5 and "not met" in text and "no point" in text


def test_depths_of_needles():
    options = Options(**FLAGS | {"tasks": ["needle"], "num_prompts": 24})
    depths = needle.depths(options, 256)
    assert (depths >= 0).all() and (depths < 1).all() and np.ptp(depths) > 0.5
    answers = [
        Answer("needle", 256, i, float(d < 0.5), "1;", "", 0.0) for i, d in enumerate(depths)
    ]
    shares = needle.heat_map(options, Evaluation(answers))[:, 0]
    held = ~np.isnan(shares)
    assert (shares[: needle.DEPTHS // 2][held[: needle.DEPTHS // 2]] == 1).all()
    assert (shares[needle.DEPTHS // 2 :][held[needle.DEPTHS // 2 :]] == 0).all()


def test_where_no_needle_was_asked_for_the_map_says_so():
    options = Options(**FLAGS | {"tasks": ["needle"], "num_prompts": 3})
    found = Evaluation([Answer("needle", 256, i, 1.0, "1;", "", 0.0) for i in range(3)])
    empty = int(np.isnan(needle.heat_map(options, found)).sum())
    assert empty >= needle.DEPTHS - 3
    figure = Figure()
    needle.draw(options, figure, {"dense": found})
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["no prompt"] * empty
    assert sum(patch.get_hatch() is not None for patch in axes.patches) == empty
    text, numbers = needle.conclude(options, _rows({"dense": _found([True] * 3)}), {"dense": found})
    assert numbers["cells_asked"] == needle.DEPTHS - empty
    assert f"in {needle.DEPTHS - empty} of {needle.DEPTHS} cells of length and depth" in text


@pytest.mark.slow  # three policies compile
def test_a_whole_study(gates, tmp_path, capsys, monkeypatch):
    options = Options(
        **FLAGS | {"num_prompts": 2, "tasks": ["values", "multikey"]}, gates=gates,
        shares=["0.5"], budgets=["192"], controls=False, random_splits=0, output_dir=str(tmp_path),
    )  # fmt: skip
    assert frontier.main(options) == 0
    loaded = capsys.readouterr().out
    assert "goal at 50% streaming, budget 192" in loaded
    with (tmp_path / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 and float(rows[0]["divergence"]) == 0
    assert float(rows[-1]["divergence"]) > 0
    assert json.loads((tmp_path / "report.json").read_text())["missing"] == []
    assert (tmp_path / "accuracy.png").exists()
    # The second time nothing is asked again, and the same is found.
    monkeypatch.setattr(accuracy, "load_engine", None)
    assert frontier.main(options) == 0
    with (tmp_path / "accuracy.csv").open() as file:
        again = list(csv.DictReader(file))
    for row, before in zip(again, rows, strict=True):
        assert row["difference"] == before["difference"]
        assert float(row["logprob"]) == pytest.approx(float(before["logprob"]), abs=1e-5)
