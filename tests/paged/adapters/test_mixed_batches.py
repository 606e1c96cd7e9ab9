"""Requests with many adapters in one engine, against each request alone on merged weights.

A process counts its devices only once, so this file also runs as a program with two devices, which
prints the values that the tests check.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import lora, peft
from models.params import stack
from paged import Engine, EngineConfig, SamplingParams
from paged.device.executor import DeviceExecutor
from tests.models import peft_folders
from tests.paged.devices import printed_with_devices
from tests.paged.tiny import TINY, padded, random_params

pytestmark = pytest.mark.slow  # engines compile, one for two devices

RANKS = (1, 8, 16, 64, 3, 32, 17, 8, 40)
NAMES = [None, *(f"a{i}" for i in range(len(RANKS)))]
ALONE = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=32, max_prefills_per_step=2, max_model_len=80,
    page_size=4, kv_cache_tokens=400,
)  # fmt: skip
MIXED = dataclasses.replace(
    ALONE, max_num_seqs=8, max_prefills_per_step=4, kv_cache_tokens=168, watermark=0.0,
    prefix_caching=True, multi_step=4, adapter_slots=4, adapter_pages=9, max_overtakes=3,
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "one device": {},
    "two devices, recomputing": {
        "tensor_parallel": 2, "preemption_mode": "recompute", "run_ahead": False,
    },
}  # fmt: skip


def requests() -> tuple[list[list[int]], list[SamplingParams], list[str | None]]:
    rng = np.random.default_rng(1)
    shared = rng.integers(3, TINY.vocab_size, 12).tolist()
    prompts, hows = [], []
    for i in range(30):
        prompts.append(shared + rng.integers(3, TINY.vocab_size, rng.integers(1, 20)).tolist())
        kind: dict = {}
        if i % 7 == 0:
            kind = {"beam_width": 3, "n": 3}
        elif i % 5 == 1:
            kind = {"n": 3, "temperature": 1.0, "seed": i}
        hows.append(SamplingParams(max_tokens=14, ignore_eos=True, **kind))
    return prompts, hows, [NAMES[i % len(NAMES)] for i in range(30)]


def tokens_of(outputs) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in output.sequences] for output in outputs]


def write_adapters(folder: Path) -> None:
    """Every third adapter adapts only some projections of attention, the others all projections."""
    for i, rank in enumerate(RANKS):
        targets = None if i % 3 else ["q_proj", "v_proj", "o_proj"]
        peft_folders.write(folder / f"a{i}", TINY, rank, seed=i, size=0.7, targets=targets)


def mixed(params, folder: Path, changes: dict) -> dict:
    engine = padded(Engine.from_model(params, TINY, dataclasses.replace(MIXED, **changes)))
    for name in filter(None, NAMES):
        engine.add_adapter(name, folder / name)
    outputs = engine.generate(*requests())
    assert engine.loop.adapter_store is not None
    engine.loop.adapter_store.check()
    loads = [event for event in engine.events if event["event"] == "load"]
    return {
        "tokens": tokens_of(outputs),
        "preemptions": sum(r.preemptions for r in engine.metrics.requests),
        "cached_tokens": sum(r.cached_tokens for r in engine.metrics.requests),
        "evictions": sum(len(event["evicted"]) for event in loads),
    }


def alone(params, folder: Path) -> list:
    prompts, hows, names = requests()
    outputs: list = [None] * len(prompts)
    engine = padded(Engine.from_model(params, TINY, ALONE))
    assert isinstance(engine.executor, DeviceExecutor)
    for name in NAMES:
        merged = params
        if name is not None:
            merged = lora.merge(params, peft.load(folder / name, TINY)[0])
        engine.executor.params = stack(merged)  # compiled programs take the weights as an argument
        for i in np.flatnonzero([of == name for of in names]):
            outputs[i] = engine.generate([prompts[i]], hows[i])[0]
    return tokens_of(outputs)


def main() -> None:
    params = random_params()
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder))
        served = {way: mixed(params, Path(folder), changes) for way, changes in WAYS.items()}
        print(json.dumps(served | {"alone": alone(params, Path(folder))}))


@pytest.fixture(scope="module")
def served():
    return printed_with_devices("tests.paged.adapters.test_mixed_batches", 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_mixed_batch_gives_what_merged_weights_give_alone(served, way):
    assert served[way]["tokens"] == served["alone"]


def test_the_adapters_change_what_is_generated(served):
    """Without a change of tokens, the test above would prove nothing."""
    names = requests()[2]
    first = {name: served["alone"][names.index(name)][0] for name in NAMES}
    assert len({str(tokens) for tokens in first.values()}) > len(NAMES) // 2


def test_the_mixed_batches_had_all_that_could_go_wrong(served):
    for way in WAYS:
        assert served[way]["cached_tokens"] > 0
        assert served[way]["evictions"] >= len(RANKS) - 4
        assert served[way]["preemptions"] > 0


if __name__ == "__main__":
    main()
