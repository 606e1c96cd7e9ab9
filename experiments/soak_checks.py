"""What must hold of an engine's outputs and of its books, whatever its users do.

Used by experiments/soak.py.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from paged.block_pool import NULL_BLOCK
from paged.engine import Engine
from paged.sequence import RequestOutput, SamplingParams
from paged.stopping import decode

LOGPROB_TOLERANCE = 1e-3
KINDS = (
    "lost", "doubled", "wrong_output", "mismatched", "leaked_blocks", "leaked_state", "stuck",
    "accepted", "raised", "memory_growth",
)  # fmt: skip


class Violation(Exception):
    """A promise of the engine that it did not keep; kind: one of KINDS."""

    def __init__(self, kind: str, message: str):
        assert kind in KINDS, kind
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass
class Asked:
    """A request whose final output has not come. alone: whether that will be compared with a run
    of the request by itself."""

    prompt: list[int]
    how: SamplingParams
    alone: bool
    seen: list[int] = field(default_factory=list)
    aborted: bool = False


def what_is_wrong(output: RequestOutput, asked: Asked, engine: Engine) -> str | None:
    """Why a final output cannot be that of the request, or None."""
    how, reason, tokens = asked.how, output.finish_reason, output.tokens
    if asked.aborted != (reason == "abort"):
        return f"aborted is {asked.aborted}, and the reason {reason!r}"
    limit = min(how.max_tokens, engine.config.max_model_len - len(asked.prompt))
    eos = () if how.ignore_eos else engine.model.eos_token_ids
    ends = {*eos, *how.stop_token_ids}
    if ends & set(tokens[:-1]):
        return f"it goes on after one of the tokens {ends}"
    last = tokens[-1] if tokens else None
    expected = text = decode(engine.tokenizer, tokens)
    if reason == "stop" and last in how.stop_token_ids:
        expected = decode(engine.tokenizer, tokens[:-1])
    elif reason in ("stop", "abort"):
        # A string cuts the text; of an aborted request it may lag behind its tokens.
        expected = output.text
    if output.text != expected or not text.startswith(output.text):
        return f"its text is {output.text!r}, its tokens say {text!r}"
    if any(stop in output.text for stop in how.stop):
        return f"a stop string is in its text {output.text!r}"
    cut = any(text.startswith(output.text + stop) for stop in how.stop)
    fits = {
        "abort": len(tokens) < limit,
        "length": len(tokens) == limit and last not in ends,
        "eos": 0 < len(tokens) <= limit and last in eos,
        "stop": 0 < len(tokens) <= limit and (cut or last in how.stop_token_ids),
    }
    if not fits.get(str(reason), False):
        return f"{reason!r} does not fit {len(tokens)} of {limit} tokens, {output.text!r}"
    if how.logprobs is not None and [p.token for p in output.logprobs or ()] != tokens:
        return "its log-probabilities are not those of its tokens"
    if how.prompt_logprobs is not None and reason != "abort":
        reported = [p and p.token for p in output.prompt_logprobs or ()]
        if reported != [None, *asked.prompt[1:]]:
            return "its prompt's log-probabilities are not those of its tokens"
    return None


def is_same(output: RequestOutput, alone: RequestOutput) -> bool:
    """Whether an output is that of the same request alone, or if it was aborted its beginning."""
    n, aborted = len(output.tokens), output.finish_reason == "abort"
    if output.tokens != alone.tokens[:n] or not (aborted or n == len(alone.tokens)):
        return False
    if not aborted and (output.text, output.finish_reason) != (alone.text, alone.finish_reason):
        return False
    ours = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    theirs = [*(alone.logprobs or ())[:n], *(alone.prompt_logprobs or ())]
    return all(
        abs(a.logprob - b.logprob) < LOGPROB_TOLERANCE for a, b in zip(ours, theirs) if a and b
    )


def holdings(engine: Engine) -> dict[str, int]:
    """How many things an engine holds in each of its containers; its records are not among them."""
    owners = engine, engine.scheduler, engine.scheduler.slots
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, dict | list | set | deque)
    }


def check_blocks(engine: Engine, pins: np.ndarray) -> None:
    """Each block has as many references as tables name it, pins [num_blocks] added."""
    pool, tables = engine.host_policy.pool, engine.host_policy.block_tables
    named = tables.blocks[tables.blocks != NULL_BLOCK]
    owners = np.bincount(named, minlength=pool.num_blocks) + pins
    wrong = np.flatnonzero(pool.refcounts != owners)
    if len(wrong):
        block = int(wrong[0])
        raise Violation(
            "leaked_blocks",
            f"block {block} has {pool.refcounts[block]} references and {owners[block]} owners",
        )
    if pool.num_used != np.count_nonzero(owners):
        raise Violation(
            "leaked_blocks", f"{pool.num_used} blocks are in use, {np.count_nonzero(owners)} owned"
        )
