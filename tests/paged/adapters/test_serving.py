"""Adapters that are loaded while the engine serves, and loads that fail."""

import dataclasses
import gc
import re
import shutil
import threading

import pytest

from models import lora, peft
from paged import Engine, EngineConfig, SamplingParams
from paged.adapters.device import DeviceAdapters
from paged.device.executor import DeviceExecutor
from paged.requests.sequence import RequestOutput
from paged.simulator.executor import SimulatedExecutor
from tests.models import peft_folders
from tests.paged.tiny import TINY, padded, recomputed

CONFIG = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=16, max_prefills_per_step=2, max_model_len=64,
    page_size=4, kv_cache_tokens=256, prefix_caching=True, adapter_slots=1, max_adapter_rank=32,
)  # fmt: skip
HOW = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = [5, 9, 23, 42, 7, 11, 30, 8, 55]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for i, rank in enumerate((4, 32, 16)):
        peft_folders.write(root / f"a{i}", TINY, rank, seed=i)
    return root


def make(params, folders, **changes) -> Engine:
    engine = padded(Engine.from_model(params, TINY, dataclasses.replace(CONFIG, **changes)))
    for folder in sorted(folders.iterdir()):
        engine.add_adapter(folder.name, folder)
    return engine


@pytest.fixture(scope="module")
def expected(tiny_params, folders):
    """Greedy tokens after PROMPT by full recomputation, by adapter: with the adapter merged into
    the weights, and for None with the model alone."""

    def tokens(params):
        made = list(PROMPT)
        for _ in range(HOW.max_tokens):
            made.append(int(recomputed(params, made)[-1].argmax()))
        return made[len(PROMPT) :]

    merged = {
        folder.name: tokens(lora.merge(tiny_params, peft.load(folder, TINY)[0]))
        for folder in folders.iterdir()
    }
    return {None: tokens(tiny_params)} | merged


def run(engine: Engine, *names) -> list:
    outputs = engine.generate([PROMPT] * len(names), HOW, list(names))
    store = engine.loop.adapter_store
    assert store is not None
    store.check()
    return outputs


def errors(engine: Engine) -> list[str]:
    return [e["error"] for e in engine.events if e["event"] == "loaded" and e["error"]]


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(tiny_params, folders, expected):
    engine = Engine.from_model(tiny_params, TINY, CONFIG)
    engine.warm_up(progress=False)
    for name in ("a0", "a1", "a2"):
        engine.add_adapter(name, str(folders / name))
    outputs = run(engine, "a0", None, "a1", "a2", "a0")
    assert [o.tokens for o in outputs] == [expected[n] for n in ("a0", None, "a1", "a2", "a0")]
    assert engine.metrics.compilations_after_warmup == 0


@pytest.mark.slow
def test_a_slow_load_holds_nobody_else_up_and_may_be_aborted(tiny_params, folders, expected):
    engine = make(tiny_params, folders)
    loads, may_read = engine.executor.adapters, threading.Event()
    assert isinstance(loads, DeviceAdapters)
    read = loads._read
    loads._read = lambda adapter: (may_read.wait(900), read(adapter))[1]  # type: ignore
    waits = engine.add_request(PROMPT, HOW, adapter="a0")
    for _ in range(9):  # `step` returns at once, so that the caller can do other work
        assert engine.step() == []
    assert engine.loop.round == 1, "rounds that wait in vain are the clock's"
    other = engine.add_request(PROMPT, HOW)
    ended: list[RequestOutput] = []
    while not ended:
        ended += engine.step()
    assert [(o.request_id, o.tokens) for o in ended] == [(other, expected[None])]
    aborted = engine.abort(waits)
    assert (aborted.finish_reason, aborted.tokens) == ("abort", [])
    may_read.set()
    assert run(engine, "a1")[0].tokens == expected["a1"]
    names = [e["adapter"] for e in engine.events if e["event"] == "loaded"]
    assert names == ["a0", "a1"]


def test_a_failed_load_ends_its_requests_alone(tiny_params, folders, expected, tmp_path):
    shutil.copytree(folders, tmp_path / "adapters")
    engine = make(tiny_params, tmp_path / "adapters")
    shutil.rmtree(tmp_path / "adapters" / "a1")
    peft_folders.write(tmp_path / "adapters" / "a2", TINY, 16, seed=9)
    outputs = run(engine, "a1", "a0", "a2", "a1", None)
    reasons = [output.finish_reason for output in outputs]
    assert reasons == ["error", "length", "error", "error", "length"]
    assert [outputs[1].tokens, outputs[4].tokens] == [expected["a0"], expected[None]]
    assert re.search("there is no folder", errors(engine)[0])
    assert any("a2 has changed since the adapter was added" in e for e in errors(engine))
    with pytest.raises(ValueError, match="its adapter cannot be loaded"):
        engine.pin_prefix(PROMPT, adapter="a1")
    # A changed adapter can be added again; later requests get its new content.
    engine.add_adapter("a2", tmp_path / "adapters" / "a2")
    output = run(engine, "a2")[0]
    assert output.finish_reason == "length"
    assert output.tokens != expected["a2"]


def test_a_failed_load_holds_nothing_of_what_was_read(tiny_params, folders, tmp_path):
    def held() -> int:
        gc.collect()
        return sum(type(each) is lora.Lora for each in gc.get_objects())

    before = held()
    shutil.copytree(folders, tmp_path / "adapters")
    engine = make(tiny_params, tmp_path / "adapters")
    peft_folders.write(tmp_path / "adapters" / "a1", TINY, 32, seed=9)
    assert run(engine, "a1")[0].finish_reason == "error"
    assert held() == before


