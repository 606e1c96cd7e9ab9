"""A configuration checks the types and sizes of its fields when it is made."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from experiments.workloads.workloads import WorkloadConfig
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from tests.paged.tiny import TINY

A_FLOAT = "a finite number"
AN_INT = "a whole number"


engine: Any = EngineConfig
sampling: Any = SamplingParams
workload: Any = functools.partial(WorkloadConfig, "sharegpt")


@pytest.mark.parametrize(
    ("make", "field", "value", "allowed"),
    [
        (engine, "multi_step", 1.5, AN_INT),
        (engine, "page_size", 16.0, AN_INT),
        (engine, "page_size", np.array([16]), AN_INT),
        (engine, "kv_cache_tokens", "100", AN_INT),
        (engine, "seed", None, AN_INT),
        (engine, "max_num_seqs", True, AN_INT),
        (engine, "watermark", "0.1", A_FLOAT),
        (engine, "watermark", float("inf"), A_FLOAT),
        (engine, "run_ahead", 1, "True or False"),
        (engine, "policy", None, "a text"),
        (engine, "preemption_mode", 3, "'auto', 'recompute' or 'swap'"),
        (sampling, "early_stopping", 1, "True, False or 'never'"),
        (sampling, "early_stopping", None, "True, False or 'never'"),
        (sampling, "ignore_eos", "no", "True or False"),
        (sampling, "temperature", True, A_FLOAT),
        (sampling, "temperature", 10**400, A_FLOAT),
        pytest.param(sampling, "temperature", 10**5000, A_FLOAT, id="more than is printed"),
        (sampling, "temperature", np.array([0.5]), A_FLOAT),
        (sampling, "temperature", 1j, A_FLOAT),
        (sampling, "max_tokens", np.float64(8), AN_INT),
        (sampling, "best_of", "2", "a whole number or None"),
        (sampling, "stop", ["\ud800"], "a tuple of non-empty strings"),
        (workload, "num_requests", 2.5, AN_INT),
        (workload, "request_rate", "fast", A_FLOAT),
        (workload, "seed", None, AN_INT),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(make: Callable, field: str, value: Any, allowed: str):
    with pytest.raises(ValueError) as refused:
        make(**{field: value})
    message = str(refused.value)
    assert message.startswith(f"{field} must be {allowed}, not ")
    assert "\n" not in message and len(message) < 200
    if isinstance(value, float | str | None):
        assert message.endswith(repr(value))


def test_numpy_scalars_become_pythons_own():
    config = engine(page_size=np.int8(16), watermark=np.float32(0.5), run_ahead=np.bool_(False))
    assert config == EngineConfig(page_size=16, watermark=0.5, run_ahead=False)
    assert [type(x) for x in (config.page_size, config.watermark, config.run_ahead)] == [
        int, float, bool,
    ]  # fmt: skip
    how = sampling(temperature=np.float16(0.5), seed=np.uint64(7), ignore_eos=np.True_, stop=["x"])
    assert how == SamplingParams(temperature=0.5, seed=7, ignore_eos=True, stop=("x",))
    assert type(how.temperature) is float and type(how.seed) is int and how.ignore_eos is True


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (engine, "max_num_seqs", 10**9),
        (engine, "max_num_batched_tokens", 10**9),
        (engine, "max_prefills_per_step", 10**9),
        (engine, "multi_step", 10**9),
        pytest.param(engine, "tensor_parallel", 10**5000, id="more than is printed"),
        (engine, "kv_cache_tokens", 10**15),
        (engine, "seed", 10**30),
        (sampling, "n", 10**9),
        (sampling, "best_of", 10**9),
    ],
)
def test_an_absurd_size_is_refused(make: Callable, field: str, value: int):
    with pytest.raises(ValueError, match=f"^{field} must be .*, not "):
        make(**{field: value, "temperature": 1.0} if make is sampling else {field: value})


@pytest.mark.parametrize(
    ("values", "gibibytes"),
    [
        ({"max_model_len": 10**9}, "136.0"),
        ({"kv_cache_tokens": 2**31 - 1, "page_size": 1}, "32.0"),
        (
            {"max_num_seqs": 65_536, "max_num_batched_tokens": 65_536, "max_model_len": 2**17},
            "36.0",
        ),
    ],
)
def test_tables_that_the_host_cannot_hold_are_refused(values, gibibytes):
    with pytest.raises(ValueError, match=f"need tables of {gibibytes} GiB in the host's memory"):
        engine(**values)


def test_many_long_sequences_are_no_absurd_size():
    assert (
        engine(max_num_seqs=512, max_model_len=2**20, kv_cache_tokens=2**24).num_blocks == 2**20 + 1
    )


def test_a_context_beyond_the_models_is_refused_before_anything_is_allocated():
    config = EngineConfig(max_num_seqs=1, max_model_len=10**8)
    arrays = len(jax.live_arrays())
    # The parameters are None: any use of them before the check would raise another error.
    with pytest.raises(ValueError, match=r"max_model_len \(100000000\) exceeds .* \(256\)"):
        Engine.from_model(None, TINY, config)
    assert len(jax.live_arrays()) == arrays
