"""A random run of an engine: perhaps a pinned prefix, then calls of many kinds at random rounds."""

import contextlib
import json
import random
from typing import Any

from experiments.lib.run_record import plain
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from tests.paged.tiny import TINY

# A cache of 80 tokens holds the longest request and 16 pinned tokens, whatever the page size; a
# cache of GROUPS_FROM tokens holds a request of three such sequences, and the pinned tokens.
LONGEST_PROMPT, MOST_TOKENS, GROUPS_FROM = 24, 20, 160


def chance(rng: random.Random, percent: int) -> bool:
    """True with a chance of `percent`; if hypothesis made `rng`, failures shrink towards False."""
    return rng.randrange(100) >= 100 - percent


def random_run(engine: Engine, rng: random.Random, rounds: int, rich: bool = False) -> list[dict]:
    """Run `engine` with random calls and the adapters that it knows. Returns the log, as JSON.

    rich: requests also vary temperature, top_k, top_p, logit_bias and other sampling parameters.
    """
    shared = [[rng.randint(3, TINY.vocab_size - 1) for _ in range(16)] for _ in range(2)]
    salts, adapters = ["", "b"], [None, *engine.adapters.names]

    def request() -> tuple[list[int], SamplingParams]:
        prompt = [rng.randint(3, TINY.vocab_size - 1) for _ in range(rng.randint(1, 8))]
        if chance(rng, 60):
            prompt = rng.choice(shared) + prompt
        assert len(prompt) <= LONGEST_PROMPT
        how: dict[str, Any] = {
            "max_tokens": rng.randint(1, MOST_TOKENS),
            "seed": rng.choice([None, 3, 2**32 - 1]),
            "ignore_eos": chance(rng, 30),
            "stop_token_ids": tuple(rng.sample(range(3, 61), rng.choice([0, 2]))),
            "prompt_logprobs": rng.choice([None, None, 2]),
            "repetition_penalty": rng.choice([1.0, 1.3]),
        }
        if rich:
            how |= {"temperature": rng.choice([0.0, 0.7, 1.3]), "top_k": rng.choice([0, 9])}
            how |= {"top_p": rng.choice([1.0, 0.9]), "frequency_penalty": rng.choice([0, 0.5])}
            how |= {"logit_bias": rng.choice([{}, {7: 2.5, 9: -100.0}])}
            how |= {"logprobs": rng.choice([None, 2])}
        most = 1 if engine.config.kv_cache_tokens < GROUPS_FROM else engine.config.max_num_seqs
        kind, count = rng.choice(["one", "parallel", "beam"]), min(3, most)
        if kind == "parallel" and count > 1:
            how |= {"temperature": 1.0, "best_of": count, "n": rng.randint(1, count)}
            how |= {"logprobs": rng.choice([None, 2])}
        elif kind == "beam" and count > 1:
            kept = {name: how[name] for name in ("max_tokens", "seed", "prompt_logprobs")}
            how = kept | {"beam_width": count, "n": rng.randint(1, count)}
        return prompt, SamplingParams(**how)

    if engine.config.prefix_caching and chance(rng, 60):
        with contextlib.suppress(ValueError):  # the adapter could not be loaded
            engine.pin_prefix(shared[0], rng.choice(salts), rng.choice(adapters))
    names: set[str] = set()
    for _ in range(rounds):
        while chance(rng, 35):
            names.add(f"user-{len(names)}")
            engine.add_request(
                *request(), f"user-{len(names) - 1}", stream=chance(rng, 30),
                cache_salt=rng.choice(salts), adapter=rng.choice(adapters),
            )  # fmt: skip
        unfinished = names - {record.request_id for record in engine.metrics.requests}
        if unfinished and chance(rng, 10):
            engine.abort(rng.choice(sorted(unfinished)))
        if chance(rng, 3):
            engine.generate(*zip(request(), request()))  # type: ignore[arg-type]
        if chance(rng, 3):
            next(engine.stream(*request()))  # the stream is closed after its first output
        engine.step()
    if chance(rng, 50):
        while engine.has_unfinished():
            engine.step()
    return as_json(engine.events)


def as_json(events: list[dict]) -> list[dict]:
    return json.loads(json.dumps(plain(events)))


def without_times(log: list[dict]) -> list[dict]:
    times = {"time_s", "host_s", "device_s", "arrival_s", "first_token_s", "finish_s"}
    return [{name: value for name, value in e.items() if name not in times} for e in log]
