"""Beams that follow a recorded ancestry, shared prefixes and blocks, in simulated time."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.lib.run_record import plain
from experiments.papers.vllm import (
    fig01_memory_and_throughput,
    fig14_parallel_and_beam,
    fig16_shared_prefix,
    fig17_chatbot,
    fig18b_block_size,
    opt,
    table1_kv_slots,
)
from experiments.papers.vllm.genealogies import genealogies, sharing
from experiments.papers.vllm.opt import Case
from paged.config import EngineConfig
from paged.simulator.recorded import RecordedAncestry
from paged.simulator.step_cost import StepCost

CASE = Case("13b", "alpaca", "vllm", 6.0, 0.8, 5.0)


def distinct_tokens(parents) -> list[int]:
    """Output tokens that the live beams hold after each step: what sharing depends on."""
    return sharing(0, parents).distinct.tolist()


def test_simulated_beams_have_the_recorded_ancestry(monkeypatch):
    recorded = [
        [[0, 0, 0], [2, 0, 2], [1, 1, 0], [0, 1, 2], [2, 2, 2], [0, 0, 1], [2, 1, 0], [1, 0, 0]],
        [[0, 0, 0], [0, 1, 1], [2, 0, 0], [1, 1, 2]],
    ]
    monkeypatch.setattr(opt, "ancestry", lambda width: RecordedAncestry(recorded))
    engine = opt.engine_of(replace(CASE, beam_width=3))
    how = opt.sampling_of(replace(CASE, beam_width=3))
    for i in range(2):
        engine.add_request([5] * 9, replace(how, max_tokens=9, seed=i, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    trees = genealogies(plain(engine.events))
    assert [len(tree["parents"]) for tree in trees] == [8, 8]
    for tree, whole in zip(trees, (recorded[0], recorded[1] + recorded[1][1:] * 2), strict=True):
        assert distinct_tokens(tree["parents"]) == distinct_tokens(whole[:8])
    with pytest.raises(ValueError, match="searches, each of two steps"):
        RecordedAncestry([])


def test_beams_save_more_than_samples_and_orca_shares_nothing():
    rows = {
        method: opt.run(replace(CASE, **{method: 4}))  # type: ignore[arg-type]
        for method in ("best_of", "beam_width")
    }
    assert 0.01 < rows["best_of"].saving < 0.25 < rows["beam_width"].saving < 0.75
    orca = opt.run(replace(CASE, policy="orca_oracle", beam_width=4))
    assert orca.saving == 0 and orca.requests == rows["beam_width"].requests


def test_a_shared_prefix_is_computed_and_held_once():
    case = replace(CASE, server="llama-13b", dataset="translation", prefix_tokens=341)
    shared, own = opt.run(case), opt.run(replace(case, policy="orca_oracle"))
    assert shared.saving > 0.3 and own.saving == 0
    assert shared.kv_used < 0.6 * own.kv_used and shared.latency_s < own.latency_s


def test_small_blocks_wait_and_large_ones_are_read_whole():
    """A warp that reads one token after the other cannot be as fast as the memory."""
    server = opt.SERVERS["13b"]
    contexts = np.array([[900, 30, 70], [901, 31, 71]])

    def seconds(size: int, knob: float = 1.0) -> np.ndarray:
        config = EngineConfig(
            kv_cache_tokens=server.kv_slots, max_model_len=opt.CONTEXT, page_size=size
        )
        cost = fig18b_block_size.declare(server.config, config, server.gpu, knob)
        plain = StepCost.declare(server.config, config, server.gpu)
        new = np.ones_like(contexts)
        assert (cost.attention_s(contexts, new) >= plain.attention_s(contexts, new)).all()
        prompt = np.array([700]), np.array([700])
        assert cost.attention_s(*prompt) == plain.attention_s(*prompt)
        return cost.attention_s(contexts, new)

    assert (seconds(1) > 2 * seconds(16)).all() and (seconds(1) > seconds(1, 0.5)).all()
    assert (seconds(256, 0.0) > seconds(16, 0.0)).all()


def test_chats_fill_the_prompt_and_the_table_counts():
    prompts = [len(r.prompt) for r in opt.requests_of("chatbot", 1.0, 200.0, 0.8, 0)]
    assert max(prompts) == 1024 and np.mean(prompts) > 600
    rows = list(table1_kv_slots.measure(table1_kv_slots.STUDY.at("full"), None))
    found = table1_kv_slots.values(None, rows)  # type: ignore[arg-type]
    assert table1_kv_slots.holds(found)  # type: ignore[arg-type]
    assert found["weights_gb_13b"] == pytest.approx(25.7, rel=0.01)


def test_claims_need_their_values():
    studies = (
        fig01_memory_and_throughput, fig14_parallel_and_beam, fig16_shared_prefix, fig17_chatbot,
        fig18b_block_size,
    )  # fmt: skip
    for module in studies:
        with pytest.raises(KeyError):
            module.holds({})
