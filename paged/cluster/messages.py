"""Messages between the cluster and its runners."""

from dataclasses import dataclass
from typing import NamedTuple

from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.stats import EngineStats, Totals


@dataclass(frozen=True)
class ClusterRequest:
    """A request in the form that is sent to a runner. Any runner can continue it.

    order: order of arrival, which moves do not change.
    arrival_s: arrival in seconds on the cluster's clock.
    prompt: token ids.
    sampling: parameters with a seed. The seed is drawn before the request is placed, so that its
        tokens do not depend on the runner.
    adapter: the adapter that had the requested name at arrival. Runners read its folder themselves.
    known: the output so far, one entry for each sequence; empty if there is none. Always empty for
        a beam search, because a moved beam search starts over.
    """

    request_id: str
    order: int
    arrival_s: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    adapter: Adapter | None = None
    cache_salt: str = ""
    known: tuple[SequenceOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class Growth:
    """New output of one sequence of a request.

    index: the sequence's index in the request.
    start: number of output tokens before this growth.
    output: the new tokens and their log-probabilities, the sequence's score so far, and its finish
        reason if it has ended.
    """

    index: int
    start: int
    output: SequenceOutput


class Progress(NamedTuple):
    """Progress of one attempt at a request.

    growth: new output of each sequence that has new output.
    output: the whole output once the request has ended.
    refused: the engine's error message if it refused the request.
    """

    request_id: str
    attempt: int
    growth: tuple[Growth, ...] = ()
    output: RequestOutput | None = None
    refused: str | None = None


class Grown(NamedTuple):
    """A step's new tokens of all unfinished requests that have one sequence, and report neither
    log-probabilities nor scores. Nearly all requests are of this kind.

    requests: (request id, attempt, number of output tokens before the step, new tokens).
    """

    requests: list[tuple[str, int, int, list[int]]]


@dataclass(frozen=True)
class Status:
    """A runner's state, sent after each step, and from time to time while the runner is idle.

    working_set: (request id, attempt) of every accepted request that has not ended.
    free_tokens: KV memory, in tokens, that is free once the whole working set is admitted.
    kv_tokens: free KV memory without requests. A policy that quantises or divides memory has
        another capacity than kv_cache_tokens.
    newest: if KV memory has run out, id of the latest request, which should move; otherwise None.
    resident_adapters: names of the adapters on the device.
    adapter_loads: loads of adapters to the device so far.
    """

    working_set: frozenset[tuple[str, int]]
    free_tokens: int
    kv_tokens: int
    newest: str | None = None
    resident_adapters: frozenset[str] = frozenset()
    adapter_loads: int = 0


@dataclass(frozen=True)
class Figures:
    """A runner's figures for monitoring, sent from time to time.

    engine: the engine's current state.
    totals: counters since the runner's start.
    """

    engine: EngineStats
    totals: Totals


@dataclass(frozen=True)
class Lost:
    """The last event of a runner that has died. reason: a message for people."""

    reason: str


Event = Progress | Grown | Status | Figures | Lost
