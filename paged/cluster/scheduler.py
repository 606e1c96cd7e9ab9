"""Which GPU serves which request: functions that only read plain state (Punica §5.1, §5.3).

Where the paper leaves a choice, ours are these. A working set counts sequences, beams at full
width. Memory is enough for a request if its prompt, its known output and a token more of each
sequence fit, in whole pages, above a watermark. GPUs are consolidated one a period, and only if a
whole one that is lightly loaded fits on others that are busy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paged.cluster.messages import ClusterRequest, Growth
from paged.config import EngineConfig
from paged.known_output import GOES_ON
from paged.requests.sequence import SequenceOutput

CONSOLIDATED = 0.25  # the load up to which a GPU is emptied, if the others have room
LIGHT = 0.5  # the load below which a GPU counts as lightly loaded: no more are needed


@dataclass(frozen=True)
class Limits:
    """What each GPU has.

    max_batch: sequences.
    moves: whether a request with output may move; the other GPU recomputes its keys and values.
    """

    max_batch: int
    kv_tokens: int
    page_size: int
    watermark_tokens: int
    moves: bool = True

    @classmethod
    def of(cls, config: EngineConfig) -> "Limits":
        blocks = config.num_blocks - 1
        return cls(
            max_batch=config.max_num_seqs,
            kv_tokens=blocks * config.page_size,
            page_size=config.page_size,
            watermark_tokens=int(config.watermark * blocks) * config.page_size,
            moves=config.capabilities.recompute,
        )

    def needed(self, num_tokens: int) -> int:
        """KV memory, in tokens, of a sequence that is to get one token more."""
        return (num_tokens // self.page_size + 1) * self.page_size


@dataclass
class Job:
    """A request that the cluster has accepted, with what is known of its output by now.

    attempt: the number of its placement among all of the cluster's, 0 in the queue; whatever comes
    from another one is dropped. gpu: where it is, None in the queue. placements: how many so far.
    """

    request: ClusterRequest
    attempt: int = 0
    gpu: str | None = None
    placements: int = 0
    first_token_s: float | None = None
    known: list[SequenceOutput] = field(default_factory=list)

    def __post_init__(self):
        if not self.known and not self.request.sampling.is_beam_search:
            self.known = [SequenceOutput([], "", None) for _ in range(self.width)]

    @property
    def width(self) -> int:
        """Sequences side by side."""
        return self.request.sampling.num_sequences

    @property
    def has_output(self) -> bool:
        return any(output.tokens for output in self.known)

    def needed(self, limits: Limits) -> int:
        """KV memory in tokens; sharing among its sequences is not counted on."""
        prompt = len(self.request.prompt)
        if not self.known:
            return self.width * limits.needed(prompt)
        goes_on = (output for output in self.known if output.finish_reason in GOES_ON)
        return sum(limits.needed(prompt + len(output.tokens)) for output in goes_on)

    def grow(self, growth: Growth) -> None:
        """Append what a runner has generated."""
        known, new = self.known[growth.index], growth.output
        assert len(known.tokens) == growth.start, "a token is lost or repeated"
        known.tokens.extend(new.tokens)
        logprobs = None if new.logprobs is None else [*(known.logprobs or []), *new.logprobs]
        self.known[growth.index] = replace(new, tokens=known.tokens, logprobs=logprobs)

    def as_it_is(self) -> ClusterRequest:
        """The request with the output so far, which later tokens leave unchanged."""
        known = tuple(replace(output, tokens=list(output.tokens)) for output in self.known)
        return replace(self.request, known=known if self.has_output else ())


@dataclass
class Gpu:
    """One GPU as the scheduler sees it.

    free_tokens: of its KV memory, and adapter_loads, as its runner said last. promised: tokens of
    those requests, by (id, attempt), that it has been given and the runner did not count yet.
    batch: sequences of the working set.
    """

    uuid: str
    limits: Limits
    free_tokens: int
    working_set: dict[str, Job] = field(default_factory=dict)
    promised: dict[tuple[str, int], int] = field(default_factory=dict)
    adapter_loads: int = 0
    batch: int = 0

    @property
    def room(self) -> int:
        return self.free_tokens - sum(self.promised.values())

    @property
    def load(self) -> float:
        """The share of its batch or of its memory that is taken, whichever is larger."""
        if not self.working_set:
            return 0.0
        return max(self.batch / self.limits.max_batch, 1 - self.room / self.limits.kv_tokens)

    def takes(self, job: Job) -> bool:
        """Whether there is batch room and KV room."""
        watermark = self.limits.watermark_tokens if self.working_set else 0
        fits = self.batch + job.width <= self.limits.max_batch
        return fits and self.room >= job.needed(self.limits) + watermark

    def add(self, job: Job) -> None:
        self.working_set[job.request.request_id] = job
        self.batch += job.width
        self.promised[job.request.request_id, job.attempt] = job.needed(self.limits)

    def remove(self, job: Job) -> None:
        """Its memory counts as free once the runner says so."""
        del self.working_set[job.request.request_id]
        self.batch -= job.width
        self.promised.pop((job.request.request_id, job.attempt), None)


@dataclass
class ClusterState:
    """The GPUs by UUID, and the requests that found no room on any, by order of arrival."""

    limits: Limits
    gpus: dict[str, Gpu] = field(default_factory=dict)
    queue: list[Job] = field(default_factory=list)


class Move(NamedTuple):
    request_id: str
    source: str
    target: str


class Hints(NamedTuple):
    """For whoever hires GPUs. scale_up: whether more are needed. release: UUIDs of those that can
    be given back."""

    scale_up: bool
    release: list[str]


def place(state: ClusterState, job: Job) -> str | None:
    """The GPU for a request: of those that have room, that with the largest working set, of equal
    ones the highest UUID; None if all are full (§5.1)."""
    fitting = (gpu for gpu in state.gpus.values() if gpu.takes(job))
    best = max(fitting, key=lambda gpu: (gpu.batch, gpu.uuid), default=None)
    return None if best is None else best.uuid


def newest(gpu: Gpu) -> Job | None:
    """Whom to evict from a GPU that is out of KV memory: its latest request, which preserves first
    come, first served (§5.3). None if it has but one, which fits alone."""
    if len(gpu.working_set) < 2:
        return None
    return max(gpu.working_set.values(), key=lambda job: job.request.order)


def rebalance(state: ClusterState) -> list[Move]:
    """Moves that empty one GPU: the most lightly loaded whose requests all fit on other busy ones.

    None while requests queue, if the policy cannot recompute output, and none of GPUs that run beam
    searches, which would begin again.
    """
    if state.queue or not state.limits.moves:
        return []
    busy = [gpu for gpu in state.gpus.values() if gpu.working_set]
    light = [gpu for gpu in busy if gpu.load <= CONSOLIDATED]
    for source in sorted(light, key=lambda gpu: (gpu.batch, gpu.uuid)):
        moves = list(_emptied(source, [gpu for gpu in busy if gpu is not source], state.limits))
        if len(moves) == len(source.working_set):
            return moves
    return []


def _emptied(source: Gpu, others: list[Gpu], limits: Limits) -> Iterator[Move]:
    """Where the requests of `source` would go, until one finds no room."""
    trial = ClusterState(limits, {
        gpu.uuid: replace(gpu, working_set=dict(gpu.working_set), promised=dict(gpu.promised))
        for gpu in others
    })  # fmt: skip
    for job in sorted(source.working_set.values(), key=lambda job: job.request.order):
        target = None if job.request.sampling.is_beam_search else place(trial, job)
        if target is None:
            return
        trial.gpus[target].add(job)
        yield Move(job.request.request_id, source.uuid, target)


def hints(state: ClusterState) -> Hints:
    """More GPUs are needed if none is lightly loaded, and idle ones can go (§5.1); of these one
    stays where no other is lightly loaded, or it would be asked for again at once."""
    light = [gpu for gpu in state.gpus.values() if gpu.load < LIGHT]
    idle = sorted(gpu.uuid for gpu in light if not gpu.working_set)
    return Hints(not light, idle if len(idle) < len(light) else idle[:-1])
