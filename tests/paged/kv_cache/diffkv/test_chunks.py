"""Chunked prompts keep the same tokens as whole prompts, bit for bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from experiments.lib.presets import PRESETS, TINY
from paged.engine import EngineConfig
from paged.scheduling.admission import PrefillRoom
from tests.paged.kv_cache.attention_driver import Chunks, Driver, random_qkv
from tests.sweeps import swept

TILE = 8
LENGTHS, PROMPTS = (45, 34), [41, 30]
WHOLE: list[Chunks] = [[(0, 41), (1, 30)]]
# The first prompt ends in the step in which the second begins.
IN_CHUNKS: list[Chunks] = [[(0, 16)], [(0, 16)], [(0, 9), (1, 16)], [(1, 14)]]
TOKENS: list[Chunks] = [[(0, 1), (1, 1)]] * 4


def run(name: str, steps: list[Chunks], num_tokens: int) -> tuple[list, list[np.ndarray]]:
    """(tokens that heads keep after each decode step, attention of each sequence)."""
    preset = PRESETS[name]
    preset = replace(preset, options=preset.options | {"prompt_tile": TILE})
    config = preset.engine_config(
        TINY, max_num_seqs=2, kv_cache_tokens=600, max_num_batched_tokens=num_tokens + 2,
        chunked_prefill=num_tokens < sum(PROMPTS),
    )  # fmt: skip
    driver = Driver(TINY, config, random_qkv(TINY, LENGTHS, (2, 2, 2)), PROMPTS)
    device: Any = driver.device
    kept = []

    def look() -> None:
        (state,) = device.snapshot(driver.cache)
        kept.append([[[(s.positions, s.scores) for s in h] for h in x] for x in state.heads])

    outs = driver.run(steps + TOKENS, num_tokens, 2, look)
    return kept[len(steps) :], outs


DIFFKV = [name for name, preset in PRESETS.items() if preset.policy == "diffkv"]


@pytest.mark.slow
@pytest.mark.parametrize("name", swept(DIFFKV, 1))
def test_chunks_leave_what_whole_prompts_leave(name):
    whole, chunks = run(name, WHOLE, 72), run(name, IN_CHUNKS, 32)
    assert chunks[0] == whole[0]
    for ours, theirs in zip(chunks[1], whole[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("budget", "start", "left", "in_chunks", "rows", "after"),
    [
        (20, 0, 30, False, [(5, 16)], True),
        (20, 16, 20, True, [(5, 20)], False),
        (20, 0, 17, True, [(5, 17)], True),  # the prompt runs whole beside another's chunks
        (20, 0, 30, True, [], True),  # another's chunks use the stage
        (16, 0, 17, False, [(5, 8)], True),  # 16 tokens would leave the last one alone
        (7, 0, 30, False, [], False),
    ],
)
def test_chunks_are_whole_tiles_of_one_prompt(budget, start, left, in_chunks, rows, after):
    config = config_of(max_num_batched_tokens=32)
    room = PrefillRoom(config, budget, in_chunks)
    room.add(5, left, 0, start)
    assert (room.rows, room.in_chunks, room.refused) == (rows, after, not rows)


def config_of(**changes: Any) -> EngineConfig:
    options = {"prompt_tile": TILE}
    given: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_model_len": 64,
        "page_size": 4,
        "policy_options": options,
    }
    return EngineConfig(**(given | {"policy": "diffkv"} | changes))


def test_steps_hold_a_tile_or_the_longest_prompt():
    assert config_of().chunked_prefill
    assert config_of(max_num_batched_tokens=12).chunked_prefill
    with pytest.raises(ValueError, match=r"a prefill tile of policy 'diffkv' \(9 tokens\) beside"):
        config_of(max_num_batched_tokens=11)
    wide = {"policy_options": {"prompt_tile": 64}}
    assert not config_of(max_num_batched_tokens=64, **wide).chunked_prefill
