"""The server returns the tokens of the offline engine for the same seeds, under four policies."""

import concurrent.futures
from typing import Any

import pytest

from paged.engine import Engine
from paged.requests.sampling_params import changed_fields
from paged.requests.stopping import decode
from tests.paged.kv_cache.policy_suite import CASES, CROWD, Bench, Case, padded, registered
from tests.paged.server.serving import TOKENIZER, Served, joined, served
from tests.paged.tiny import TINY

# Engines compile. `test_openai_client.py` compares quickly, over a simulated engine.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def policies():
    with registered():
        yield


@pytest.fixture(scope="module")
def bench(tiny_params):
    return Bench(tiny_params)


def body_of(request) -> dict[str, Any]:
    how = {"temperature": 0, **changed_fields(request.how)}
    return {"model": "bundled", "prompt": list(request.prompt), "seed": 0, **how}


def texts_of(server: Served, body: dict[str, Any]) -> list[str]:
    answer = server.http.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    return [choice["text"] for choice in answer["choices"]]


def streamed(server: Served, body: dict[str, Any], count: int) -> list[str]:
    extra = {name: body.pop(name) for name in ("beam_width", "ignore_eos") if name in body}
    return joined(server.client.completions.create(**body, stream=True, extra_body=extra), count)


# One case of each kind of policy, because the server treats all policies alike.
NAMES = ("vllm", "orca_max", "lserve_kv8", "diffkv")
SERVED = [
    pytest.param(case, id=case.name, marks=[] if case.name == "lserve_kv8" else pytest.mark.sweep)
    for case in CASES
    if case.name in NAMES
]


@pytest.mark.parametrize("case", SERVED)
def test_a_crowd_gets_what_each_gets_offline(case: Case, bench: Bench):
    """All requests run at once, in a cache that is too small for them: some are preempted."""
    offline = bench.engine(case)
    crowd = [request for request in CROWD if request.suits(offline)]
    outputs = offline.generate([list(r.prompt) for r in crowd], [r.how for r in crowd])
    wanted = [[decode(TOKENIZER, s.tokens) for s in output.sequences] for output in outputs]
    executor = bench.engine(case).executor
    engine = padded(Engine(TINY, offline.config, executor, TOKENIZER))
    with served(engine, engine.config, model=TINY) as server:
        with concurrent.futures.ThreadPoolExecutor(len(crowd)) as pool:
            whole = [pool.submit(texts_of, server, body_of(request)) for request in crowd[::2]]
            parts = [
                pool.submit(streamed, server, body_of(request), request.how.n)
                for request in crowd[1::2]
            ]
            assert [future.result() for future in whole] == wanted[::2]
            assert [future.result() for future in parts] == wanted[1::2]
        assert not any(server.wait_until_idle().values())
        for path in ("metrics", "state"):
            assert server.http.get(f"{server.url}/{path}").status_code == 200
