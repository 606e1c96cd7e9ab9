"""Placement and migration of requests on GPUs: functions of plain state (Punica §5.1, §5.3).

Choices that the paper leaves open:

* The size of a working set is its number of sequences. A beam search has as many as its beam width.
* A GPU has memory for a request if the prompt, the known output and one more token of each
  sequence fit, in whole pages, above a watermark. An idle GPU has memory for every accepted
  request.
* In each period at most one GPU is emptied. Its load is at most CONSOLIDATED, and all its requests
  fit on other busy GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paged.cluster.messages import ClusterRequest, Growth
from paged.config import EngineConfig
from paged.known_output import GOES_ON
from paged.requests.sequence import SequenceOutput

CONSOLIDATED = 0.25  # load up to which a GPU is emptied, if other GPUs have room
LIGHT = 0.5  # load below which a GPU is lightly loaded; with one such GPU, no more are needed


@dataclass(frozen=True)
class Limits:
    """The capacity of each GPU.

    max_batch: sequences in a batch.
    kv_tokens: KV memory by the configuration, in tokens.
    """

    max_batch: int
    kv_tokens: int
    page_size: int
    watermark_tokens: int

    @classmethod
    def of(cls, config: EngineConfig) -> "Limits":
        blocks = config.num_blocks - 1
        return cls(
            max_batch=config.max_num_seqs,
            kv_tokens=blocks * config.page_size,
            page_size=config.page_size,
            watermark_tokens=int(config.watermark * blocks) * config.page_size,
        )

    def needed(self, num_tokens: int) -> int:
        """KV memory, in tokens, of a sequence of `num_tokens` tokens and one more."""
        return (num_tokens // self.page_size + 1) * self.page_size


@dataclass
class Job:
    """A request that the cluster has accepted, with its output so far.

    attempt: the number of its current placement, unique in the cluster; 0 in the queue. Events of
        other attempts are dropped.
    gpu: the UUID of its GPU; None in the queue.
    placements: how often it has been placed.
    known: the output so far, by sequence; empty for a beam search.
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
        """Sequences that the request runs in parallel."""
        return self.request.sampling.num_sequences

    @property
    def has_output(self) -> bool:
        return any(output.tokens for output in self.known)

    def needed(self, limits: Limits) -> int:
        """KV memory in tokens, as if its sequences shared no blocks."""
        prompt = len(self.request.prompt)
        if not self.known:
            return self.width * limits.needed(prompt)
        goes_on = (output for output in self.known if output.finish_reason in GOES_ON)
        return sum(limits.needed(prompt + len(output.tokens)) for output in goes_on)

    def grow(self, growth: Growth) -> None:
        """Append a runner's new output."""
        known, new = self.known[growth.index], growth.output
        assert len(known.tokens) == growth.start, "a token is lost or repeated"
        known.tokens.extend(new.tokens)
        logprobs = None if new.logprobs is None else [*(known.logprobs or []), *new.logprobs]
        self.known[growth.index] = replace(new, tokens=known.tokens, logprobs=logprobs)

    def as_it_is(self) -> ClusterRequest:
        """The request with a copy of the output so far."""
        known = tuple(replace(output, tokens=list(output.tokens)) for output in self.known)
        return replace(self.request, known=known if self.has_output else ())


