"""Ctrl-C anywhere in the engine neither loses nor doubles a request, and the engine goes on."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from experiments.lib.event_log import EventLog
from experiments.lib.run_record import plain
from paged.engine import Engine, EngineConfig, OutputStream
from paged.kv_cache.vllm import VLLMHost
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from tests.paged.hashing_executor import HashingExecutor, TwinLoads
from tests.paged.interrupts import Points, interrupted_at
from tests.paged.tiny import TINY, drained
from tests.paged.twin_cases import expected_outputs, tokens

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=24, max_prefills_per_step=2, max_model_len=64,
    page_size=4, kv_cache_tokens=180, prefix_caching=True, watermark=0.0,
)  # fmt: skip
EOS_RATE = 0.03
HOWS = [
    SamplingParams(),
    SamplingParams(ignore_eos=True, repetition_penalty=2),
    SamplingParams(stop_token_ids=(5, 6, 30)),
    SamplingParams(temperature=1, n=3),
    SamplingParams(temperature=1, n=2, ignore_eos=True),
    SamplingParams(temperature=1, n=1, best_of=3, stop_token_ids=(5, 6, 30)),
    SamplingParams(beam_width=2, n=2, early_stopping=True),
    SamplingParams(beam_width=3, n=1, length_penalty=2.0),
    SamplingParams(beam_width=3, n=3, length_penalty=0.0, early_stopping="never"),
]
Asked = tuple[list[int], SamplingParams, Adapter | None]


class User:
    """Makes random calls of an engine, records their outputs, and goes on after interruptions."""

    def __init__(self, seed: int, config: EngineConfig, points: Points):
        self.call = points.call
        self.rng = random.Random(seed)
        executor = HashingExecutor(config, EOS_RATE)
        if config.adapter_slots:
            executor.adapters = TwinLoads(executor, seed=seed)
        self.engine = Engine(TINY, config, executor)
        if config.adapter_slots:
            for i, rank in enumerate((8, 16, 40, 64)):
                self.engine.add_known_adapter(Adapter(f"a{i}", "", "", rank))
        self.shared = tokens(0, 20)
        self.accepted: dict[str, Asked] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.finals: Counter[str] = Counter()  # number of last outputs by id
        self.streams: list[tuple[OutputStream, Asked]] = []
        self.interruptions = 0

    def _request(self) -> Asked:
        own = tokens(self.rng.randrange(50), 3)
        how, most = self.rng.choice(HOWS), self.rng.choice([1, self.rng.randint(1, 12), 12])
        how = replace(how, max_tokens=most, seed=self.rng.randrange(100))
        known = self.engine.adapters
        adapter = known.named(self.rng.choice([None, *known.names]))
        return self.shared[: self.rng.choice([0, 8, 20])] + own, how, adapter

    def act(self) -> None:
        operations = [
            self.add, self.add, self.abort, self.open_stream, self.pull, self.pull,
            self.close_stream, self.drop_stream, self.generate, self.pin, self.refuse, self.replace,
            *[self.step] * 6,
        ]  # fmt: skip
        try:
            self.rng.choice(operations)()
        except KeyboardInterrupt:
            self.interruptions += 1

    def add(self) -> None:
        prompt, how, adapter = self._request()
        name = self.rng.choice([None, f"mine-{len(self.accepted)}", f"request-{len(self.ended)}"])
        with suppress(ValueError):  # the id may be in use
            name = self.call(
                self.engine.add_request, prompt, how, name, stream=self.rng.random() < 0.3,
                adapter=name_of(adapter),
            )  # fmt: skip
            assert name not in self.accepted or name in self.ended
            self.ended.pop(name, None)
            self.accepted[name] = prompt, how, adapter

    def abort(self) -> None:
        running = [name for name in self.accepted if name not in self.ended]
        with suppress(ValueError):  # the request may have ended
            self.take(self.call(self.engine.abort, self.rng.choice(running or ["nobody"])))

    def open_stream(self) -> None:
        prompt, how, adapter = self._request()
        stream = self.call(self.engine.stream, prompt, how, name_of(adapter))
        self.streams.append((stream, (prompt, how, adapter)))

    def pull(self) -> None:
        if self.streams:
            entry = self.rng.choice(self.streams)
            output = self.call(next, entry[0])
            if output.finished:
                self.streams.remove(entry)
                check(output, *entry[1])

    def close_stream(self) -> None:
        if self.streams:
            self.call(self.streams[-1][0].close)
            self.streams.pop()

    def drop_stream(self) -> None:
        if self.streams:
            self.call(self.streams.pop)

    def generate(self) -> None:
        asked = [self._request() for _ in range(2)]
        prompts, hows, adapters = map(list, zip(*asked))
        names = [name_of(adapter) for adapter in adapters]
        outputs = self.call(self.engine.generate, prompts, hows, names)
        for output, one in zip(outputs, asked, strict=True):
            assert output.finish_reason not in ("abort", "error")
            check(output, *one)

    def pin(self) -> None:
        with suppress(ValueError):  # requests may be unfinished
            self.call(self.engine.pin_prefix, self.shared)

    def refuse(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            self.call(self.engine.add_request, [])

    def replace(self) -> None:
        if names := self.engine.adapters.names:
            content, rank = str(self.rng.randrange(9)), self.rng.choice([8, 17])
            adapter = Adapter(self.rng.choice(names), "", content, rank)
            self.call(self.engine.add_known_adapter, adapter)

    def step(self) -> None:
        for output in self.call(self.engine.step):
            self.take(output)

    def take(self, output: RequestOutput) -> None:
        name = output.request_id
        assert name in self.accepted and name not in self.ended, "an output of nothing"
        if output.finished:
            self.ended[name] = output
            self.finals[name] += 1
            check(output, *self.accepted[name])

    def drain(self) -> None:
        """Run the engine to its end without interrupts, and check that it holds nothing."""
        for stream, asked in self.streams:
            *_, last = stream
            assert last.finished
            check(last, *asked)
        self.streams.clear()
        for _ in range(2000):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished() and self.engine.step() == []
        assert self.ended.keys() == self.accepted.keys()
        records = Counter(record.request_id for record in self.engine.metrics.requests)
        assert (
            self.finals
            <= records
            <= Counter(
                event["request_id"] for event in self.engine.events if event["event"] == "arrival"
            )
        )
        self._check_that_nothing_is_held()
        prompt, how = [*self.shared, 7], SamplingParams(max_tokens=9, seed=3)
        check(self.engine.generate([prompt], how)[0], prompt, how)
        assert self.engine.pin_prefix(self.shared) == 20

    def _check_that_nothing_is_held(self) -> None:
        engine = self.engine
        slots, events = engine.scheduler.slots, engine.events
        policy = VLLMHost.of(engine.host_policy)
        kinds = [e["event"] for e in events if e["event"] in ("pin", "failure")]
        pinned = kinds[-1:] == ["pin"]
        assert policy.pool.num_used == (20 // engine.config.page_size if pinned else 0)
        assert not policy.host_pool.num_used and slots.num_free == slots.num_slots
        slots.check()
        requests = engine.requests
        assert not (requests.unfinished or requests.dropped or requests.streams)
        if store := engine.loop.adapter_store:
            store.check()
            assert not any(resident.pins for resident in store.residents.values())
        EventLog("log", plain(events))  # raises if the log is not readable


def name_of(adapter: Adapter | None) -> str | None:
    return None if adapter is None else adapter.name


def check(
    output: RequestOutput, prompt: list[int], how: SamplingParams, adapter: Adapter | None = None
) -> None:
    """Check that an output is that of the request alone, or its beginning if it was cut short."""
    assert output.prompt_tokens == prompt
    limit = min(len(prompt) + how.max_tokens, CONFIG.max_model_len)
    every = replace(how, n=how.num_sequences) if how.ranks else how
    expected = expected_outputs(prompt, every, limit, EOS_RATE, adapter)
    tokens = [sequence.tokens for sequence in output.sequences]
    if {s.finish_reason for s in output.sequences} & {"abort", "error"}:
        if how.num_sequences == 1:
            assert tokens[0] == expected[0][: len(tokens[0])]
    elif how.ranks:  # sequences not returned may be cut short: these rank last
        assert len(tokens) == how.n and all(part in expected for part in tokens)
    else:
        assert tokens == expected


def run(seed: int, config: EngineConfig, *points: int) -> tuple[User, int]:
    with interrupted_at(*points) as state:
        user = User(seed, config, state)
        for _ in range(25):
            user.act()
    user.drain()
    return user, state.passed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"preemption_mode": "swap", "multi_step": 3},
        {"run_ahead": False, "page_size": 5},
        {"adapter_slots": 2, "adapter_pages": 6},
    ],
    ids=["plain", "swap", "alone", "adapters"],
)
def test_interrupts_anywhere_lose_and_double_nothing(changes):
    config, rng = replace(CONFIG, **changes), random.Random(repr(changes))
    interruptions = failures = 0
    for seed in range(20):
        count = run(seed, config)[1]
        first = rng.randrange(1, count)
        # The later interrupts often hit the code that handles the first.
        points = [first, *(first + rng.randrange(1, 400) for _ in range(rng.randint(0, 4)))]
        user, _ = run(seed, config, *points)
        interruptions += user.interruptions
        failures += sum(event["event"] == "failure" for event in user.engine.events)
    assert interruptions > 30 and failures > 15


def _add(engine: Engine, points: Points) -> None:
    points.call(engine.add_request, [3, 4, 5], SamplingParams(max_tokens=3), "job")


def _abort(engine: Engine, points: Points) -> None:
    engine.add_request([3, 4, 5], SamplingParams(max_tokens=9), "job")
    engine.step()
    points.call(engine.abort, "job")


def _pin(engine: Engine, points: Points) -> None:
    points.call(engine.pin_prefix, [3, 4, 5, 6, 7])


def _step(engine: Engine, points: Points) -> None:
    engine.add_request([3, 4, 5], SamplingParams(max_tokens=2), "job")
    while engine.has_unfinished():
        points.call(engine.step)


def test_wherever_it_is_interrupted_a_request_has_one_output_and_one_record():
    point, interrupted = 0, True
    while interrupted:
        point += 1
        engine = Engine(TINY, CONFIG, HashingExecutor(CONFIG))
        engine.add_request([3, 4, 5], SamplingParams(max_tokens=2), "job")
        outputs: list[RequestOutput] = []
        with interrupted_at(point) as points:
            while engine.has_unfinished():
                with suppress(KeyboardInterrupt):
                    outputs += points.call(engine.step)
        ends = [(output.request_id, output.finish_reason) for output in outputs]
        records = [(r.request_id, r.finish_reason) for r in engine.metrics.requests]
        assert ends == records and len(ends) == 1, point
        interrupted = bool(points.raised)
    assert point > 20


@pytest.mark.parametrize(
    ("act", "every"),
    [(_add, 1), (_abort, 1), (_pin, 3), (_step, 3)]
    + [pytest.param(act, 1, marks=pytest.mark.slow) for act in (_pin, _step)],
)
def test_what_is_interrupted_anywhere_and_done_again_leaves_a_log_to_read(act, every):
    point = 1 - every
    while True:
        point += every
        engine = Engine(TINY, CONFIG, HashingExecutor(CONFIG))
        with interrupted_at(point, point + 7) as points, suppress(KeyboardInterrupt):
            act(engine, points)
        if not points.raised:
            break
        for _ in range(2):
            drained(engine)
            act(engine, Points())
        EventLog("log", plain(engine.events))
    assert point > 20
