"""The number of prompt tokens that a step takes; forks come with the last token."""

import pytest

from paged.engine import EngineConfig
from paged.scheduling.admission import PrefillRoom


def room(chunked: bool, budget: int) -> PrefillRoom:
    config = EngineConfig(
        chunked_prefill=chunked, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32
    )
    return PrefillRoom(config, budget)


@pytest.mark.parametrize(
    ("chunked", "budget", "left", "forks", "rows"),
    [
        (True, 20, 18, 2, [(5, 18)]),
        (True, 20, 19, 2, [(5, 18)]),  # the last token waits for room for its forks
        (True, 20, 30, 2, [(5, 20)]),
        (False, 20, 18, 2, [(5, 18)]),
        (False, 20, 19, 2, []),  # no room beside other rows: an unchunked prompt waits whole
        (False, 32, 31, 2, [(5, 30)]),  # no step has room for prompt and forks
        (False, 20, 30, 0, []),
    ],
)
def test_what_goes_whole_waits_whole(chunked, budget, left, forks, rows):
    step = room(chunked, budget)
    step.add(5, left, forks)
    assert step.rows == rows
    assert step.refused == (not rows)


@pytest.mark.parametrize(
    ("budget", "start", "left", "forks", "rows"),
    [
        (40, 0, 50, 0, [(5, 36)]),  # the last page ends at 52, and tiles of 16 before it at 36
        (40, 20, 30, 2, [(5, 30)]),
        (30, 20, 30, 2, [(5, 16)]),  # the last tile waits for its forks
        (15, 20, 30, 0, []),  # a tile is never cut
        (15, 36, 14, 0, [(5, 14)]),
        (3, 0, 50, 0, []),
        (4, 0, 50, 0, [(5, 4)]),  # the first tile is what remains beside whole tiles
        (20, 0, 39, 0, [(5, 20)]),  # too short for tiles
    ],
)
def test_tiles_of_a_prompt_are_not_cut(budget, start, left, forks, rows):
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, page_size=4, policy="lserve",
        policy_options={
            "logical_page": 4, "sink": 4, "local": 4, "minference_from": 40,
            "minference_budget": 12, "minference_tile": 16,
        },
    )  # fmt: skip
    step = PrefillRoom(config, budget)
    step.add(5, left, forks, start)
    assert step.rows == rows
    assert step.refused == (not rows)
