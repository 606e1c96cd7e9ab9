"""Decode runs in simulated time, against the same steps taken one by one."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import serve
from experiments.workloads.workloads import Request
from paged.config import EngineConfig
from paged.engine import Engine
from paged.kv_cache import POLICIES, policy_of
from paged.kv_cache.parts import Parts
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import LinearCost, SimulatedExecutor
from paged.simulator.step_cost import StepCost
from tests.paged.tiny import TINY

TOVA = "tests.paged.kv_cache.tova:TOVA"  # has vllm's host half, but its sequences stop growing
OPTIONS = {
    TOVA: {"budget": 20},
    "lserve": {"budget": 24, "sink": 8, "local": 8, "logical_page": 4,
               "gates": ((0.9, 0.1), (0.2, 0.8))},
    "diffkv": {"high": "auto", "low": "auto", "alpha_h": 0.0, "alpha_l": 0.0},
}  # fmt: skip


def parts_of(policy: str) -> Parts:
    return EngineConfig(policy=policy, page_size=8, policy_options=OPTIONS.get(policy)).parts


def config_of(policy: str, tokens: int, **fields) -> EngineConfig:
    can = parts_of(policy)
    if not can.chunked_prefill or can.staged_tile:
        fields |= {"chunked_prefill": False, "max_num_batched_tokens": 128}
    fields["prefix_caching"] = can.prefix_cache and fields.get("prefix_caching", False)
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    return EngineConfig(
        policy=policy, kv_cache_tokens=tokens, page_size=8,
        policy_options=OPTIONS.get(policy), **(defaults | fields),
    )  # fmt: skip


def served(config: EngineConfig, cost, requests, sampling, *, skip: bool, adapters: int = 0):
    """(steps, requests, outputs and final state of a run, its engine)."""
    executor = SimulatedExecutor(cost, vocab_size=61, adapter_page_s=0.03)
    engine = Engine(TINY, config, executor)
    for i in range(adapters):
        engine.add_known_adapter(Adapter(f"a{i}", "", "random", 16))
    outputs = serve.run(engine, requests, sampling, progress=False, skip=skip)
    engine.host_policy.check()
    engine.scheduler.slots.check()
    steps = [asdict(replace(step, host_s=0.0)) for step in engine.metrics.steps]
    return {
        "steps": steps,
        "requests": [asdict(record) for record in engine.metrics.requests],
        "outputs": outputs,
        "time": executor.clock.now(),
        "rounds": engine.loop.round,
        "held": {name: len(units) for name, units in engine.host_policy.used_units().items()},
    }, engine


@st.composite
def runs(draw, policy: str):
    """(configuration, cost of a step, requests, their sampling parameters, number of adapters)."""
    can = parts_of(policy)
    fields = {
        "run_ahead": draw(st.booleans()),
        "prefix_caching": draw(st.booleans()),
        "preemption_mode": draw(st.sampled_from(["auto", "recompute"])),
        "max_num_seqs": draw(st.sampled_from([4, 8])),
    }
    adapters = draw(st.sampled_from([0, 0, 3]))
    if adapters:
        fields["adapter_slots"] = 2
    tokens = draw(st.sampled_from([352, 480, 2000])) + 800 * (policy in ("diffkv", "lserve"))
    kind = draw(st.sampled_from(["one", "one", *["parallel", "beam"] * (can.fork != "no")]))
    sampling = SamplingParams()
    if kind == "parallel":
        sampling = SamplingParams(temperature=1.0, n=3)
    elif kind == "beam":
        sampling = SamplingParams(beam_width=2, n=1)
    config = config_of(policy, tokens, **fields)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gaps = rng.exponential(draw(st.sampled_from([0.001, 0.05, 0.5])), draw(st.integers(1, 16)))
    requests = [
        Request(
            float(arrival), rng.integers(3, 61, int(rng.integers(1, 40))).tolist(),
            int(rng.integers(1, 70)), ignore_eos=bool(rng.integers(4)),
            adapter=f"a{rng.integers(adapters)}" if adapters and rng.integers(4) else None,
        )
        for arrival in np.cumsum(gaps)
    ]  # fmt: skip
    if policy_of(policy).layout is None or draw(st.booleans()):
        cost: object = LinearCost(1e-3, 1e-5, 3e-6)
    else:
        cost = StepCost.declare(TINY, config, "a100-40")
    return config, cost, requests, sampling, adapters


@pytest.mark.parametrize("policy", [*POLICIES, TOVA])
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_together_is_as_one_by_one(policy, data):
    config, cost, requests, sampling, adapters = data.draw(runs(policy))
    slow, _ = served(config, cost, requests, sampling, skip=False, adapters=adapters)
    fast, _ = served(config, cost, requests, sampling, skip=True, adapters=adapters)
    assert fast == slow


@pytest.mark.parametrize("policy, tokens", [("vllm", 80), ("lserve", 248)])
def test_a_prompt_that_waits_for_memory_enters_when_another_has_computed_their_prefix(
    policy, tokens
):
    config = config_of(policy, tokens, prefix_caching=True, max_num_batched_tokens=128)
    prefix = [*range(3, 59)]
    requests = [
        Request(0.01 * i, [*prefix[:shared], 59], max_tokens, ignore_eos=True)
        for i, (shared, max_tokens) in enumerate([(32, 40), (56, 16), (56, 16), (56, 16)])
    ]
    cost = LinearCost(5e-3, 1e-5, 3e-6)
    slow, _ = served(config, cost, requests, None, skip=False)
    fast, _ = served(config, cost, requests, None, skip=True)
    assert fast == slow


def test_after_a_step_with_prefills_a_waiting_prompt_may_enter_before_tokens_are_known():
    """LServe's checkpoints can be used as soon as the step that makes them is scheduled."""
    config = config_of("lserve", 280, prefix_caching=True, max_num_batched_tokens=128)
    engine = Engine(TINY, config, SimulatedExecutor(vocab_size=61))
    for _ in range(8):
        engine.add_request([3, 4, 5], SamplingParams(max_tokens=30))
    engine.step()
    scheduler = engine.scheduler
    assert scheduler._head_lacks_memory and not scheduler.nobody_enters


@pytest.mark.parametrize("policy", POLICIES)
def test_most_steps_are_taken_together(policy):
    """When requests are long and arrive rarely, few steps are events."""
    config = config_of(policy, 2000)
    requests = [Request(0.4 * i, [5, 6, 7], 60, ignore_eos=True) for i in range(4)]
    cost = LinearCost(1e-3, 1e-5, 1e-6)
    slow, one_by_one = served(config, cost, requests, None, skip=False)
    fast, engine = served(config, cost, requests, None, skip=True)
    assert fast == slow
    told = [event for event in engine.events if event["event"] == "step"]
    assert len(slow["steps"]) == 240 == sum(e["event"] == "step" for e in one_by_one.events)
    assert len(told) < 40


def test_a_device_and_costs_of_inputs_take_steps_one_by_one():
    config = config_of("vllm", 2000)
    engine = Engine(TINY, config, SimulatedExecutor(lambda inputs: 0.5, vocab_size=61))
    engine.add_request([5, 6], SamplingParams(max_tokens=30, ignore_eos=True))
    while engine.has_unfinished():
        engine.run_until(1e9)
    assert sum(event["event"] == "step" for event in engine.events) == 30
