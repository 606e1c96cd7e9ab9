"""What Fig. 1 is drawn from: steps of whole batches, and their floors; no times."""

import pytest

from experiments.papers.punica import fig01_batching_effect as batching_effect
from experiments.papers.punica.fig01_batching_effect import BatchFlags, Row
from models import checkpoint
from pallas_kernels.specs import Rates


@pytest.mark.slow
def test_each_batch_is_prefilled_in_one_step_and_decodes_together(tiny_folder, tmp_path):
    model, params = checkpoint.load(tiny_folder)
    rows = list(
        batching_effect.run(
            params, model, [1, 2], [8], output_tokens=4, rounds=1, seed=0, rates=Rates(1e9, 1e9)
        )
    )
    found = {(row.stage, row.length, row.batch) for row in rows}
    assert found == {(stage, 8, batch) for stage in batching_effect.STAGES for batch in (1, 2)}
    assert all(row.ms > 0 for row in rows)
    # Prefill's floor is in its tokens, decoding's in the weights, which a batch shares.
    floors = {(row.stage, row.batch): row.floor_ms for row in rows}
    assert floors["prefill", 2] == pytest.approx(2 * floors["prefill", 1])
    assert floors["decode", 2] < 1.2 * floors["decode", 1]
    study = batching_effect.STUDY
    study._plot(BatchFlags(), rows, tmp_path / "figure.png", study.report(BatchFlags(), rows))
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_growth_is_from_the_smallest_batch_to_the_largest():
    rows = [
        Row(stage, length, batch, ms * length, 1.0)
        for stage, times in (("prefill", (3.0, 6.0, 12.0)), ("decode", (2.0, 2.5, 3.0)))
        for length in (16, 64)
        for batch, ms in zip((1, 2, 4), times)
    ]
    numbers = batching_effect.values(BatchFlags(), rows[::-1])
    assert numbers["prefill_growth_64"] == 4 and numbers["decode_growth_16"] == 1.5
    assert numbers["decode_ms_64_b2"] == 160
    assert batching_effect.STUDY.report(BatchFlags(), rows)["holds"] is False


@pytest.mark.parametrize(
    "flags, message",
    [({"batches": (0,)}, "--batches must be whole"), ({"lengths": (10**6,)}, "--lengths exceed")],
)
def test_bad_flags_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        batching_effect.check(BatchFlags(**flags))
