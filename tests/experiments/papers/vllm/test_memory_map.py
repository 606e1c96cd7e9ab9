"""The memory map draws what the block tables and the pool hold."""

import csv
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.papers.vllm import memory_map
from experiments.papers.vllm import snapshots as block_snapshots
from paged.config import EngineConfig
from paged.engine import Engine
from tests.paged.hashing_executor import HashingExecutor
from tests.paged.tiny import TINY

ROOT = Path(__file__).parents[4]
KINDS = ["plain", "prefix", "parallel3", "beam4", "prefix", "plain"]
PAGE = 4


class Letters:
    """A tokenizer with a token for each character."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(character) % 58 for character in text]


@pytest.fixture(scope="module")
def requests():
    return memory_map.make_requests(KINDS, 22, 12, 24, seed=0, tokenizer=Letters())


def small_engine() -> Engine:
    config = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=32, max_model_len=64, page_size=PAGE,
        kv_cache_tokens=48 * PAGE, prefix_caching=True,
    )  # fmt: skip
    return Engine(TINY, config, HashingExecutor(config))


@pytest.fixture(scope="module")
def served(requests):
    """An engine, snapshots of its run, and block tables, refcounts and usage at each snapshot."""
    engine, seen = small_engine(), []
    take = block_snapshots.take

    def watch(engine, step, happened):
        snapshot, policy = take(engine, step, happened), engine.host_policy
        tables = {
            (s.group.request_id, s.group.sequences.index(s)): (
                policy.block_tables.blocks[slot, : policy.block_tables.num_blocks[slot]].tolist(),
                int(policy.block_tables.num_tokens[slot]),
            )
            for slot in engine.scheduler.running_slots()
            for s in [engine.scheduler.slots.owner[slot]]
        }
        hosted = np.flatnonzero(policy.host_pool.refcounts).tolist()
        seen.append((tables, policy.pool.refcounts.copy(), policy.pool.num_free, hosted))
        return snapshot

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_snapshots, "take", watch)
        snapshots = block_snapshots.run(engine, requests, 4, progress=False)
    return engine, snapshots, seen


def test_prompts_share_what_their_kind_says(requests):
    prompts = {name: prompt for name, (prompt, _) in requests.items()}
    assert list(prompts) == [f"{kind}-{i}" for i, kind in enumerate(KINDS)]
    assert all(len(prompt) == 22 for prompt in prompts.values())
    assert prompts["prefix-1"][:12] == prompts["prefix-4"][:12]
    assert len({tuple(prompt) for prompt in prompts.values()}) == len(KINDS)
    how = requests["beam4-3"][1]
    assert how.beam_width == how.n == 4 and requests["parallel3-2"][1].n == 3


def test_there_is_a_snapshot_of_each_step_and_all_is_seen(served):
    engine, snapshots, _ = served
    assert [s.step for s in snapshots] == [record.step for record in engine.metrics.steps]
    rows = list(map(memory_map.row_of, snapshots, engine.metrics.steps))
    numbers = memory_map.values(memory_map.MapFlags(), rows)
    assert all(numbers.values()), numbers  # sharing, idle blocks, swapping, copies
    assert numbers["max_owners"] == 4
    words = [word for s in snapshots for word in s.happened]
    for kind in ("arrival", "admit", "finish", "preempt", "swap out", "swap in", "copy block"):
        assert any(word.startswith(kind) for word in words), kind


def test_owners_are_the_references_and_the_rest_is_idle_or_free(served):
    engine, snapshots, seen = served
    for snapshot, (_, refcounts, num_free, hosted) in zip(snapshots, seen, strict=True):
        owners = [len(snapshot.device.get(b, [])) for b in range(len(refcounts))]
        assert owners == refcounts.tolist() == snapshot.refcounts
        assert 0 not in snapshot.device and not set(snapshot.idle) & set(snapshot.device)
        assert len(refcounts) - 1 - len(snapshot.device) == num_free
        assert len(snapshot.idle) <= num_free
        assert sorted(snapshot.host) == hosted


def test_the_page_holds_the_block_tables(served, requests):
    engine, snapshots, seen = served
    names = list(requests)
    data = memory_map.page_data(snapshots, names, PAGE, "title")
    data = json.loads(json.dumps(data))
    assert data["num_blocks"] == 48 and len(data["steps"]) == len(snapshots)
    for step, (tables, refcounts, _, _) in zip(data["steps"], seen, strict=True):
        blocks: dict[tuple, dict[int, int]] = {}
        filled: dict[tuple, int] = {}
        for block, references, colour, owners in step["device"]:
            assert references == refcounts[block] == len(owners)
            assert re.fullmatch("#[0-9a-f]{6}", data["palette"][colour])
            for request, sequence, logical, slots in owners:
                key = names[request], sequence
                blocks.setdefault(key, {})[logical] = block
                filled[key] = filled.get(key, 0) + slots
        rows = {
            key: ([held[i] for i in range(len(held))], filled[key]) for key, held in blocks.items()
        }
        assert rows == tables


def test_a_swapped_group_keeps_its_tokens_and_what_it_shares(served):
    _, snapshots, _ = served
    for before, after in itertools.pairwise(snapshots):
        if after.host and not before.host:
            gone = {o.request for owners in after.host.values() for o in owners}
            shared = [len(o) for o in before.device.values() if o[0].request in gone]
            # The group may have grown, and its sequences parted, in the step between.
            assert max(map(len, after.host.values())) == max(shared) > 1


def program(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.papers.vllm.memory_map", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_program_writes_the_map(tmp_path, tiny_folder):
    done = program(f"--model={tiny_folder}", "--executor=simulated", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "serving" in done.stderr and "swapped_out_blocks" in done.stdout
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["max_owners"] == 4 and numbers["preemptions"] > 0
    html = (tmp_path / "memory_map.html").read_text("utf-8")
    for outside in ("http:", "https:", "//cdn", "src=", "href=", "@import", "url("):
        assert outside not in html
    data = json.loads(re.search(r"const data = (.*);\n", html)[1])  # type: ignore[index]
    assert data["requests"][3] == "beam4-3" and len(data["steps"]) == numbers["steps"]
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [step["step"] for step in data["steps"]]
    for row, step in zip(rows, data["steps"]):
        held = [len(owners) for _, _, _, owners in step["device"]]
        assert int(row["free"]) == 384 - 8 * len(held)
        assert int(row["shared"]) == 8 * (sum(held) - len(held))
        used = sum(int(row[name]) for name in ("token_states", "reserved", "internal", "external"))
        assert used == 8 * len(held)
    assert (tmp_path / "memory_map.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "report.json").read_text())["flags"]["interval"] == 8
