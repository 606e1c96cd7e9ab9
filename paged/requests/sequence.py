"""Requests inside the engine: sampling parameters, sequences, sequence groups (vLLM §4.5)."""

import dataclasses
import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from models.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS
from paged import checks
from paged.checks import is_real, is_text, is_whole, refusal, shown
from paged.requests.beam_search import BeamSearch
from paged.requests.stopping import TextStream

MAX_SEQUENCES = 2**16  # that run side by side, of one request or of many


@dataclass(frozen=True)
class SamplingParams:
    """How a request is decoded.

    max_tokens: tokens to generate at most; temperature: 0 is greedy; top_k: 0 is off; top_p: 1 is
    off; min_p: tokens less probable than this times the most probable one are left out (0: off).
    repetition_penalty: divides positive logits, multiplies negative ones, of tokens that the prompt
    or the output holds (1: off); presence_penalty, frequency_penalty: subtracted from the logits of
    tokens that the output holds, once or for each time (0: off). logit_bias: token → what is
    added to its logit. seed: makes the request's tokens repeatable whatever else runs (None: the
    engine draws one, another for each request).

    stop: strings that end the output and are cut from it; stop_token_ids: tokens that end it and
    stay in it, though not in its text; ignore_eos: generate to max_tokens. logprobs,
    prompt_logprobs: report the log-probability of each generated, or prompt, token and of this
    many best alternatives, 0 to MAX_LOGPROBS (None: report nothing). They are the model's own,
    before all of the above; a simulated device has none to report.

    n: sequences to return; best_of: sequences to sample, of which the n with the highest cumulative
    log-probability are returned (None: n). beam_width: above 1, beam search instead of sampling,
    equal to transformers' with num_beams, length_penalty and early_stopping (False, True or
    'never'); the n best hypotheses are returned.

    Raises ValueError for values of the wrong type or outside their range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self):
        checks.make_plain(self)
        self._copy_collections()
        most = (None, *range(MAX_LOGPROBS + 1))
        checks.require(self, {
            "max_tokens": (1 <= self.max_tokens < 2**31, "at least 1 and below 2^31"),
            "temperature": (
                self.temperature == 0 or self.temperature >= checks.SMALLEST,
                f"0 (greedy) or at least {checks.SMALLEST:.3g}",
            ),
            "top_k": (0 <= self.top_k < 2**31, "0 (off) or more, and below 2^31"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
            "repetition_penalty": (
                0.01 <= self.repetition_penalty <= 100,
                "from 0.01 to 100; 1 is off",
            ),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "from -2 to 2; 0 is off"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "from -2 to 2; 0 is off"),
            "seed": (self.seed is None or 0 <= self.seed < 2**32, "None or in [0, 2^32)"),
            "logprobs": (self.logprobs in most, f"None or from 0 to {MAX_LOGPROBS}"),
            "prompt_logprobs": (self.prompt_logprobs in most, f"None or from 0 to {MAX_LOGPROBS}"),
            "n": (1 <= self.n <= MAX_SEQUENCES, f"from 1 to {MAX_SEQUENCES}"),
            "best_of": (
                self.best_of is None or self.n <= self.best_of <= MAX_SEQUENCES,
                f"at least n ({self.n}) and at most {MAX_SEQUENCES}",
            ),
            "beam_width": (1 <= self.beam_width < MAX_LOGPROBS, f"from 1 to {MAX_LOGPROBS - 1}"),
            "length_penalty": (-10 <= self.length_penalty <= 10, "from -10 to 10"),
        })  # fmt: skip
        if self.is_beam_search:
            self._check_beam_search()
        elif self.num_sequences > 1 and self.temperature == 0:
            raise ValueError("n and best_of above 1 need a temperature above 0, or beam_width")

    def _check_beam_search(self) -> None:
        if self.n > self.beam_width:
            raise ValueError(f"n ({self.n}) must be at most beam_width ({self.beam_width})")
        plain = SamplingParams()
        for name in ("best_of", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                     "presence_penalty", "frequency_penalty", "logit_bias", "stop",
                     "stop_token_ids", "logprobs"):  # fmt: skip
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(f"beam search does not take {name} ({getattr(self, name)!r})")

    def _copy_collections(self) -> None:
        """Check collections and keep copies: nobody may change them behind the engine's back."""
        stop, ids, bias = self.stop, self.stop_token_ids, self.logit_bias
        if not isinstance(stop, tuple | list) or not all(is_text(s) and s for s in stop):
            raise refusal("stop", "a tuple of non-empty strings", stop)
        object.__setattr__(self, "stop", tuple(map(str, stop)))
        if not isinstance(ids, tuple | list) or not all(map(is_whole, ids)):
            raise refusal("stop_token_ids", "a tuple of token ids", ids)
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))
        if not isinstance(bias, Mapping):
            raise refusal("logit_bias", "a map of token ids to numbers", bias)
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias may name {MAX_LOGIT_BIAS} tokens, not {len(bias)}")
        for token, value in bias.items():
            if not is_whole(token) or not is_real(value) or abs(value) > 100:
                raise ValueError(
                    f"logit_bias must map token ids to numbers from -100 to 100, not "
                    f"{shown(token)} to {shown(value)}"
                )
        object.__setattr__(self, "logit_bias", {int(t): float(v) for t, v in bias.items()})

    @property
    def uses_history(self) -> bool:
        """Whether the tokens so far change the next one's logits otherwise than by the model."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0)

    @property
    def is_beam_search(self) -> bool:
        return self.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """Sequences that run side by side at most."""
        return self.beam_width if self.is_beam_search else self.best_of or self.n

    @property
    def ranks(self) -> bool:
        """Whether sequences are sampled that are not returned."""
        return self.num_sequences > self.n and not self.is_beam_search


def changed_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    named = ((f.name, getattr(sampling, f.name)) for f in dataclasses.fields(sampling))
    default = SamplingParams()
    return {name: value for name, value in named if value != getattr(default, name)}


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability, and the best alternatives' by token, best first."""

    token: int
    logprob: float
    top: dict[int, float]


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue: new, or preempted and to be recomputed
    RUNNING = "running"  # holds a slot and blocks
    SWAPPED = "swapped"  # in the queue, its blocks in the host's memory
    FINISHED = "finished"


