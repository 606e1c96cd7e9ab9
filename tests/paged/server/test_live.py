"""The live page and its state: the engine between two steps, under each policy."""

import re
import threading
from collections import Counter
from dataclasses import replace

import httpx2
import pytest

from paged.kv_cache import POLICIES
from paged.kv_cache.host import CACHED, FREE, SHARED
from paged.requests.sampling_params import SamplingParams
from paged.server import live
from paged.server.live import MAX_CELLS, MAX_REQUESTS, PAGE, view
from tests.paged.server.serving import CONFIG, KEY, served, simulated

CONFIGS = {
    "vllm": replace(CONFIG, prefix_caching=True),
    "orca_max": replace(CONFIG, policy="orca_max"),
    "lserve": replace(CONFIG, policy="lserve"),
    "diffkv": replace(CONFIG, policy="diffkv", chunked_prefill=False, max_num_batched_tokens=512),
}
HOW = SamplingParams(max_tokens=40, ignore_eos=True)


def started(config, count: int, steps: int = 8, how: SamplingParams = HOW):
    engine, _ = simulated(config)
    for i in range(count):
        engine.add_request(list(range(4 + i, 44 + i)), how, f"request-{i}")
    for _ in range(steps):
        engine.step()
    return engine


@pytest.mark.parametrize("policy", CONFIGS)
def test_each_page_has_the_colour_of_the_sequence_that_owns_it(policy):
    engine = started(CONFIGS[policy], 10)
    seen = view(engine)
    assert [request["id"] for request in seen.requests] == [f"request-{i}" for i in range(10)]
    states = Counter(request["state"] for request in seen.requests)
    assert states == {"running": 8, "waiting": 2}
    slots = [slot for request in seen.requests for slot in request["slots"]]
    assert sorted(slots) == list(range(8))
    for request in seen.requests:
        assert request["prompt_tokens"] == 40 and request["limit"] == 80
        assert (request["output_tokens"] > 0) <= (request["state"] == "running")
    usage = engine.host_policy.usage()
    units = {pool.name: pool.unit_bytes for pool in engine.host_policy.pools}
    assert {pool.name for pool in seen.pools} == set(units)
    for pool in seen.pools:
        taken = pool.cells[pool.cells != FREE]
        assert set(taken.tolist()) == set(slots)
        if policy == "vllm":
            assert len(taken) * units[pool.name] == usage.bytes[pool.name]
    while engine.has_unfinished():
        engine.step()
    seen = view(engine)
    kept = {CACHED, FREE} if policy == "vllm" else {FREE}
    assert not seen.requests and all(set(pool.cells.tolist()) == kept for pool in seen.pools)


def test_every_policy_has_a_view():
    for policy in POLICIES:
        # A step of the default size holds a whole prompt of any policy.
        engine, _ = simulated(replace(CONFIG, policy=policy, max_num_batched_tokens=0))
        assert view(engine).pools, policy


def test_pages_of_several_sequences_are_shared():
    engine = started(CONFIG, 1, how=replace(HOW, n=3, temperature=1.0))
    seen = view(engine)
    assert (seen.pools[0].cells == SHARED).sum() == 2  # the whole pages of 40 prompt tokens
    assert len(seen.requests[0]["slots"]) == 3


def test_large_pools_and_long_queues_are_told_in_short():
    config = replace(CONFIG, kv_cache_tokens=16 * 3 * MAX_CELLS)
    seen = view(started(config, MAX_REQUESTS + 10, steps=1))
    assert len(seen.requests) == MAX_REQUESTS
    (pool,) = seen.pools
    assert len(pool.cells) <= MAX_CELLS and pool.units_per_cell == 3


def test_state_is_made_while_requests_run(monkeypatch):
    engine, executor = simulated(CONFIG, step_s=0.005)
    with served(engine) as running:
        monkeypatch.setattr(live, "FRESH_S", 0.0)
        ask = threading.Thread(
            target=lambda: running.client.completions.create(
                model="bundled", prompt=[5] * 20, max_tokens=240, extra_body={"ignore_eos": True}
            )
        )
        ask.start()
        state = httpx2.get(f"{running.url}/state").json()
        while not state["totals"]["prefill_tokens"]:  # until the request's first step is counted
            state = httpx2.get(f"{running.url}/state").json()
        monkeypatch.setattr(live, "FRESH_S", 60.0)
        again = httpx2.get(f"{running.url}/state").json()
        ask.join()
    assert again == state, "a state that is fresh costs the engine nothing"
    assert (state["model"], state["policy"], state["pending"]) == ("bundled", "vllm", 1)
    (runner,), (request,) = state["runners"], state["view"]["requests"]
    assert runner["running"] == 1 and runner["kv_bytes"]["blocks"] > 0
    assert request["state"] == "running" and request["prompt_tokens"] == 20
    (pool,) = state["view"]["pools"]
    assert set(pool["cells"]) == {FREE, *request["slots"]}
    assert state["totals"]["prefill_tokens"] == 20
    assert request["output_tokens"] >= state["totals"]["decode_tokens"] - 2


def test_the_page_needs_no_key_and_no_other_machine_and_the_state_a_key():
    with served(simulated()[0], keys=[KEY]) as running:
        page = httpx2.get(running.url + "/")
        refused = httpx2.get(running.url + "/state")
        told = httpx2.get(running.url + "/state", headers={"Authorization": f"Bearer {KEY}"})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert (refused.status_code, told.status_code) == (401, 200)
    text = PAGE.read_text("utf-8")
    assert page.text == text
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)|https?://|@import|import\(", text)


@pytest.mark.parametrize("policy", CONFIGS)
def test_each_policy_tells_what_it_saves(policy):
    config = CONFIGS[policy]
    with served(simulated(config)[0], config) as server:
        server.client.completions.create(model="bundled", prompt="a cat", max_tokens=4)
        assert server.http.get(f"{server.url}/state").status_code == 200
        told = server.http.get(f"{server.url}/metrics").text
    assert 'paged_policy{figure="context_tokens",runner="engine"} 0.0' in told
    if policy == "diffkv":  # The last request has ended, so its tokens no longer count.
        assert 'paged_policy{figure="high_tokens",runner="engine"} 0.0' in told