@dataclass
class Gpu:
    """One GPU as the scheduler sees it.

    free_tokens, kv_tokens: free KV memory, in tokens, and all of it, by the runner's last status.
    working_set: its unfinished requests, by id.
    promised: KV tokens of requests that the runner's last status does not include yet, by (id,
        attempt).
    adapter_loads: loads so far, by the runner's last status.
    batch: sequences of the working set.
    """

    uuid: str
    limits: Limits
    free_tokens: int
    kv_tokens: int
    working_set: dict[str, Job] = field(default_factory=dict)
    promised: dict[tuple[str, int], int] = field(default_factory=dict)
    adapter_loads: int = 0
    batch: int = 0

    @property
    def room(self) -> int:
        return self.free_tokens - sum(self.promised.values())

    @property
    def load(self) -> float:
        """The taken share of the batch or of the KV memory, whichever is larger."""
        if not self.working_set:
            return 0.0
        return max(self.batch / self.limits.max_batch, 1 - self.room / self.kv_tokens)

    def takes(self, job: Job) -> bool:
        """Whether the job fits into the batch and into KV memory."""
        if self.batch + job.width > self.limits.max_batch:
            return False
        # `submit` refuses what no idle GPU can serve. A sequence may need fewer tokens than
        # `needed`, because policies quantise and drop tokens.
        needed = job.needed(self.limits) + self.limits.watermark_tokens
        return not self.working_set or self.room >= needed

    def add(self, job: Job) -> None:
        self.working_set[job.request.request_id] = job
        self.batch += job.width
        self.promised[job.request.request_id, job.attempt] = job.needed(self.limits)

    def remove(self, job: Job) -> None:
        """Remove a job. `free_tokens` includes its memory after the runner's next status."""
        del self.working_set[job.request.request_id]
        self.batch -= job.width
        self.promised.pop((job.request.request_id, job.attempt), None)


@dataclass
class ClusterState:
    """The scheduler's state.

    gpus: the GPUs, by UUID.
    queue: requests that wait for a GPU, in order of arrival.
    """

    limits: Limits
    gpus: dict[str, Gpu] = field(default_factory=dict)
    queue: list[Job] = field(default_factory=list)


class Move(NamedTuple):
    request_id: str
    source: str
    target: str


class Hints(NamedTuple):
    """Hints for renting GPUs.

    scale_up: whether more GPUs are needed.
    release: UUIDs of GPUs that can be released.
    """

    scale_up: bool
    release: list[str]


def place(state: ClusterState, job: Job) -> str | None:
    """The UUID of the GPU for a request: among GPUs with room, the GPU with the largest working
    set, on ties the highest UUID (§5.1). None if no GPU has room."""
    fitting = (gpu for gpu in state.gpus.values() if gpu.takes(job))
    best = max(fitting, key=lambda gpu: (gpu.batch, gpu.uuid), default=None)
    return None if best is None else best.uuid


def newest(gpu: Gpu) -> Job | None:
    """The request to evict from a GPU that is out of KV memory: the latest, which preserves first
    come, first served (§5.3). None if the GPU has a single request, which fits alone."""
    if len(gpu.working_set) < 2:
        return None
    return max(gpu.working_set.values(), key=lambda job: job.request.order)


def rebalance(state: ClusterState) -> list[Move]:
    """Moves that empty one GPU. Its load is at most CONSOLIDATED, and all its requests fit on other
    busy GPUs. If several GPUs qualify, the GPU with the smallest batch is emptied.

    No moves while requests are queued. GPUs that run beam searches are not emptied: a moved beam
    search starts over.
    """
    if state.queue:
        return []
    busy = [gpu for gpu in state.gpus.values() if gpu.working_set]
    light = [gpu for gpu in busy if gpu.load <= CONSOLIDATED]
    for source in sorted(light, key=lambda gpu: (gpu.batch, gpu.uuid)):
        moves = list(_emptied(source, [gpu for gpu in busy if gpu is not source], state.limits))
        if len(moves) == len(source.working_set):
            return moves
    return []


def _emptied(source: Gpu, others: list[Gpu], limits: Limits) -> Iterator[Move]:
    """Moves of the requests of `source`, up to the first request that no other GPU can take."""
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
    """More GPUs are needed if none is lightly loaded. Idle GPUs can be released (§5.1). If all
    lightly loaded GPUs are idle, one GPU stays: it would be requested again at once."""
    light = [gpu for gpu in state.gpus.values() if gpu.load < LIGHT]
    idle = sorted(gpu.uuid for gpu in light if not gpu.working_set)
    return Hints(not light, idle if len(idle) < len(light) else idle[:-1])
