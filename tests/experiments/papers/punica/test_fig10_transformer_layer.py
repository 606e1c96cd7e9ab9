"""The layer of Fig. 10: popularities give what their adapters give; no times."""

import jax
import numpy as np
import pytest

from experiments.papers.punica import fig10_transformer_layer as transformer_layer
from experiments.papers.punica.fig10_transformer_layer import (
    BASE,
    LayerFlags,
    config_of,
    one_layer,
)
from models import params as parameters
from models.families import family
from paged.adapters.pool import AdapterPool
from pallas_kernels.lora.specs import POPULARITIES
from pallas_kernels.specs import Rates
from tests.experiments.conftest import TINY

MODEL = one_layer(TINY)


@pytest.mark.slow
def test_rows_of_a_batch_have_the_adapters_of_their_popularity():
    config = config_of(4, 20, rank=8)
    pool = AdapterPool.declare(config, None)
    assert pool is not None
    params = parameters.init(family(MODEL).declare(MODEL), jax.random.key(0))
    adapters = transformer_layer.draw_adapters(MODEL, pool, seed=1)
    runs = transformer_layer.programs(params, adapters, MODEL, config, 20, POPULARITIES)
    hidden = {name: np.asarray(run()) for name, run in runs.items()}
    # All rows have the same token and history, so they differ by their adapters alone.
    different = {name: len(np.unique(rows.round(4), axis=0)) for name, rows in hidden.items()}
    assert different == {BASE: 1, "distinct": 4, "uniform": 2, "skewed": 3, "identical": 1}
    assert not np.allclose(hidden[BASE][0], hidden["identical"][0], atol=1e-3)
    np.testing.assert_allclose(hidden["identical"][0], hidden["distinct"][0], atol=1e-5)


@pytest.mark.slow
def test_a_run_covers_all_cases_and_floors_count_each_adapter_once(tmp_path):
    rows = list(
        transformer_layer.run(
            MODEL, [1, 2], [20], 8, ("distinct", "identical"), rounds=1, seed=0,
            rates=Rates(1e9, 1e30),
        )
    )  # fmt: skip
    assert len(rows) == 2 * 3 and all(row.ms > 0 for row in rows)
    numbers = transformer_layer.values(LayerFlags(), rows)
    at = [row for row in rows if row.popularity == "distinct"]
    assert [row.adapters for row in at] == [1, 2]
    assert numbers["growth_distinct_20"] == pytest.approx(at[1].ms / at[0].ms)
    floor = {row.popularity: row.floor_ms for row in rows if row.batch == 2}
    added = floor["identical"] - floor[BASE]
    assert floor["distinct"] - floor[BASE] == pytest.approx(2 * added) and added > 0
    study = transformer_layer.STUDY
    report = study.report(LayerFlags(), rows)
    assert report["holds"] is None, "nothing was measured at 512 tokens"
    study._plot(LayerFlags(), rows, tmp_path / "figure.png", report)
    assert (tmp_path / "figure.png").stat().st_size > 0
