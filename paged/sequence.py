"""Requests inside the engine: sampling parameters, sequences, sequence groups (vLLM §4.5)."""

import dataclasses
import enum
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How a request is decoded.

    max_tokens: tokens to generate at most; temperature: 0 is greedy; top_k: 0 is off; top_p: 1 is
    off; seed: makes the request's tokens repeatable whatever else runs (None: the engine draws one,
    another for each request); stop: strings that end the output and are cut from it; ignore_eos:
    generate to max_tokens.

    Raises ValueError for values of the wrong type or outside their range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer | None) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
        checks = {
            "max_tokens": (1 <= self.max_tokens < 2**31, "at least 1 and below 2^31"),
            "temperature": (
                self.temperature >= 0 and math.isfinite(self.temperature), "0 or more, and finite",
            ),
            "top_k": (0 <= self.top_k < 2**31, "0 (off) or more, and below 2^31"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "seed": (self.seed is None or 0 <= self.seed < 2**32, "None or in [0, 2^32)"),
        }  # fmt: skip
        for name, (good, allowed) in checks.items():
            if not good:
                raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be a tuple of non-empty strings, not {self.stop!r}")


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue: new, or preempted and to be recomputed
    RUNNING = "running"  # holds a slot and blocks
    FINISHED = "finished"


class Sequence:
    """One line of tokens: a prompt and what is generated from it.

    While the sequence runs its tokens are in `Slots` under `slot`; otherwise they are here.
    """

    __slots__ = ("finish_reason", "group", "seed", "slot", "status", "tokens")

    def __init__(self, group: "SequenceGroup", tokens: np.ndarray, seed: int):
        self.group, self.seed = group, seed
        self.tokens = tokens  # prompt and output, as far as the host has seen them
        self.status = Status.WAITING
        self.slot = -1
        self.finish_reason: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return self.group.num_prompt_tokens

    @property
    def output_tokens(self) -> np.ndarray:
        return self.tokens[self.num_prompt_tokens :]


class SequenceGroup:
    """The sequences of one request: scheduled, preempted and resumed together.

    order: arrival order, which preemption does not change. limit: tokens (prompt and output) at
    which generation ends. Times are seconds on the engine's clock.
    """

    def __init__(
        self,
        request_id: str,
        order: int,
        prompt: np.ndarray,
        sampling: SamplingParams,
        seed: int,
        limit: int,
    ):
        self.request_id, self.order, self.sampling, self.limit = request_id, order, sampling, limit
        self.num_prompt_tokens = len(prompt)
        self.sequences = [Sequence(self, prompt, seed)]
        self.arrival_s = 0.0
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # taken from the prefix cache instead of computed
        self.cache_salt = ""  # shares cached prefixes only with its like
        self.stream = False

    @property
    def finished(self) -> bool:
        return all(s.status is Status.FINISHED for s in self.sequences)


@dataclass(frozen=True)
class RequestOutput:
    """What the engine returns of a request: all its tokens so far.

    finish_reason: None while it runs; 'eos', 'length', 'stop' (a stop string), 'abort', or 'error'
    (the model's logits were not finite).
    """

    request_id: str
    prompt_tokens: list[int] = dataclasses.field(repr=False)
    tokens: list[int]
    text: str
    finished: bool
    finish_reason: str | None
