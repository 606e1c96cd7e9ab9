"""Requests inside the engine: sequences, and sequence groups of parallel samples or beams (vLLM
§4.4, §4.5)."""

import dataclasses
import enum
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.blocks.prefix_cache import root_key
from paged.requests.adapter import Adapter
from paged.requests.beam_search import BeamSearch
from paged.requests.sampling_params import SamplingParams
from paged.requests.stopping import TextStream


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability.

    top: natural log-probabilities of the best alternatives by token, best first.
    """

    token: int
    logprob: float
    top: dict[int, float]


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue: new, or preempted and to be recomputed
    RUNNING = "running"  # holds a slot and blocks
    SWAPPED = "swapped"  # in the queue, its blocks in the host's memory
    FINISHED = "finished"


class Sequence:
    """A prompt and its generated output.

    tokens: prompt and output, as far as the host has read them. While the sequence runs, they are
        in row `slot` of `Slots.tokens` instead.
    parent: the sequence of the same group with which it shares its first `shared` tokens; None
        once these are computed.
    """

    __slots__ = (
        "block_keys", "computed", "cumulative_logprob", "finish_reason", "group", "logprobs",
        "parent", "seed", "shared", "slot", "status", "text_stream", "tokens",
    )  # fmt: skip

    def __init__(self, group: "SequenceGroup", tokens: np.ndarray, seed: int):
        self.group, self.seed = group, seed
        self.tokens = tokens
        self.status = Status.WAITING
        self.slot = -1
        self.finish_reason: str | None = None
        self.parent: Sequence | None = None
        self.shared = 0
        self.computed = 0  # tokens whose keys and values were swapped out
        # The result of `Prefixes.links`, computed when needed.
        self.block_keys: list[tuple[bytes, bytes]] | None = None
        self.logprobs: list[TokenLogprob] = []  # log-probabilities of the output, if requested
        self.text_stream: TextStream | None = None  # for stop strings and streaming
        self.cumulative_logprob = 0.0  # the output's sum, if sequences are ranked

    @property
    def num_prompt_tokens(self) -> int:
        return self.group.num_prompt_tokens

    def prefill_tokens(self, replays: bool) -> np.ndarray:
        """Tokens to prefill. replays: whether known output is replayed instead."""
        return self.tokens[: self.num_prompt_tokens] if replays else self.tokens

    @property
    def still_forced(self) -> tuple[int, ...]:
        """The forced output that is not generated yet."""
        return self.group.sampling.forced_output[len(self.tokens) - self.num_prompt_tokens :]


def _seed_of(seed: int, index: int) -> int:
    """The seed of a group's sequence `index`. Sequence 0 samples as if it were the only one."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) if index else seed


class SequenceGroup:
    """The sequences of one request: scheduled, preempted and resumed together (vLLM §4.5).

    order: number in the order of calls, whatever `arrival_time` is; preemption does not change it.
    limit: tokens (prompt and output) at which generation ends.
    search: the beam search, whose live beams are `sequences`, best first; None for other requests.

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
        self.num_cached_tokens = 0  # tokens from the prefix cache or a pin, also in recomputations
        self.swapped: Any = None  # the result of `HostPolicy.swap_out`, until `swap_in`
        self.cache_salt = ""  # cached prefixes are shared only if salts are equal
        self.adapter: Adapter | None = None
        self.adapter_slot = -1  # adapter slot on the device while the group runs
        self.overtaken = 0  # later groups that started first while this group's adapter was absent
        self.stream = False
        self.pin = False  # whether its prompt's blocks are pinned when it ends
        self.mailbox: deque[RequestOutput] | None = None  # receives the outputs instead of `step`
        # Each entry is None until it is computed. The list is empty if not requested.
        asked = 0 if sampling.prompt_logprobs is None else len(prompt)
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * asked

    @property
    def cache_root(self) -> bytes:
        """The key of the empty prefix, equal for groups that may share cached prefixes."""
        if self.adapter is None:
            return root_key(self.cache_salt)
        return root_key(self.cache_salt, self.adapter.name, self.adapter.content_hash)

    @property
    def misses_prompt_logprobs(self) -> bool:
        """Whether requested log-probabilities of the prompt are not computed yet. The first token
        has none."""
        return None in self.prompt_logprobs[1:]

    @property
    def unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is not Status.FINISHED]

    @property
    def finished(self) -> bool:
        return not self.unfinished


def share_prefixes(
    sequences: list[Sequence], page_size: int, whole: bool = False, replays: bool = False
) -> None:
    """Set each sequence's parent: the earlier sequence of its group with which it can share most of
    its prefilled tokens.

    Sequences with equal tokens share all of them. Others share the full blocks before the first
    difference and before their own last token, or nothing if `whole`.
    """
    prefills = [sequence.prefill_tokens(replays) for sequence in sequences]
    for i, (sequence, tokens) in enumerate(zip(sequences, prefills)):
        sequence.parent, sequence.shared = None, 0
        for parent, theirs in zip(sequences[:i], prefills):
            shared = _shared_tokens(tokens, theirs, page_size)
            if shared > sequence.shared and (not whole or shared == len(tokens)):
                sequence.parent, sequence.shared = parent, shared


def _shared_tokens(tokens: np.ndarray, theirs: np.ndarray, page_size: int) -> int:
    n = min(len(tokens), len(theirs))
    differ = np.flatnonzero(tokens[:n] != theirs[:n])
    if len(tokens) == len(theirs) and not len(differ):
        return n
    common = int(differ[0]) if len(differ) else n
    return min(common, len(tokens) - 1) // page_size * page_size


@dataclass(frozen=True)
class SequenceOutput:
    """One sequence of a request.

    tokens: the output so far.
    finish_reason: None while it runs; 'eos', 'length', 'stop' (a stop string or token), 'abort', or
        'error' (logits that are not finite, an adapter that cannot be loaded, a failed engine).
    logprobs: log-probabilities of each token; None if not requested.
    score: in a beam search, the sum of log-probabilities divided by length ** length_penalty; with
        best_of above n, the sum; otherwise None.
    """

    tokens: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None = dataclasses.field(default=None, repr=False)
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The output of a request, so far or at its end.

    sequences: all sequences while the request runs; n at its end, the best first if they are
        ranked.
    tokens, text, finish_reason, logprobs: fields of the first sequence.
    prompt_logprobs: log-probabilities of each prompt token, with None for the first token and for
        tokens not computed yet; None if not requested.
    cached_tokens: tokens from the prefix cache or a pinned prefix, also in recomputations after
        preemptions; at most the number of prompt tokens.
    """

    request_id: str
    prompt_tokens: list[int] = dataclasses.field(repr=False)
    sequences: list[SequenceOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprob | None] | None = dataclasses.field(default=None, repr=False)
    cached_tokens: int = dataclasses.field(default=0, compare=False, repr=False)

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
