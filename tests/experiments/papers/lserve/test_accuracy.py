"""Studies of accuracy: the prompts for each system, and the verdicts on the answers."""

import csv
import dataclasses
import json
from functools import partial

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.lib.program import Refused
from experiments.papers.lserve import fig06_page_size as page_size
from experiments.papers.lserve import fig09_needle as needle
from experiments.papers.lserve import fig13_hierarchical_paging as paging
from experiments.papers.lserve import formats, streaming_heads
from experiments.papers.lserve import table3_streaming_and_selection as frontier
from experiments.papers.lserve import table6_reuse as reuse
from tests.experiments.papers.made_up import FLAGS, found_with, numbers_of, rows_of


@pytest.fixture
def gates(tmp_path) -> str:
    """A file of gates in which the first KV head of each layer is a retrieval head."""
    path = tmp_path / "gates.tsv"
    path.write_text("\n".join("\t".join(["0.9", *["0.1"] * 3]) for _ in range(4)))
    return str(path)


def test_systems_differ_in_what_their_names_say(gates):
    flags = frontier.FrontierFlags(
        **FLAGS, gates=gates, shares=(0.0, 0.5), budgets=("192", "all"), random_splits=2
    )
    found = frontier.systems(flags)
    assert list(found) == [
        "dense", "0% streaming, budget 192", "50% streaming, budget 192",
        "50% streaming, budget all", "gates turned around", "random heads 1", "random heads 2",
        "random pages",
    ]  # fmt: skip
    chosen = found["50% streaming, budget 192"].policy_options
    assert (chosen.budget, chosen.streaming_share, chosen.gates[0][0]) == (192, 0.5, 0.9)
    parts = frontier.systems(dataclasses.replace(flags, reuse=1, page_size=16))
    assert parts["dense"] == found["dense"]
    part = parts["50% streaming, budget 192"]
    assert (part.page_size, part.policy_options.reuse, chosen.reuse) == (16, 1, 4)
    assert part.policy_options.logical_page == 16
    turned = found["gates turned around"].policy_options
    assert turned.gates[0] == pytest.approx((0.1, 0.9, 0.9, 0.9)) and turned.budget == 192
    pages = page_size.systems(page_size.PageFlags(**FLAGS, budgets=(192,)))
    assert [config.page_size for config in pages.values()] == [64, 16, 64, 64, 64]
    logical = [config.policy_options.logical_page for config in list(pages.values())[1:]]
    assert logical == [16, 64, 16, 1]
    assert len({config.policy_options.reuse for config in list(pages.values())[1:]}) == 1
    of = formats.systems(formats.FormatFlags(**FLAGS, gates=gates, budget=192))
    both = of["sparse and quantised"]
    assert (both.quantization, both.policy_options.kv_bits, both.policy_options.budget) == (
        "w8a8", 4, 192,
    )  # fmt: skip
    assert not of["quantised"].policy_options.gates and of["sparse"].quantization == "none"


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (frontier, {"shares": ()}, "--shares must name at least one"),
        (frontier, {"shares": (1.5,)}, "--shares must be numbers, each from 0 to 1"),
        (frontier, {"budgets": ("some",)}, "--budgets must be tokens or 'all'"),
        (page_size, {"budgets": (0,)}, "--budgets must be whole numbers, each at least 1"),
        (reuse, {"intervals": (3,)}, "reuse must be a divisor of page_size"),
        (needle, {"tasks": ("values",)}, "--tasks must be needle"),
        (reuse, {"tasks": ("nothing",)}, "unknown task 'nothing'"),
        (reuse, {"tasks": ("cot_32",)}, "no task fits the contexts"),
        (frontier, {"contexts": (12,)}, "contexts are token counts from 256 .* not 12"),
        (frontier, {"budgets": ("128",)}, "budget must be at least 3 pages of 64, not 128"),
        (frontier, {"gates": ""}, "--gates must name a file"),
        (frontier, {"model": "/none"}, "^there is no folder /none"),
        (formats, {"with_bits": 5}, "--with_bits must be one of 4, 8, not 5"),
        (formats, {"attention_implementation": "mosaic_gpu"}, "must all be"),
    ],
)
def test_bad_flags_are_refused_before_any_model_is_loaded(tmp_path, module, changes, message):
    with pytest.raises((Refused, ValueError), match=message):
        module.STUDY.write(module.STUDY.flags(**FLAGS | changes), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_goal_is_judged_by_the_lower_bound_over_all_prompts_and_by_controls():
    flags = frontier.FrontierFlags(**FLAGS, shares=(0.5,), budgets=("192",))
    right, half = [True] * 40, [True, False] * 20
    at = frontier.label(*flags.goal)
    found = {"dense": found_with(right), at: found_with(right), "random heads 1": found_with(half)}
    report = frontier.STUDY.report(flags, rows_of(found))
    numbers = numbers_of(report)
    assert report["holds"] is True and numbers["difference_low"] == 0
    assert numbers["difference_random_heads_1"] == -50 and numbers["random_splits_beaten"] == 1
    for control in ("random heads 2", "gates turned around", "random pages"):
        loses_nothing = rows_of(found | {control: found_with(right)})
        assert frontier.STUDY.report(flags, loses_nothing)["holds"] is False
    report = frontier.STUDY.report(flags, rows_of(found | {at: found_with([False, *right[1:]])}))
    numbers = numbers_of(report)
    assert numbers["difference_points"] == -2.5 and report["holds"] is False
    assert numbers["holding_points"] == 0


def test_streaming_heads_hold_if_each_control_loses_more(gates):
    flags = streaming_heads.ShareFlags(**FLAGS, gates=gates, shares=(0.5,), random_splits=1)
    made = streaming_heads.systems(flags)
    assert list(made) == ["dense", "50% streaming", "gates turned around", "random heads 1"]
    chosen = [made[name].policy_options for name in list(made)[1:]]
    assert {each.streaming_share for each in chosen} == {0.5}
    assert {each.budget for each in chosen} == {flags.longest + 64}
    assert [each.gates[0][0] for each in chosen[:2]] == pytest.approx([0.9, 0.1])
    right, half = [True] * 40, [True, False] * 20
    found = dict(zip(made, map(found_with, (right, right, half, half)), strict=True))

    def report():
        rows = rows_of(found, partial(streaming_heads.compare, flags))
        streaming_heads.draw(flags, Figure(), rows)
        return streaming_heads.STUDY.report(flags, rows)

    numbers = numbers_of(report())
    assert numbers["lost_random_heads_1"] == numbers["over_random_heads_1"] == 50
    assert numbers["lost_50_streaming"] == 0 and report()["holds"] is True
    found["random heads 1"] = found_with([False, *right[1:]])
    assert numbers_of(report())["over_least_random_heads_1"] <= 0 and report()["holds"] is False
    found |= {"random heads 1": found_with(half), "50% streaming": found_with([False, *right[1:]])}
    assert numbers_of(report())["lost_50_streaming"] == 2.5 and report()["holds"] is False
    with pytest.raises(ValueError, match="must be among --shares, not only"):
        streaming_heads.ShareFlags(**FLAGS, shares=(0.25,))


@pytest.mark.parametrize("task", ["needle", "multikey"])
def test_depths_of_needles(task):
    flags = needle.NeedleFlags(**FLAGS | {"tasks": (task,), "num_prompts": 24})
    depths = needle.depths(flags, 256)
    assert (depths >= 0).all() and (depths < 1).all() and np.ptp(depths) > 0.5
    rows = list(needle.rows_of("dense", 256, depths, (depths < 0.5).astype(float)))
    half = needle.DEPTHS // 2
    assert {row.right for row in rows[:half]} <= {100, None}
    assert {row.right for row in rows[half:]} <= {0, None}
    assert sum(row.prompts for row in rows) == 24


def test_maps_have_flat_pages_at_equal_budgets_and_at_budgets_that_grow_with_the_page():
    found = paging.systems(paging.PagingFlags(**FLAGS | {"tasks": ("multikey",)}, budgets=(256,)))
    assert {
        name: (config.page_size, config.policy_options.logical_page, config.policy_options.budget)
        for name, config in found.items()
        if name != "dense"
    } == {
        "flat, 16, budget 256": (16, 16, 256),
        "flat, 32, budget 256": (32, 32, 256),
        "flat, 64, budget 256": (64, 64, 256),
        "flat, 32, budget 512": (32, 32, 512),
        "flat, 64, budget 1024": (64, 64, 1024),
        "hierarchical, 64, budget 256": (64, 16, 256),
    }
    flags = paging.PagingFlags(**FLAGS | {"tasks": ("multikey",)}, flat_pages=(16, 64))
    assert len(paging.systems(flags)) == 5
    with pytest.raises(ValueError, match="--problems have no known depth"):
        dataclasses.replace(flags, problems=("ruler.jsonl",))
    with pytest.raises(ValueError, match="--flat_pages must be 16, 64 and maybe 32"):
        dataclasses.replace(flags, flat_pages=(32, 64))


@pytest.mark.parametrize(
    ("right_of_ours", "right_of_large", "holds"),
    [(98, 97, True), (97, 97, False), (98, 98, False)],
)
def test_hierarchical_pages_may_lose_two_points_to_small_flat_ones_and_large_ones_must_lose_more(
    right_of_ours, right_of_large, holds
):
    flags = paging.PagingFlags(**FLAGS | {"tasks": ("multikey",)}, budgets=(256, 1024))
    right = {name: float(right_of_large) for name in paging.systems(flags)}
    right |= {f"flat, 16, budget {budget}": 100.0 for budget in flags.budgets}
    right |= {f"hierarchical, 64, budget {b}": float(right_of_ours) for b in flags.budgets}
    rows = [
        needle.Row(name, 256, depth, 4, percent)
        for name, percent in right.items()
        for depth in range(needle.DEPTHS)
    ]
    figure = Figure()
    paging.draw(flags, figure, rows)
    assert len(figure.axes) == 7  # of the first budget
    report = paging.STUDY.report(flags, rows)
    assert report["holds"] is holds
    numbers = numbers_of(report)
    assert numbers["right_flat_64_at_1024"] == right_of_large
    assert numbers["over_flat_16_at_256_flat_64_at_1024"] == right_of_large - 100


def test_where_no_needle_was_asked_for_the_map_says_so():
    flags = needle.NeedleFlags(**FLAGS | {"tasks": ("needle",), "num_prompts": 3})
    rows = list(needle.rows_of("dense", 256, needle.depths(flags, 256), np.ones(3)))
    empty = sum(row.right is None for row in rows)
    assert empty >= needle.DEPTHS - 3
    figure = Figure()
    needle.draw(flags, figure, rows)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["no prompt"] * empty
    assert sum(patch.get_hatch() is not None for patch in axes.patches) == empty
    numbers = needle.values(flags, rows)
    assert numbers == {"right_dense": 100, "cells_asked": needle.DEPTHS - empty}


@pytest.mark.slow  # three policies compile
def test_a_whole_study(gates, tmp_path, capsys, monkeypatch):
    flags = frontier.FrontierFlags(
        **FLAGS | {"num_prompts": 2, "tasks": ("values", "multikey")}, gates=gates, shares=(0.5,),
        budgets=("192",), controls=False,
    )  # fmt: skip
    assert frontier.STUDY.write(flags, tmp_path) == 0
    assert "50% streaming, budget 192" in capsys.readouterr().out
    first = (tmp_path / "rows.csv").read_text()
    rows = list(csv.DictReader(first.splitlines()))
    assert len(rows) == 2 * 3 and float(rows[0]["divergence"]) == 0
    assert float(rows[-1]["divergence"]) > 0
    assert json.loads((tmp_path / "report.json").read_text())["partial"] is None
    assert (tmp_path / "figure.png").exists()
    # A second run reads the kept answers instead of an engine, and gives the same rows.
    monkeypatch.setattr(accuracy, "load_engine", None)
    assert frontier.STUDY.write(flags, tmp_path) == 0
    for row, before in zip(csv.DictReader((tmp_path / "rows.csv").open()), rows, strict=True):
        assert row["difference"] == before["difference"]
        assert float(row["logprob"]) == pytest.approx(float(before["logprob"]), abs=1e-5)
