"""OPERATIONS: the users' operations on an engine, each with its probability per step.

A new feature of the engine needs one more entry.
"""

import random
from collections.abc import Callable
from typing import Any

from experiments.soak.checks import Violation, holdings
from experiments.soak.users import NUM_STREAMS, Operation, Users
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.requests.stopping import decode


def submit(users: Users, rng: random.Random) -> None:
    """Add a request: as tokens or text, streaming or not, with one of two cache salts."""
    if not users.has_room:
        return
    prompt, how = users.request(rng)
    salt, stream = rng.choice(("", "", "", "other")), rng.random() < 0.3
    given: str | list[int] = prompt
    if rng.random() < 0.2:
        text = decode(users.engine.tokenizer, prompt)
        again = users.engine.tokenizer.encode(text)
        if 0 < len(again) <= len(prompt) and max(again) < users.engine.model.vocab_size:
            given, prompt = text, again
    adapter = users.adapter(rng)
    request_id = users.engine.add_request(
        given, how, stream=stream, cache_salt=salt, adapter=adapter
    )
    users.expect(request_id, prompt, how, rng, adapter)


def burst(users: Users, rng: random.Random) -> None:
    for _ in range(rng.randint(2, 20)):
        submit(users, rng)


def abort(users: Users, rng: random.Random) -> None:
    """Abort a request in any state. If it streams, the next pull returns the aborted output."""
    if not users.asked:
        return
    request_id = rng.choice(list(users.asked))
    try:
        output = users.engine.abort(request_id)
    except ValueError:
        return  # The request has ended: the next step, or pull of its stream, returns its output.
    users.asked[request_id].aborted = True
    if request_id not in users.streams:
        users.take(output)


def open_stream(users: Users, rng: random.Random) -> None:
    """Start a stream, an iterator over outputs. Its steps serve the other requests, too."""
    if len(users.streams) == NUM_STREAMS or not users.has_room:
        return
    prompt, how = users.request(rng)
    adapter = users.adapter(rng)
    stream = users.engine.stream(prompt, how, adapter)
    first = next(stream)
    users.expect(first.request_id, prompt, how, rng, adapter)
    if not first.finished:
        users.streams[first.request_id] = stream
    users.take(first)


def pull_stream(users: Users, rng: random.Random) -> None:
    """Pull some outputs of a stream. Without a ready output, the pull runs the engine's steps."""
    request_id = rng.choice([*users.streams, ""])
    for _ in range(rng.randint(1, 8)):
        if request_id in users.streams:
            users.pull(request_id)


def close_stream(users: Users, rng: random.Random) -> None:
    if users.streams:
        request_id = rng.choice(list(users.streams))
        stream = users.streams.pop(request_id)
        del users.asked[request_id]
        users.counts["closed"] += 1
        stream.close()


def generate(users: Users, rng: random.Random) -> None:
    """Call `Engine.generate`, which waits for its requests while the others continue."""
    asked = [users.request(rng) for _ in range(rng.randint(1, 3))]
    adapters = [users.adapter(rng) for _ in asked]
    prompts, hows = [prompt for prompt, _ in asked], [how for _, how in asked]
    outputs = users.engine.generate(prompts, hows, adapters)
    if len(outputs) != len(asked):
        raise Violation("lost", f"{len(asked)} prompts gave {len(outputs)} outputs")
    for (prompt, how), adapter, output in zip(asked, adapters, outputs, strict=True):
        users.expect(output.request_id, prompt, how, rng, adapter)
        users.take(output)


def refuse(users: Users, rng: random.Random) -> None:
    """Make an invalid call, which must raise ValueError and leave the engine unchanged."""
    before = holdings(users.engine), _books(users.engine)
    name = rng.choice(list(REFUSED))
    try:
        REFUSED[name](users)
    except ValueError:
        users.counts["refused"] += 1
    else:
        raise Violation("accepted", f"the engine accepted {name}")
    users.check_held(before[0], f"after {name} was refused")
    if _books(users.engine) != before[1]:
        raise Violation("leaked_state", f"{name} was refused and left a trace")


def _books(engine: Engine) -> tuple[int, ...]:
    held = map(len, engine.host_policy.used_units().values())
    return *held, *engine.host_policy.usage().bytes.values(), len(engine.metrics.events)


def _add_twice(users: Users) -> None:
    """Add a request with the id of an unfinished request; if all have ended, an empty prompt."""
    scheduler = users.engine.scheduler
    other = next(iter([*scheduler.running, *scheduler.waiting]), None)
    users.engine.add_request([5] if other else [], request_id=other.request_id if other else None)


REFUSED: dict[str, Callable[[Users], Any]] = {
    "an empty prompt": lambda u: u.engine.add_request([]),
    "a token that is none": lambda u: u.engine.add_request([u.engine.model.vocab_size]),
    "a negative token": lambda u: u.engine.add_request([5, -1]),
    "a nested prompt": lambda u: u.engine.add_request([[5]]),  # type: ignore[list-item]
    "a long prompt": lambda u: u.engine.add_request([5] * u.engine.config.max_model_len),
    "an id in use": _add_twice,
    "an unknown id to abort": lambda u: u.engine.abort("nobody"),
    "an unknown adapter": lambda u: u.engine.add_request([5], adapter="nobody"),
    "a future arrival": lambda u: u.engine.add_request([5], arrival_time=1e12),
    "a bad prompt among good ones": lambda u: u.engine.generate([[5], []]),
    "a bad prompt to stream": lambda u: u.engine.stream([]),
    "a special token as stop": lambda u: u.engine.add_request(
        [5], SamplingParams(stop=(u.engine.tokenizer.all_special_tokens[0],))
    ),
    "no tokens to generate": lambda u: SamplingParams(max_tokens=0),
    "samples that are all the same": lambda u: SamplingParams(n=2),
    "more outputs than beams": lambda u: SamplingParams(n=3, beam_width=2),
    "more sequences than may run": lambda u: u.engine.add_request(
        [5], SamplingParams(n=u.engine.config.max_num_seqs + 1, temperature=1.0)
    ),
    "a prefix of nothing to pin": lambda u: u.engine.pin_prefix([]),
}
# Name -> (probability in each step, operation).
OPERATIONS: dict[str, tuple[float, Operation]] = {
    "submit": (0.25, submit),
    "burst": (0.01, burst),
    "abort": (0.04, abort),
    "open_stream": (0.02, open_stream),
    "pull_stream": (0.3, pull_stream),
    "close_stream": (0.05, close_stream),
    "generate": (0.002, generate),
    "refuse": (0.05, refuse),
}
