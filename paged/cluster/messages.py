"""What the cluster and its runners tell each other."""

from dataclasses import dataclass
from typing import NamedTuple

from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.stats import EngineStats, Totals


@dataclass(frozen=True)
class ClusterRequest:
    """A request as it travels; any runner can go on with it.

    order: of arrival, which moves do not change. arrival_s: on the cluster's clock. prompt: token
    ids. sampling: with its seed, drawn before the request is placed, so that its tokens do not
    depend on where it runs. adapter: the one that its name meant when it came; runners read its
    folder themselves. known: the output so far, one entry for each sequence; empty if there is
    none. A beam search has none: moved, it begins again.
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
    """What sequence `index` of a request got after its first `start` output tokens. output: the new
    tokens and their log-probabilities alone; its score so far, and why it ended, if it did."""

    index: int
    start: int
    output: SequenceOutput


class Progress(NamedTuple):
    """Of one attempt at a request. output: all of it, once it has ended. refused: why the engine
    did not take it, if so."""

    request_id: str
    attempt: int
    growth: tuple[Growth, ...] = ()
    output: RequestOutput | None = None
    refused: str | None = None


class Grown(NamedTuple):
    """What a step has given to requests of one sequence that go on and tell nothing but tokens, as
    nearly all do.

    requests: (request id, attempt, number of output tokens before, tokens) of each.
    """

    requests: list[tuple[str, int, int, list[int]]]


@dataclass(frozen=True)
class Status:
    """A runner after a step, and from time to time while it idles.

    working_set: (request id, attempt) of all that it has taken and not ended. free_tokens: of its
    KV memory, once all of these are admitted. newest: where KV memory has run out, its latest
    request, which should move; otherwise None. resident_adapters: names of those on its device.
    """

    working_set: frozenset[tuple[str, int]]
    free_tokens: int
    newest: str | None = None
    resident_adapters: frozenset[str] = frozenset()
    adapter_loads: int = 0


@dataclass(frozen=True)
class Figures:
    """A runner for people who watch it, from time to time: its engine now, and since its start."""

    engine: EngineStats
    totals: Totals


@dataclass(frozen=True)
class Lost:
    """The last event of a runner that has died: nothing more will come. reason: for people."""

    reason: str


Event = Progress | Grown | Status | Figures | Lost
