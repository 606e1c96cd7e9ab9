"""A runner without an engine, the naive twin of `EngineRunner`: each sequence gets a token a step.

Nothing is told by itself: a test says when a runner steps and when its next events arrive.
"""

from collections import deque

from paged.cluster.messages import ClusterRequest, Event, Growth, Progress, Status
from paged.cluster.scheduler import Job, Limits
from paged.requests.sequence import RequestOutput, SequenceOutput


def token_at(request: ClusterRequest, index: int, place: int) -> int:
    """What sequence `index` generates as its token `place`, wherever it runs."""
    return hash((request.prompt, request.sampling.seed, index, place)) % 97


def length_of(request: ClusterRequest, index: int) -> int:
    """How many tokens it generates."""
    return max(1, request.sampling.max_tokens - 3 * index)


def whole_output(request: ClusterRequest) -> list[list[int]]:
    return [
        [token_at(request, index, place) for place in range(length_of(request, index))]
        for index in range(request.sampling.num_sequences)
    ]


class ToyRunner:
    """outbox: what it told and nobody has heard."""

    def __init__(self, limits: Limits):
        self.outbox: deque[list[Event]] = deque()
        self.added: list[tuple[str, int]] = []
        self._limits = limits
        self._inbox: deque[tuple[str, ClusterRequest | str, int]] = deque()
        self._jobs: dict[str, Job] = {}
        self._waiting: list[str] = []  # in vain for memory, or new

    def add(self, request: ClusterRequest, attempt: int) -> None:
        self.added.append((request.request_id, attempt))
        self._inbox.append(("add", request, attempt))

    def cancel(self, request_id: str, attempt: int) -> None:
        self._inbox.append(("cancel", request_id, attempt))

    def step(self) -> None:
        while self._inbox:
            verb, what, attempt = self._inbox.popleft()
            if isinstance(what, ClusterRequest):
                assert verb == "add" and what.request_id not in self._jobs, "it is here already"
                self._jobs[what.request_id] = Job(what, attempt, known=list(what.known))
                self._waiting.append(what.request_id)
            elif what in self._jobs and self._jobs[what].attempt == attempt:
                self._forget(what)
        starved = self._make_room()
        events: list[Event] = []
        for name, job in list(self._jobs.items()):
            if name not in self._waiting:
                events.append(self._generate(job))
        names = frozenset((name, job.attempt) for name, job in self._jobs.items())
        newest = None
        if starved and len(self._jobs) > 1:
            newest = max(self._jobs, key=lambda name: self._jobs[name].request.order)
        free = self._limits.kv_tokens - self._used(self._jobs)
        self.outbox.append([*events, Status(names, free, newest)])

    def _used(self, names) -> int:
        return sum(self._jobs[name].needed(self._limits) for name in names)

    def _make_room(self) -> bool:
        """Whether it had to stop a request, which waits now."""
        running = [name for name in self._jobs if name not in self._waiting]
        stopped = False
        while len(running) > 1 and self._used(running) > self._limits.kv_tokens:
            self._waiting.insert(0, running.pop())
            stopped = True
        while not stopped and self._waiting:
            if self._used([*running, self._waiting[0]]) > self._limits.kv_tokens:
                return True
            running.append(self._waiting.pop(0))
        assert self._used(running) <= self._limits.kv_tokens, "more memory than there is"
        batch = sum(self._jobs[name].width for name in self._jobs)
        assert batch <= self._limits.max_batch, "a larger batch than allowed"
        return stopped

    def _generate(self, job: Job) -> Progress:
        request, growth = job.request, []
        for index, known in enumerate(job.known):
            if known.finish_reason is None:
                place = len(known.tokens)
                ends = place + 1 == length_of(request, index)
                new = SequenceOutput([token_at(request, index, place)], "", "eos" if ends else None)
                growth.append(Growth(index, place, new))
                job.grow(growth[-1])
        output = None
        if all(known.finish_reason for known in job.known):
            output = RequestOutput(
                request.request_id, list(request.prompt), list(job.as_it_is().known), finished=True
            )
            self._forget(request.request_id)
        return Progress(request.request_id, job.attempt, tuple(growth), output)

    def _forget(self, name: str) -> None:
        del self._jobs[name]
        if name in self._waiting:
            self._waiting.remove(name)
