"""Parts of a decode step: each can be timed alone, and they add up to the step."""

import pytest

from experiments.bench import step_profile
from experiments.bench.step_profile import PARTS, ProfileFlags


@pytest.mark.slow
def test_parts_and_floors_of_the_bundled_models_step():
    flags = ProfileFlags(models=("bundled",), batch=4, contexts=(20, 40), rounds=2)
    rows = step_profile.profile(flags, "bundled")
    assert [row.part for row in rows] == list(PARTS)
    numbers = step_profile.values(flags, rows)
    assert numbers["step_ms_bundled"] == pytest.approx(sum(row.ms for row in rows))
    assert all(row.floor_ms >= 0 for row in rows)


@pytest.mark.parametrize("contexts", [(64,), (160, 64), (64, 4096)])
def test_contexts_that_no_step_has_are_refused(contexts):
    with pytest.raises(ValueError, match="--contexts must be the shortest and the longest"):
        ProfileFlags(contexts=contexts)
