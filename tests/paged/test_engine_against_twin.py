"""Random requests through scheduler, block tables and step inputs, against a twin's tokens."""

from collections import Counter, deque
from dataclasses import replace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged.blocks.block_pool import NULL_BLOCK
from paged.engine import Engine, EngineConfig
from paged.kv_cache.vllm import VLLMHost
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from tests.paged.hashing_executor import HashingExecutor, TwinLoads
from tests.paged.tiny import TINY
from tests.paged.twin_cases import ADAPTERS, SHARED, Call, cases, expected_outputs, tokens

BEAMS = SamplingParams(beam_width=2, seed=0, length_penalty=0.0, early_stopping=True)
# A beam search is preempted and recomputed alone: the prefix cache holds its beams' common tokens.
RECOMPUTED_BEAMS = (
    EngineConfig(
        max_num_seqs=5, max_num_batched_tokens=100, max_prefills_per_step=2, max_model_len=90,
        chunked_prefill=False, page_size=16, kv_cache_tokens=112, watermark=0.0, run_ahead=False,
        prefix_caching=True, preemption_mode="recompute",
    ),
    [
        Call(0, prompt, replace(BEAMS, beam_width=width, max_tokens=new))
        for prompt, width, new in ((tokens(0, 10), 2, 13), ([*tokens(0, 7), 3], 3, 10))
    ],
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([0, 0.02, 0.1]), st.sampled_from([0, 0.2]))
@example(RECOMPUTED_BEAMS, 0, 0)
def test_every_request_gets_exactly_its_tokens(case, eos_rate, failing):
    """failing: share of the adapter loads that fail."""
    config, calls = case
    executor = HashingExecutor(config, eos_rate)
    executor.adapters = TwinLoads(executor, failing)
    engine = Engine(TINY, config, executor)
    for adapter in ADAPTERS if config.adapter_slots else ():
        engine.add_known_adapter(adapter)
    if config.prefix_caching and config.kv_cache_tokens == 1000:
        engine.pin_prefix(SHARED[0])
    pinned = VLLMHost.of(engine.host_policy).pool.refcounts.copy()
    todo = deque(sorted(enumerate(calls), key=lambda item: item[1].arrival))
    requests: dict[str, tuple[list[int], SamplingParams, Adapter | None]] = {}
    ended: dict[str, RequestOutput] = {}
    aborted: dict[str, RequestOutput] = {}
    grown: Counter[str] = Counter()  # streamed tokens by request
    for step in range(5000):
        while todo and todo[0][1].arrival <= step:
            i, call = todo.popleft()
            name, how = str(i), call.how
            which = call.adapter if config.adapter_slots else None
            asked = None if which is None else ADAPTERS[which]
            named = None if asked is None else asked.name
            try:
                engine.add_request(call.prompt, how, name, stream=call.stream, adapter=named)
            except ValueError as error:
                assert how.num_sequences > 1 and "exceed the cache" in str(error)
                continue
            requests[name] = call.prompt, how, asked
        for name in sorted(requests.keys() - ended.keys() - aborted.keys()):
            call = calls[int(name)]
            if call.abort_after is not None and call.arrival + call.abort_after <= step:
                aborted[name] = engine.abort(name)
        for output in engine.step():
            size = sum(len(sequence.tokens) for sequence in output.sequences)
            if not output.finished:
                assert size > grown[output.request_id]
                grown[output.request_id] = size
            else:
                assert output.request_id not in ended
                ended[output.request_id] = output
        running, waiting = engine.scheduler.running, list(engine.scheduler.waiting)
        together = [running, waiting] if config.adapter_slots else [running + waiting]
        for orders in ([group.order for group in groups] for groups in together):
            assert orders == sorted(orders)
        assert all(group.overtaken <= config.max_overtakes for group in running + waiting)
        engine.scheduler.slots.check()
        if store := engine.loop.adapter_store:
            store.check()
            pinned_by = {g.adapter for g in engine.scheduler.running if g.adapter}
            assert {a for a, resident in store.residents.items() if resident.pins} == pinned_by
        tables = VLLMHost.of(engine.host_policy).block_tables
        refcounts = VLLMHost.of(engine.host_policy).pool.refcounts
        held = tables.blocks[tables.blocks != NULL_BLOCK]
        owners = np.bincount(held, minlength=config.num_blocks) + pinned
        assert (refcounts == owners).all()
        assert VLLMHost.of(engine.host_policy).pool.num_used == (refcounts > 0).sum()
        if not todo and not engine.has_unfinished():
            break
    assert not engine.has_unfinished()
    assert ended.keys() | aborted.keys() == requests.keys()
    assert VLLMHost.of(engine.host_policy).pool.num_used == (pinned > 0).sum()
    assert VLLMHost.of(engine.host_policy).host_pool.num_used == 0
    assert engine.scheduler.slots.num_free == config.max_num_seqs
    failed = {e["adapter"] for e in engine.events if e["event"] == "loaded" and e["error"]}
    for name, (prompt, how, asked) in requests.items():
        limit = min(len(prompt) + how.max_tokens, config.max_model_len)
        assert how.seed is not None
        expected = expected_outputs(prompt, how, limit, eos_rate, asked)
        if name in ended and ended[name].finish_reason == "error":
            assert asked is not None
            assert asked.name in failed
        elif name in ended:
            assert [sequence.tokens for sequence in ended[name].sequences] == expected
        elif how.num_sequences == 1:
            assert aborted[name].tokens == expected[0][: len(aborted[name].tokens)]
    preemptions = sum(r.preemptions for r in engine.metrics.requests)
    assert preemptions == sum(s.preemptions for s in engine.metrics.steps)
    assert preemptions == sum(e["event"] == "preempt" for e in engine.events)


def _engine(**changes) -> Engine:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=90, **changes)
    return Engine(TINY, config, HashingExecutor(config))


HOW = SamplingParams(max_tokens=10, seed=0, ignore_eos=True)


def test_the_log_of_page_operations_closes():
    engine = _engine(kv_cache_tokens=160, watermark=0.0, page_size=4)
    engine.generate([[5 + i] * 30 for i in range(6)], HOW)
    held: Counter[int] = Counter()
    for event in engine.events:
        for _, verb, blocks in event.get("pages", ()):
            held.update({int(b): {"allocate": 1, "release": -1}[verb] for b in blocks})
    assert len(held) > 10
    assert not any(held.values())


def test_what_is_in_flight_may_end_before_anyone_is_preempted():
    """Two requests fill the cache but for one page. At its edge at most one is preempted, once."""
    config = EngineConfig(
        max_num_seqs=2, max_model_len=128, page_size=16, kv_cache_tokens=272, watermark=0.0
    )
    engine = Engine(TINY, config, HashingExecutor(config))
    how = SamplingParams(max_tokens=30, seed=0, ignore_eos=True)
    outputs = engine.generate([[5] * 112, [6] * 112], how)
    assert [len(o.tokens) for o in outputs] == [16, 16]
    assert sum(r.preemptions for r in engine.metrics.requests) <= 1


def test_requests_without_a_seed_draw_their_own_repeatably():
    runs = []
    for seed in (0, 0, 1):
        engine = _engine(seed=seed)
        outputs = engine.generate([[5]] * 3, SamplingParams(max_tokens=10, ignore_eos=True))
        runs.append([o.tokens for o in outputs])
    assert runs[0] == runs[1] != runs[2]
    assert len({str(tokens) for tokens in runs[0]}) == 3