@pytest.mark.slow
def test_an_adapter_that_has_moved_is_read_where_it_was_added_last(
    tiny_params, folders, expected, tmp_path
):
    shutil.copytree(folders, tmp_path / "adapters")
    engine = make(tiny_params, tmp_path / "adapters")
    (tmp_path / "adapters").rename(tmp_path / "moved")
    engine.add_adapter("a1", tmp_path / "moved" / "a1")
    outputs = run(engine, "a1", "a0")
    assert outputs[0].tokens == expected["a1"]
    assert outputs[1].finish_reason == "error"


@pytest.mark.parametrize(("host_bytes", "reason"), [(2**30, "length"), (0, "error")])
def test_the_host_keeps_what_the_disk_has_lost(
    tiny_params, folders, expected, tmp_path, host_bytes, reason
):
    shutil.copytree(folders, tmp_path / "adapters")
    engine = make(tiny_params, tmp_path / "adapters", adapter_host_bytes=host_bytes)
    run(engine, "a0", "a1")
    shutil.rmtree(tmp_path / "adapters" / "a0")
    output = run(engine, "a0")[0]
    assert output.finish_reason == reason
    assert output.tokens == (expected["a0"] if reason == "length" else [])


def test_prefixes_are_shared_within_an_adapter_alone(tiny_params, folders, expected):
    engine = make(tiny_params, folders)
    assert engine.pin_prefix(PROMPT, adapter="a0") == len(PROMPT)
    names = [None, "a0", "a1", "a0"]
    outputs = [run(engine, name)[0] for name in names]
    assert [o.tokens for o in outputs] == [expected[name] for name in names]
    cached = [record.cached_tokens for record in engine.metrics.requests[1:]]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] == len(PROMPT) - 1


def test_an_interrupted_install_leaves_an_engine_that_serves(
    tiny_params, folders, expected, monkeypatch
):
    engine = make(tiny_params, folders)
    assert run(engine, "a1")[0].tokens == expected["a1"]
    original = DeviceAdapters._set

    def interrupted(self, number, content):
        original(self, number, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeviceAdapters, "_set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, "a0")
    outputs = run(engine, "a0", "a1", None)
    assert [o.tokens for o in outputs] == [expected[name] for name in ("a0", "a1", None)]


def test_a_stream_names_an_adapter_which_stays_through_warm_up(tiny_params, folders, expected):
    engine = make(tiny_params, folders)
    assert [*engine.stream(PROMPT, HOW, adapter="a2")][-1].tokens == expected["a2"]
    assert isinstance(engine.executor, DeviceExecutor)
    assert engine.executor.adapters is not None
    engine.executor.adapters.warm_up()
    assert run(engine, "a2")[0].tokens == expected["a2"]
    assert sum(event["event"] == "load" for event in engine.events) == 1


def test_bad_adapters_are_refused_and_queue_nothing(tiny_params, folders, tmp_path):
    engine = make(tiny_params, folders)
    wide = peft_folders.write(tmp_path / "wide", TINY, 33)
    for call, error in [
        (lambda: engine.add_adapter("wide", wide), "rank 33 is not from 1 to max_adap"),
        (lambda: engine.add_adapter("", wide), "name must be a text that is not empty, not ''"),
        (lambda: engine.add_adapter("gone", tmp_path / "gone"), "there is no folder"),
        (lambda: engine.add_adapter("long", "x" * 5_000), "File name too long"),
        (lambda: engine.add_adapter("none", None), "must be a path, not None"),  # type: ignore
        (lambda: engine.add_request([5], adapter="b"), "'b' is not known; known are: 'a0', 'a1', "),
        (lambda: engine.stream([5], adapter=3), "adapter 3 is not known"),  # type: ignore
        (lambda: engine.generate([[5]], adapters=["a0", None]), "1 prompts with 2 adapters"),
        (lambda: engine.generate([[5]], adapters="a"), "adapters must be a list, tuple or other"),
        (lambda: engine.pin_prefix([5], adapter="b"), "'b' is not known"),
    ]:
        with pytest.raises(ValueError, match=error):
            call()
    assert not engine.has_unfinished()
    assert engine.adapters.names == ["a0", "a1", "a2"]
    plain = Engine.from_model(tiny_params, TINY, dataclasses.replace(CONFIG, adapter_slots=0))
    with pytest.raises(ValueError, match="adapters need adapter_slots, which is 0"):
        plain.add_adapter("a0", folders / "a0")


def test_an_adapter_beyond_the_engines_dtype_is_refused_as_it_is_added(tmp_path):
    large = peft_folders.write(tmp_path, TINY, lora_alpha=1e6, size=10)
    for dtype in ("bfloat16", "float16"):
        engine = Engine(TINY, CONFIG, SimulatedExecutor(vocab_size=TINY.vocab_size, dtype=dtype))
        if dtype == "bfloat16":
            engine.add_adapter("large", large)
        else:
            with pytest.raises(ValueError, match=r"safetensors: .* beyond float16"):
                engine.add_adapter("large", large)
            assert engine.adapters.names == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"adapter_slots": -1}, "adapter_slots must be from 0 to 4096, not -1"),
        ({"max_adapter_rank": 0}, "max_adapter_rank must be from 1 to 1024, not 0"),
        ({"adapter_pages": 1}, r"adapter_pages \(1\) of 16 ranks must hold .*rank \(32\)"),
        ({"adapter_slots": 0, "adapter_pages": 4}, r"adapter_pages \(4\) need adapter_slots"),
        ({"max_overtakes": -1}, "max_overtakes must be at least 0"),
        ({"adapter_host_bytes": -1}, "adapter_host_bytes must be"),
    ],
)
def test_configurations_that_cannot_work_are_refused(changes, error):
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(CONFIG, **changes)