class Sequence:
    """One line of tokens: a prompt and what is generated from it.

    While the sequence runs its tokens are in `Slots` under `slot`; otherwise they are here. donor:
    the sequence of its group whose first `shared` tokens it shares, until these are computed.
    """

    __slots__ = (
        "block_keys", "computed", "cumulative_logprob", "donor", "finish_reason", "group",
        "logprobs", "seed", "shared", "slot", "status", "text_stream", "tokens",
    )  # fmt: skip

    def __init__(self, group: "SequenceGroup", tokens: np.ndarray, seed: int):
        self.group, self.seed = group, seed
        self.tokens = tokens  # prompt and output, as far as the host has seen them
        self.status = Status.WAITING
        self.slot = -1
        self.finish_reason: str | None = None
        self.donor: Sequence | None = None
        self.shared = 0
        self.computed = 0  # tokens whose keys and values were swapped out
        # The prefix cache's chain over `tokens`, if it was needed since these changed.
        self.block_keys: list[tuple[bytes, bytes]] | None = None
        self.logprobs: list[TokenLogprob] = []  # of the output, where they are asked for
        self.text_stream: TextStream | None = None  # where its text is needed as it comes
        self.cumulative_logprob = 0.0  # of the output, where sequences are ranked by it

    @property
    def num_prompt_tokens(self) -> int:
        return self.group.num_prompt_tokens


