"""Many adapters over few slots: what is counted, that bounds hold, and that runs replay."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.lib import adapters
from experiments.papers.punica import adapter_slots, adapter_slots_cpu
from experiments.papers.punica.adapter_slots import SimulatedFlags
from tests.experiments.conftest import TINY


def test_overtaking_is_bounded_and_pays():
    flags = SimulatedFlags(adapters=60, requests=35, rate=100.0, load_ms=100.0, seed=1)
    config = replace(adapter_slots.CONFIG, adapter_slots=4, max_model_len=180)
    bounds = (0, 8, adapter_slots.UNBOUNDED)
    # `with_bound` asserts its bound, and replays the run.
    runs = [adapter_slots.with_bound(flags, TINY, config, bound) for bound in bounds]
    none, eight, unbounded = runs
    assert none.most_overtaken == 0 and eight.most_overtaken == 8
    assert unbounded.most_overtaken > 8
    assert unbounded.ttft_mean_s < 0.8 * none.ttft_mean_s
    assert all(0 < run.hidden < 1 and 0 < run.hit_rate < 1 for run in runs)


def test_a_run_that_overtakes_too_often_is_a_fault():
    requests = adapter_slots.make_requests(30, 70.0, ["a", "b", "c"], 1.0, TINY.vocab_size, 0)
    config = replace(adapter_slots.CONFIG, adapter_slots=1, max_model_len=180)
    engine = adapter_slots.simulate(TINY, config, requests, ["a", "b", "c"], 0.1)
    object.__setattr__(engine.config, "max_overtakes", 1)
    with pytest.raises(AssertionError, match=r"overtaken \d+ times, not 1 at most"):
        adapter_slots.row_of(engine)


def test_what_is_counted_of_loads():
    """The loads last from 1 to 5 s and from 4 to 6 s, the steps from 2 to 3 s and from 4.5 to 6 s:
    steps hide 1.5 of 4 s and 1.5 of 2 s. Requests y and z overtake x."""

    def event(kind: str, time_s: float, **fields):
        return {"event": kind, "time_s": time_s, **fields}

    of_a, of_b = ({"adapter": name, "content_hash": name} for name in "ab")
    counted = adapters.measure([
        event("arrival", 0, request_id="x", adapter="a"),
        event("arrival", 0, request_id="y", adapter="b"),
        event("arrival", 0, request_id="z", adapter=None),
        event("load", 1, **of_a), event("step", 3, device_s=1), event("load", 4, **of_b),
        event("admit", 4, request_id="z"), event("loaded", 5, **of_a), event("loaded", 6, **of_b),
        event("step", 6, device_s=1.5), event("admit", 6, request_id="y"),
        event("admit", 6, request_id="x"),
    ])  # fmt: skip
    assert counted is not None
    assert counted["load_s"] == 3 and counted["hidden"] == (1.5 + 1.5) / 6
    assert counted["most_overtaken"] == 2 and counted["hit_rate"] == 0


def test_the_popularity_is_zipfs():
    drawn = adapter_slots.zipf(50_000, 200, 1.3, np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=200)
    assert 2.2 < counts[0] / counts[1] < 2.7 and counts[150:].sum() > 0


@pytest.mark.slow
def test_adapters_are_loaded_while_the_bundled_model_serves():
    flags = adapter_slots_cpu.CpuFlags(adapters=5, adapter_slots=2, requests=8)
    row = adapter_slots_cpu.serve_all(flags)  # it replays the run
    assert row.requests == 8 and row.loads > 0 and row.most_overtaken <= 32
