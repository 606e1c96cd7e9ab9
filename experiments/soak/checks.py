"""Invariants of an engine's outputs and internal state under any sequence of calls."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.requests.stopping import decode

KINDS = (
    "lost", "doubled", "wrong_output", "mismatched", "leaked_blocks", "leaked_state", "stuck",
    "accepted", "raised", "memory_growth", "unexercised",
)  # fmt: skip


class Violation(Exception):
    """A violated invariant of the engine, or of the soak itself. kind: one of KINDS."""

    def __init__(self, kind: str, message: str):
        assert kind in KINDS, kind
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True)
class Mechanism:
    """A mechanism of the engine that a soak's flags enable, and that must occur in the soak.

    count: name of the mechanism in `Users.counts`.
    never: the error message for a count of 0, to which ' happened' is appended.
    flags: changes of flags that make the mechanism occur, in words.
    possible: whether the mechanism can occur with these flags.
    """

    count: str
    never: str
    flags: str
    possible: bool = True


@dataclass(frozen=True)
class Soaked:
    """A policy's part of the soak.

    named: engine -> the mechanisms that the policy's options enable.
    seen: engine -> number of occurrences by mechanism (`Mechanism.count`).
    """

    named: Callable[[Any], list[Mechanism]]
    seen: Callable[[Any], dict[str, int]]


@dataclass
class Asked:
    """A request without a final output so far.

    how: its sampling parameters.
    alone: whether its final output is compared with the request served alone.
    seen: tokens of each sequence in its latest output.
    aborted: whether it was aborted.
    interrupted: whether Ctrl-C came after the request was added; this may have ended the request.
    """

    prompt: list[int]
    how: SamplingParams
    alone: bool
    seen: list[list[int]] = field(default_factory=list)
    aborted: bool = False
    interrupted: bool = False
    adapter: str | None = None


def takes_back(output: RequestOutput, asked: Asked) -> bool:
    """Whether an output lacks tokens of the request's previous output."""
    ranked = output.finished and asked.how.ranks
    for i, sequence in enumerate(output.sequences):
        shown = asked.seen if ranked else asked.seen[i : i + 1]
        if shown and not any(sequence.tokens[: len(tokens)] == tokens for tokens in shown):
            return True
    return False


def what_is_wrong(output: RequestOutput, asked: Asked, engine: Engine) -> str | None:
    """The reason why a final output does not fit its request; None if it fits."""
    how, sequences = asked.how, output.sequences
    reasons = [sequence.finish_reason for sequence in sequences]
    # If samples are ranked, only the best are returned, and aborted samples may be missing.
    aborts = "abort" in reasons
    if not asked.interrupted and not aborts <= asked.aborted <= aborts + how.ranks:
        return f"aborted is {asked.aborted}, and the reasons {reasons}"
    cut_short = (asked.aborted and how.is_beam_search) or asked.interrupted
    if not sequences or len(sequences) > how.n or (len(sequences) < how.n and not cut_short):
        return f"{len(sequences)} sequences came back"
    scores = [sequence.score for sequence in sequences if sequence.score is not None]
    if len(scores) != (len(sequences) if how.ranks or how.is_beam_search else 0):
        return f"the scores are {[sequence.score for sequence in sequences]}"
    if scores != sorted(scores, reverse=True) and not cut_short:
        return f"the best is not the first: {scores}"
    for sequence in sequences:
        if wrong := _what_is_wrong_with(sequence, asked, engine):
            return wrong
    if how.prompt_logprobs is not None and not asked.aborted and not asked.interrupted:
        reported = [p and p.token for p in output.prompt_logprobs or ()]
        if reported != [None, *asked.prompt[1:]]:
            return "its prompt's log-probabilities are not those of its tokens"
    return None


def _what_is_wrong_with(sequence: SequenceOutput, asked: Asked, engine: Engine) -> str | None:
    how, reason, tokens = asked.how, sequence.finish_reason, sequence.tokens
    limit = min(how.max_tokens, engine.config.max_model_len - len(asked.prompt))
    eos = () if how.ignore_eos else engine.model.eos_token_ids
    ends = {*eos, *how.stop_token_ids}
    if ends & set(tokens[:-1]):
        return f"it goes on after one of the tokens {ends}"
    last = tokens[-1] if tokens else None
    expected = text = decode(engine.tokenizer, tokens)
    if reason == "stop" and last in how.stop_token_ids:
        expected = decode(engine.tokenizer, tokens[:-1])
    elif reason in ("stop", "abort", "error"):
        # A stop string cuts the text; the text of an aborted request may lag behind its tokens.
        expected = sequence.text
    if sequence.text != expected or not text.startswith(sequence.text):
        return f"its text is {sequence.text!r}, its tokens say {text!r}"
    if reason != "error" and any(stop in sequence.text for stop in how.stop):
        return f"a stop string is in its text {sequence.text!r}"
    cut = any(text.startswith(sequence.text + stop) for stop in how.stop)
    fits = {
        "abort": len(tokens) < limit,
        "error": asked.interrupted and len(tokens) <= limit,
        "length": len(tokens) == limit and last not in ends,
        "eos": 0 < len(tokens) <= limit and last in eos,
        "stop": 0 < len(tokens) <= limit and (cut or last in how.stop_token_ids),
    }
    if not fits.get(str(reason), False):
        return f"{reason!r} does not fit {len(tokens)} of {limit} tokens, {sequence.text!r}"
    reported = [p.token for p in sequence.logprobs or ()]
    missing = tokens[len(reported) :]
    if how.logprobs is not None and (
        reported + missing != tokens or len(missing) > asked.interrupted
    ):
        return "its log-probabilities are not those of its tokens"
    return None


def holdings(engine: Engine) -> dict[str, int]:
    """Number of items in each of an engine's containers, without its records."""
    owners = engine, engine.requests, engine.scheduler, engine.scheduler.slots
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, dict | list | set | deque)
    }


def check_memory(engine: Engine) -> None:
    """Raise Violation unless each unit of the policy's pools is free, or its reference count equals
    its owners."""
    try:
        engine.host_policy.check()
    except AssertionError as error:
        raise Violation("leaked_blocks", str(error)) from error


def check_slots(engine: Engine) -> None:
    """Raise Violation unless slots are consistent, and the taken slots equal the slots of running
    sequences. Also checks adapter slots, and that each running request pins its adapter."""
    scheduler, slots, store = engine.scheduler, engine.scheduler.slots, engine.loop.adapter_store
    try:
        slots.check()
        if store is not None:
            store.check()
            pins = sum(resident.pins for resident in store.residents.values())
            assert pins == sum(g.adapter is not None for g in scheduler.running), "a pin is lost"
    except AssertionError as error:
        raise Violation("leaked_state", f"{error}") from error
    running = sorted(s.slot for group in scheduler.running for s in group.unfinished)
    taken = np.flatnonzero(slots.active).tolist()
    if running != taken:
        raise Violation("leaked_state", f"slots {taken} are taken, and sequences run in {running}")
