"""Engines in threads of one process, each on a device of its own.

A process fixes its number of devices at its start, so a test also runs this file as a program
with two devices.
"""

import json
import tempfile
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from paged.adapters.device import DeviceAdapters
from paged.cluster.cluster import Arrival
from paged.cluster.live import LiveCluster
from paged.cluster.threads import ThreadRunner
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor
from tests.models import peft_folders
from tests.paged.devices import printed_with_devices
from tests.paged.tiny import TINY, padded, random_params

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=16, max_prefills_per_step=2, max_model_len=96,
    page_size=4, kv_cache_tokens=144, watermark=0.03, adapter_slots=2, max_adapter_rank=16,
)  # fmt: skip


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(3)
    plain = SamplingParams(max_tokens=40, ignore_eos=True)
    kinds = [
        plain, replace(plain, temperature=0.8), replace(plain, frequency_penalty=0.7),
        replace(plain, n=2, temperature=1.0),
    ]  # fmt: skip
    return [
        (rng.integers(3, 61, rng.integers(1, 20)).tolist(), replace(kinds[i % 4], seed=i))
        for i in range(count)
    ]


@pytest.mark.slow  # two engines compile
def test_tokens_are_those_of_an_undisturbed_engine():
    """Evictions and the death of a runner change no token, with and without adapters."""
    printed = printed_with_devices("tests.paged.cluster.test_threads", 2)
    assert printed["devices"] == {f"gpu-{i}": [i] for i in range(2)}
    assert printed["brought_to"] == printed["devices"]
    assert printed["served"] == printed["undisturbed"]
    assert printed["evictions"] and printed["recoveries"]
    assert printed["deaths"] == {"gpu-1": "RuntimeError: the device is gone"}


def test_a_runner_that_says_nothing_is_dead():
    """The requests of the dead runner move to the other runner."""
    release = threading.Event()

    class Stuck(SimulatedExecutor):
        def execute(self, inputs):
            release.wait()
            return super().execute(inputs)

    def make_engine(executor: type[SimulatedExecutor]) -> Engine:
        return Engine(TINY, CONFIG, executor(vocab_size=61))

    runners = {
        "a": ThreadRunner(partial(make_engine, SimulatedExecutor)),
        "b": ThreadRunner(partial(make_engine, Stuck)),
    }
    with LiveCluster(runners, TINY, CONFIG, heartbeat_s=0.05, silence_s=0.5) as live:
        try:
            outputs = live.serve([Arrival(0.0, [5, 6], SamplingParams(max_tokens=3, seed=0))] * 4)
        finally:
            release.set()
        assert list(live.deaths) == ["b"] and "silent" in live.deaths["b"]
    assert [len(output.tokens) for output in outputs] == [3] * 4


class Chatterbox:
    """A runner that posts new events whenever its events are read, and serves no request."""

    def start(self, post, heartbeat_s: float) -> None:
        class Events(list):
            def __iter__(self):
                post(Events())
                return super().__iter__()

        post(Events())

    def add(self, request, attempt: int) -> None: ...

    def cancel(self, request_id: str, attempt: int) -> None: ...

    def close(self, wait_s: float = 60.0) -> None: ...


def test_who_posts_faster_than_it_is_heard_holds_nothing_up():
    asked = iter([False, False, True])
    arrivals = [Arrival(0.0, [5, 6], SamplingParams(max_tokens=3))]
    with LiveCluster({"a": Chatterbox()}, TINY, CONFIG) as live:
        outputs = live.serve(arrivals, stop_requested=lambda: next(asked))
    assert [output.finish_reason for output in outputs] == ["abort"]


def test_an_interrupted_start_closes_the_runners():
    """Runners that are not ready yet are closed too."""
    may_start, ended = threading.Event(), threading.Event()

    def make_engine() -> Engine:
        may_start.wait()
        return Engine(TINY, CONFIG, SimulatedExecutor(vocab_size=61))

    class Watched(ThreadRunner):
        def _run(self, post, heartbeat_s: float) -> None:
            super()._run(post, heartbeat_s)
            ended.set()

    class Interrupted(Chatterbox):
        def start(self, post, heartbeat_s: float) -> None:
            raise KeyboardInterrupt

    live = LiveCluster({"a": Watched(make_engine), "b": Interrupted()}, TINY, CONFIG)
    with pytest.raises(KeyboardInterrupt), live:
        pass
    may_start.set()
    assert ended.wait(60)


def test_no_runner_that_starts():
    def make_engine() -> Engine:
        raise OSError("no such checkpoint")

    live = LiveCluster({"gpu-0": ThreadRunner(make_engine)}, TINY, CONFIG)
    with pytest.raises(RuntimeError, match="gpu-0: OSError: no such checkpoint"), live:
        pass


def main() -> None:
    engines: dict[str, Engine] = {}
    brought_to: dict[str, set[int]] = {}  # devices of adapters
    prompts, hows = zip(*requests(24))
    root = Path(tempfile.mkdtemp())
    folders = {f"a{i}": peft_folders.write(root / f"a{i}", TINY, 9, seed=i) for i in range(3)}
    names = [[None, *folders][i % 4] for i in range(24)]

    def make_engine(uuid: str, device: jax.Device) -> Engine:
        params = jax.device_put(random_params(), device)
        engine = engines[uuid] = padded(Engine.from_model(params, TINY, CONFIG))
        engine.generate([[5] * 20])  # so that nothing compiles while it serves
        execute, left = engine.executor.execute, [60]
        assert isinstance(engine.executor.adapters, DeviceAdapters)
        bring = engine.executor.adapters._bring

        def watched(adapter):
            pages = bring(adapter)
            devices = {device for leaf in jax.tree.leaves(pages) for device in leaf.devices()}
            brought_to.setdefault(uuid, set()).update(device.id for device in devices)
            return pages

        engine.executor.adapters._bring = watched  # type: ignore[method-assign]

        def mortal(inputs):
            left[0] -= 1
            if uuid == "gpu-1" and left[0] == 0:
                raise RuntimeError("the device is gone")
            return execute(inputs)

        engine.executor.execute = mortal  # type: ignore[method-assign]
        return engine

    runners = {
        f"gpu-{i}": ThreadRunner(partial(make_engine, f"gpu-{i}", device), device)
        for i, device in enumerate(jax.devices())
    }
    with LiveCluster(runners, TINY, CONFIG, rebalance_s=0.02, silence_s=600) as live:
        for name, folder in folders.items():
            live.cluster.add_adapter(name, folder)
        outputs = live.serve([
            Arrival(0.01 * i, *asked, name)
            for i, (asked, name) in enumerate(zip(requests(24), names, strict=True))
        ])  # fmt: skip
    for name, folder in folders.items():  # gpu-0 may lack adapters that only gpu-1 served
        engines["gpu-0"].add_adapter(name, folder)
    undisturbed = engines["gpu-0"].generate(prompts, hows, names)
    pools = {uuid: jax.tree.leaves(each.executor._cache) for uuid, each in engines.items()}  # type: ignore[attr-defined]
    cluster = live.cluster
    print(json.dumps({
        "devices": {
            uuid: sorted({device.id for leaf in leaves for device in leaf.devices()})
            for uuid, leaves in pools.items()
        },
        "brought_to": {uuid: sorted(devices) for uuid, devices in brought_to.items()},
        "served": [[s.tokens for s in output.sequences] for output in outputs],
        "undisturbed": [[s.tokens for s in output.sequences] for output in undisturbed],
        "evictions": cluster.num_evictions,
        "recoveries": cluster.num_recoveries,
        "deaths": live.deaths,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
