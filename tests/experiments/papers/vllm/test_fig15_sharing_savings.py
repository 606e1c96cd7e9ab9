"""Savings by sharing: counted blocks are the engine's, and family trees are the search's."""

import csv
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.papers.vllm import fig15_sharing_savings as sharing_savings
from experiments.papers.vllm import genealogies
from experiments.papers.vllm.fig15_sharing_savings import SharingFlags
from experiments.workloads.workloads import Request
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.beam_search import BeamSearch
from tests.paged.hashing_executor import HashingExecutor, candidates
from tests.paged.tiny import TINY


def engine(page_size: int) -> Engine:
    config = EngineConfig(max_model_len=128, page_size=page_size, kv_cache_tokens=2048)
    return Engine(TINY, config, HashingExecutor(config))


def run(method: str, sequences: int, page_size: int, prompt=21, output=30):
    requests = [Request(0.0, list(range(3, 3 + prompt)), output, ignore_eos=True)]
    e = engine(page_size)
    row, trees = sharing_savings.run_case(e, "alpaca", method, sequences, requests, 0)
    return e, row, trees


@given(data=st.data())
def test_sharing_counts_the_distinct_prefixes(data):
    prompt, first = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    parents: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 8))):
        count = len(parents[-1]) if parents else first
        parents.append(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4)))
    got = genealogies.sharing(prompt, parents, first)
    assert len(got.distinct) == len(parents) + 1

    lines: list[tuple] = [()] * first  # each sequence as its ancestors, each by step and index
    for step, of_step in enumerate([[*range(first)], *parents]):
        if step:
            lines = [(*lines[parent], (step, i)) for i, parent in enumerate(of_step)]
        prefixes = {line[:n] for line in lines for n in range(1, step + 1)}
        common = sum(len({line[: n + 1] for line in lines}) == 1 for n in range(step))
        assert got.distinct[step] == prompt + len(prefixes)
        assert got.unshared[step] == step - common
        assert got.length[step] == prompt + step
        assert got.logical[step] == len(lines) * (prompt + step)
        assert got.prompt[step] == len(lines) * prompt


@pytest.mark.parametrize("method", ["parallel", "beam"])
@pytest.mark.parametrize("sequences", [2, 5])
def test_blocks_of_one_token_save_what_the_sequences_share(method, sequences):
    e, row, trees = run(method, sequences, page_size=1)
    samples, beams = [list(range(sequences))] * 29, method == "beam"
    parents, first = (trees[0]["parents"], 1) if beams else (samples, sequences)
    expected = genealogies.sharing(21, parents, first)
    steps, shared = e.metrics.steps, expected.logical - expected.distinct
    assert [2048 - step.kv_free for step in steps] == expected.distinct.tolist()
    assert [step.kv_shared for step in steps] == shared.tolist()
    assert row.saving == pytest.approx((shared / expected.logical).mean())
    assert row.pooled == pytest.approx(row.one_token)
    assert row.steps == 30 and row.preemptions == 0


@pytest.mark.parametrize("method", ["parallel", "beam"])
def test_larger_blocks_save_less(method):
    rows = [run(method, 4, page_size)[1] for page_size in (1, 4, 16)]
    for saving in [row.saving for row in rows], [row.pooled for row in rows]:
        assert saving[0] >= saving[1] >= saving[2] > 0


def test_parallel_samples_save_their_prompts_full_blocks():
    # 21 tokens of a prompt are one full block of 16, and a partial one until the samples part.
    steps = run("parallel", 3, page_size=16)[0].metrics.steps
    assert [step.kv_shared // 16 for step in steps] == [4] + [2] * 29


def test_savings_leave_idle_steps_out():
    steps = run("parallel", 2, page_size=1)[0].metrics.steps
    idle = [*steps, *[type(steps[0])(**(vars(steps[0]) | {"kv_free": 2048, "kv_shared": 0}))] * 9]
    assert sharing_savings.savings(idle, 2048) == sharing_savings.savings(steps, 2048)


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0, 1.7])
def test_scaled_lengths_stay_within_the_limit(tokenizer, scale):
    requests = sharing_savings.make_requests("sharegpt", 40, 1.0, 90, scale, 0, tokenizer)
    lengths = [len(request.prompt) + request.max_tokens for request in requests]
    assert max(lengths) <= 90 and min(lengths) >= 2
    assert all(request.ignore_eos for request in requests)


def test_genealogies_are_those_of_the_search():
    """The oracle is the same search over the twin's candidates, each beam a list of its own."""
    prompt, search = list(range(3, 24)), BeamSearch(4, 30, 1.0, False, ())
    beams: list[list[int]] = [[]]
    expected = []
    while beams:
        tokens, top = zip(*(candidates([*prompt, *beam]) for beam in beams))
        moves = search.advance([np.array(b) for b in beams], np.array(tokens), np.array(top))
        beams = [[*beams[parent], token] for parent, token in moves]
        if moves:
            expected.append([parent for parent, _ in moves])
    _, _, trees = run("beam", 4, page_size=4)
    assert [tree["parents"] for tree in trees] == [expected]
    assert len(expected) == 29 and len({tuple(step) for step in expected}) > 5
    assert trees[0]["prompt_tokens"] == 21 and trees[0]["width"] == 4


def test_the_study_writes_its_report(tmp_path, tiny_folder, capsys):
    flags = SharingFlags(
        model=str(tiny_folder), executor="simulated", num_requests=4, num_sharegpt_requests=2,
        length_scale=0.1, page_size=2, sequences=(2, 3),
    )  # fmt: skip
    assert sharing_savings.STUDY.write(flags, tmp_path) == 0
    told = capsys.readouterr().out
    assert "0.0609" in told and "0.162 to 0.305" in told
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers.keys() == {
        f"{method}{n}_saving{suffix}"
        for method in ("parallel", "beam")
        for n in (2, 3)
        for suffix in ("", "_sharegpt")
    }
    assert all(0 <= numbers[name] < 2 / 3 for name in numbers)
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["saving"]) for row in rows] == list(numbers.values())
    trees = [json.loads(line) for line in (tmp_path / "genealogies.jsonl").open()]
    assert len(trees) == (4 + 2) * 2
    for tree in trees:
        count = 1
        for step in tree["parents"].split():
            assert len(step) == tree["width"] and all(int(digit, 36) < count for digit in step)
            count = len(step)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"sequences": (1,)}, "--sequences must be whole numbers, each at least 2, not 1"),
        ({"sequences": (33,)}, "--sequences (33) exceed --max_num_seqs (32)"),
        ({"sequences": (20,)}, "beam_width must be from 1 to 19, not 20"),
    ],
)
def test_bad_sequences_are_refused(fields, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        SharingFlags(**fields)
