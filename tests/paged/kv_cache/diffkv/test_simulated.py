"""Tokens that simulated DiffKV keeps, by recorded shares or by budgets, against plain counts."""

import json

import numpy as np
import pytest

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.engine import Engine
from paged.kv_cache.diffkv.options import Options
from paged.kv_cache.diffkv.recording import Recording
from paged.kv_cache.diffkv.simulated import SimulatedPages
from paged.kv_cache.policy import ShardedModel
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import LinearCost, SimulatedExecutor

# Shares of tokens that each head of two layers keeps in high and in low precision.
SHARES = np.array([[[1.0, 0.0], [0.25, 0.75]], [[0.25, 0.25], [0.0, 0.5]]])
LENGTHS = [128, 256]
WINDOW = 64
BIG = ModelConfig(num_layers=6, num_heads=6, num_kv_heads=3, max_position_embeddings=4096)


def curve() -> list:
    """All 64 tokens of the window in high precision, and shares of those before it."""
    return [(np.array([WINDOW, 0]) + SHARES * (length - WINDOW)).tolist() for length in LENGTHS]


def curves(**changed) -> list[dict]:
    both = {"alpha_h": 1.0, "alpha_l": 0.02, "prompt": curve(), "generated": curve()}
    return [both | changed]


def recorded(tmp_path, **changed) -> str:
    options = {"window": WINDOW, "prompt_rule": "paper", "generation_rule": "paper"}
    content = {"lengths": LENGTHS, "options": options, "recorded": curves()} | changed
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(content))
    return str(path)


def config_of(model: ModelConfig, **options) -> EngineConfig:
    return EngineConfig(
        policy="diffkv", policy_options=options, max_model_len=1024, page_size=16, max_num_seqs=4,
        max_num_batched_tokens=1024, chunked_prefill=False, kv_cache_tokens=8192, watermark=0.0,
    )  # fmt: skip


def simulated(model: ModelConfig, path: str = "", **options):
    config = config_of(model, **options)
    return SimulatedPages(config, ShardedModel.split(model), path)


def kept(device, slots: list[int]) -> list[list[int]]:
    return device.report()["kept"][0, slots].tolist()


def test_recorded_heads_are_dealt_out_by_depth_and_in_turn(tmp_path):
    device = simulated(BIG, recorded(tmp_path), alpha_l=0.02)
    device.compute(np.array([1]), np.array([192]), np.array([True]))
    # Nine of the 18 heads take turns in the first recorded layer, nine in the second.
    heads = [[(number // 9, number % 2) for number in range(18)]]
    of_each = [[64 + int(128 * SHARES[head][0]), int(128 * SHARES[head][1])] for head in heads[0]]
    assert kept(device, [1]) == [np.sum(of_each, axis=0).tolist()]
    held = device.kept(np.array([1]), np.array([[192], [192]]))
    assert held[..., 0, :] == pytest.approx(np.mean([of_each, of_each], axis=1))


def test_what_is_generated_grows_by_at_most_a_token_and_a_page_that_was_foretold(tmp_path):
    device, slot = simulated(BIG, recorded(tmp_path), alpha_l=0.02), np.array([0])
    device.compute(slot, np.array([100]), np.array([True]))
    before = device.report()
    for end in range(101, 900):
        device.compute(slot, np.array([end]), np.array([False]))
        now = device.report()
        assert now["held"][0, 0] <= before["held"][0, 0] + before["needs"][0, 0, 0]
        assert now["kept"].sum() <= before["kept"].sum() + 18
        before = now
    # Lengths above the longest recorded length have its shares.
    longest = [64 + 192 * SHARES[head] for head in ((0, 0), (0, 1), (1, 0), (1, 1))]
    total = [each[0] + 192 * s[1] for each, s in zip(longest, SHARES.reshape(4, 2))]
    expected = np.mean(total) / 256 * 899 * 18
    assert now["kept"].sum() == pytest.approx(expected, rel=0.05)


def test_swaps_and_copies_take_what_a_slot_holds_with_it(tmp_path):
    engine = Engine(
        BIG, config_of(BIG, alpha_l=0.02),
        SimulatedExecutor(LinearCost(), vocab_size=61, compression=recorded(tmp_path)),
    )  # fmt: skip
    how = SamplingParams(max_tokens=200, ignore_eos=True, n=2, temperature=1.0)
    outputs = engine.generate([[7] * 150] * 3, how)
    assert all(len(each.tokens) == 200 for output in outputs for each in output.sequences)
    engine.host_policy.check()
    assert not engine.host_policy.used_units()["pages"].size


@pytest.mark.parametrize(
    ("options", "prompt", "ends", "expected"),
    [
        ({"alpha_h": 0.0, "alpha_l": 0.0}, 100, 150, 150),
        ({"budget": 0.5, "prompt_rule": "h2o", "generation_rule": "h2o"}, 101, 301, 151),
        ({"budget": 40.0, "prompt_rule": "h2o", "generation_rule": "h2o"}, 101, 301, 40),
        ({"budget": 0.5, "prompt_rule": "snapkv", "generation_rule": "keep"}, 200, 250, 150),
        ({"budget": 16.0, "prompt_rule": "snapkv", "generation_rule": "keep"}, 200, 250, 114),
    ],
)
def test_budgets_and_uniform_formats_keep_what_their_rules_say(options, prompt, ends, expected):
    device, slot = simulated(BIG, **options), np.array([2])
    device.compute(slot, np.array([prompt]), np.array([True]))
    device.compute(slot, np.array([ends]), np.array([False]))
    assert kept(device, [2]) == [[18 * expected, 0]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"recorded": []}, r"alpha_h and alpha_l are \[\], not \(1.0, 0.02\)"),
        ({"options": {"window": 32}}, "window is 32, not 64"),
        ({"lengths": [64, 256]}, r"ascend from above the window \(64\)"),
        ({"lengths": [128, 130]}, "a head keeps from none to all tokens"),
        ({"recorded": curves(prompt=np.full((2, 2, 2, 2), np.nan).tolist())}, "from none to all"),
        ({"recorded": curves(prompt=np.full((2, 2, 2, 2), 65.0).tolist())}, "from none to all"),
        (
            {"recorded": curves(generated=[np.full((2, 2, 2), x).tolist() for x in (32, 128)])},
            "a head's kept tokens must grow by 0 to 1",
        ),
    ],
)
def test_what_was_not_recorded_is_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        Recording.read(recorded(tmp_path, **changed), Options(alpha_l=0.02))
