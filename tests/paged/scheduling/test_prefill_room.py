"""How many tokens of a prompt a step takes, with the forks that come with the last of them."""

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
        (True, 20, 19, 2, [(5, 18)]),  # its last token waits for its forks
        (True, 20, 30, 2, [(5, 20)]),
        (False, 20, 18, 2, [(5, 18)]),
        (False, 20, 19, 2, []),  # others take the room: a prompt that goes whole waits as a whole
        (False, 32, 31, 2, [(5, 30)]),  # no step would ever have room
        (False, 20, 30, 0, []),
    ],
)
def test_what_goes_whole_waits_whole(chunked, budget, left, forks, rows):
    step = room(chunked, budget)
    step.add(5, left, forks)
    assert step.rows == rows
    assert step.refused == (not rows)