def _seed_of(seed: int, index: int) -> int:
    """The first sequence of a group samples as it would alone, the others each otherwise."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) if index else seed


class SequenceGroup:
    """The sequences of one request: scheduled, preempted and resumed together (vLLM §4.5).

    order: arrival order, which preemption does not change. limit: tokens (prompt and output) at
    which generation ends. search: of a beam search, whose live beams `sequences` are, best first.
    Times are seconds on the engine's clock.
    """

    def __init__(
        self,
        request_id: str,
        order: int,
        prompt: np.ndarray,
        sampling: SamplingParams,
        seed: int,
        limit: int,
        eos_token_ids: tuple[int, ...] = (),
    ):
        self.request_id, self.order, self.sampling, self.limit = request_id, order, sampling, limit
        self.num_prompt_tokens = len(prompt)
        self.search: BeamSearch | None = None
        count = sampling.num_sequences
        if sampling.is_beam_search:
            count = 1
            self.search = BeamSearch(
                sampling.beam_width,
                limit - len(prompt),
                sampling.length_penalty,
                sampling.early_stopping,
                () if sampling.ignore_eos else eos_token_ids,
            )
        self.sequences = [Sequence(self, prompt, _seed_of(seed, i)) for i in range(count)]
        self.arrival_s = 0.0
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # taken from the prefix cache instead of computed
        self.swapped: Any = None  # what the policy keeps of it in the host's memory
        self.cache_salt = ""  # shares cached prefixes only with its like
        self.stream = False
        self.pin = False  # its prompt's blocks are to be kept
        self.mailbox: deque[RequestOutput] | None = None  # where outputs go that `step` leaves out
        # Where they are asked for.
        asked = 0 if sampling.prompt_logprobs is None else len(prompt)
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * asked

    @property
    def misses_prompt_logprobs(self) -> bool:
        """Whether some are asked for and not computed yet; the first token has none."""
        return None in self.prompt_logprobs[1:]

    @property
    def unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is not Status.FINISHED]

    @property
    def finished(self) -> bool:
        return not self.unfinished


def share_prefixes(sequences: list[Sequence], page_size: int, whole: bool = False) -> None:
    """Let each of a group's sequences share what it can with one before it.

    Sequences with equal tokens share all of them; others, unless only `whole` sequences can be
    shared, full blocks, without their last token.
    """
    for i, sequence in enumerate(sequences):
        sequence.donor, sequence.shared = None, 0
        for donor in sequences[:i]:
            shared = _shared_tokens(sequence.tokens, donor.tokens, page_size)
            if shared > sequence.shared and (not whole or shared == len(sequence.tokens)):
                sequence.donor, sequence.shared = donor, shared


def _shared_tokens(tokens: np.ndarray, donors: np.ndarray, page_size: int) -> int:
    n = min(len(tokens), len(donors))
    differ = np.flatnonzero(tokens[:n] != donors[:n])
    if len(tokens) == len(donors) and not len(differ):
        return n
    common = int(differ[0]) if len(differ) else n
    return min(common, len(tokens) - 1) // page_size * page_size


@dataclass(frozen=True)
class SequenceOutput:
    """One sequence of a request: all its tokens so far.

    finish_reason: None while it runs; 'eos', 'length', 'stop' (a stop string or token), 'abort', or
    'error' (the model's logits were not finite). logprobs: of each token, None if not asked for.
    score: of a beam search, the sum of log-probabilities over length ** length_penalty; with
    best_of above n, their sum; otherwise None.
    """

    tokens: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None = dataclasses.field(default=None, repr=False)
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What the engine returns of a request.

    sequences: n of them at the end, best first where they are ranked; all while it runs. tokens,
    text, finish_reason and logprobs are the first one's. prompt_logprobs: of each prompt token,
    None for the first and those not computed yet; None if not asked for.
    """

    request_id: str
    prompt_tokens: list[int] = dataclasses.field(repr=False)
    sequences: list[SequenceOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprob | None] | None = dataclasses.field(default=None, repr=False)

    @property
    def tokens(self) -> list[int]:
        return self.sequences[0].tokens

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.sequences[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.sequences[0].logprobs
