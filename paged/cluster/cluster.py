"""The cluster: accepts requests, places them on runners and moves them (Punica §5.1, §5.3)."""

import bisect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from models.config import ModelConfig
from paged.adapters.known import KnownAdapters
from paged.checks import is_text, refusal
from paged.cluster.messages import ClusterRequest, Event, Figures, Grown, Lost, Progress, Status
from paged.cluster.runner import Runner
from paged.cluster.scheduler import (
    ClusterState,
    Gpu,
    Hints,
    Job,
    Limits,
    hints,
    newest,
    place,
    rebalance,
)
from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.validation import Prompt, check_model, check_salt, validated_prompt


@dataclass(frozen=True)
class Arrival:
    """A future request. arrival_s: seconds after the start of `serve`."""

    arrival_s: float
    prompt: Prompt
    sampling: SamplingParams
    adapter: str | None = None


@dataclass(frozen=True)
class ClusterRecord:
    """One request that has ended. Times are seconds on the cluster's clock.

    first_token_s: None for a beam search, and if the request ended before its first token.
    placements: how often the request was placed on a runner.
    """

    request_id: str
    adapter: str | None
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    placements: int
    finish_reason: str


class Cluster:
    """Applies the runners' events to the scheduler's state, and executes the scheduler's decisions.

    It has no threads: `LiveCluster` and `SimulatedCluster` pass events to `receive`. All runners
    serve one model under one configuration, which has the batch limit (`max_num_seqs`).

    now: returns the time in seconds.
    jobs: unfinished requests, by id.
    outputs: outputs of ended requests, by id; the caller removes them.
    refused: error messages of requests that an engine refused, by id. Such requests end with reason
        'error'.
    records: one for each request that has ended.
    figures: each runner's latest `Figures`, by UUID, dead runners included.
    num_tokens: tokens generated so far, without beam searches.
    num_evictions, num_consolidations, num_recoveries: moves of requests, by cause.
    num_adapter_loads: loads of adapters to the runners' devices.
    """

    def __init__(
        self, runners: Mapping[str, Runner], model: ModelConfig, config: EngineConfig,
        tokenizer=None, now: Callable[[], float] = time.monotonic, dtype: str = "float32",
    ):  # fmt: skip
        """dtype: of the runners' weights.

        Raises ValueError without runners, or if the model and the configuration do not fit."""
        if not runners:
            raise ValueError("a cluster needs at least one runner")
        check_model(model, config)
        self._model, self._config, self._tokenizer = model, config, tokenizer
        self._sizes = policy_of(config.policy).sizes(
            config, ShardedModel.split(model, config.tensor_parallel, dtype)
        )
        self._rng = np.random.default_rng(config.seed)
        self._runners, self._now = dict(runners), now
        limits = Limits.of(config)
        gpus = {
            uuid: Gpu(uuid, limits, limits.kv_tokens, limits.kv_tokens) for uuid in self._runners
        }
        self.state = ClusterState(limits, gpus)
        self.jobs: dict[str, Job] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.refused: dict[str, str] = {}
        self.records: list[ClusterRecord] = []
        self.figures: dict[str, Figures] = {}
        self.adapters = KnownAdapters(model, config, dtype)
        self._orders, self._numbers = itertools.count(), itertools.count()
        self._attempts = itertools.count(1)
        self.num_tokens = self.num_evictions = self.num_consolidations = self.num_recoveries = 0
        self.num_adapter_loads = 0

    def has_unfinished(self) -> bool:
        return bool(self.jobs)

    def add_adapter(self, name: str, folder: str | Path) -> None:
        """Add a LoRA adapter, from a folder that PEFT wrote, under a name for requests. Each runner
        reads the folder itself when a request needs it. Adding an existing name replaces its
        content for later requests; earlier requests keep the old content, wherever they move.

        Raises ValueError as `Engine.add_adapter` does.
        """
        self.add_known_adapter(self.adapters.read(name, folder))

    def add_known_adapter(self, adapter: Adapter) -> None:
        """See `Engine.add_known_adapter`."""
        self.adapters.check(adapter)
        # A runner in another process may work in another folder.
        folder = str(Path(adapter.folder).expanduser().absolute())
        self.adapters.add(replace(adapter, folder=folder))

    def submit(
        self, prompt: Prompt, sampling: SamplingParams | None = None, request_id: str | None = None,
        *, adapter: str | None = None, cache_salt: str = "",
    ) -> str:  # fmt: skip
        """Accept a request, place it if a GPU has room, and return its id. `jobs` has the output so
        far until the request ends; then `outputs` has the whole output.

        Raises ValueError, and accepts nothing, for a request that no runner could serve, and for an
        id that is in `jobs` or `outputs`. Raises RuntimeError if all runners have died.
        """
        if not self.state.gpus:
            raise RuntimeError("all runners have died")
        how = SamplingParams() if sampling is None else sampling
        tokens = validated_prompt(
            prompt, how, self._tokenizer, self._model, self._config, self._sizes
        )
        known = self.adapters.named(adapter)
        check_salt(cache_salt)
        name = self._new_id() if request_id is None else request_id
        if not is_text(name):
            raise refusal("request_id", "a text", name)
        if self._in_use(name):
            raise ValueError(f"request id {name!r} is in use")
        if how.seed is None:
            how = replace(how, seed=int(self._rng.integers(2**32)))
        request = ClusterRequest(
            name, next(self._orders), self._now(), tuple(tokens.tolist()), how, known, cache_salt
        )
        job = self.jobs[name] = Job(request)
        self._queue(job)
        self._place_queued()
        return name

    def _in_use(self, request_id: str) -> bool:
        return request_id in self.jobs or request_id in self.outputs

    def _new_id(self) -> str:
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if not self._in_use(name))

    def cancel(self, request_id: str) -> RequestOutput:
        """End a request, queued or placed, and return its output so far.

        Raises ValueError for an id that is unknown or has ended.
        """
        if request_id not in self.jobs:
            raise ValueError(f"request {request_id!r} is unknown or has ended")
        job = self.jobs[request_id]
        self._take_away(job)
        self._end(job, _so_far(job, "abort"))
        self._place_queued()
        return self.outputs.pop(request_id)

    def cancel_all(self) -> None:
        """End every request, queued or placed; `outputs` then has their outputs so far."""
        # Queued requests are cancelled first: otherwise they would be placed as room becomes free.
        for request_id in sorted(self.jobs, key=lambda name: self.jobs[name].gpu is not None):
            self.outputs[request_id] = self.cancel(request_id)

    def receive(self, uuid: str, events: Sequence[Event]) -> None:
        """Apply a runner's events, then place queued requests."""
        for event in events:
            if uuid not in self.state.gpus:  # The runner has already been declared dead.
                return
            if isinstance(event, Progress):
                self._progress(uuid, event)
            elif isinstance(event, Grown):
                self._grown(event)
            elif isinstance(event, Status):
                self._status(self.state.gpus[uuid], event)
            elif isinstance(event, Figures):
                self.figures[uuid] = event
            elif isinstance(event, Lost):
                self._lose(self.state.gpus[uuid])
        self._place_queued()

    def rebalance(self) -> None:
        """Empty a lightly loaded GPU if its requests fit on busy GPUs; called once a period."""
        for request_id, _, target in rebalance(self.state):
            job = self.jobs[request_id]
            self._take_away(job)
            self._start(job, target)
            self.num_consolidations += 1

    def hints(self) -> Hints:
        return hints(self.state)

    def _queue(self, job: Job) -> None:
        bisect.insort(self.state.queue, job, key=lambda job: job.request.order)

    def _place_queued(self) -> None:
        """First come, first served: no request is placed before the head of the queue."""
        queue = self.state.queue
        while queue and (uuid := place(self.state, queue[0])) is not None:
            self._start(queue.pop(0), uuid)

    def _start(self, job: Job, uuid: str) -> None:
        job.gpu, job.attempt = uuid, next(self._attempts)
        job.placements += 1
        self.state.gpus[uuid].add(job)
        self._runners[uuid].add(job.as_it_is(), job.attempt)

    def _take_away(self, job: Job) -> None:
        """Remove a job from its GPU, or from the queue."""
        if job.gpu is None:
            self.state.queue.remove(job)
            return
        self._runners[job.gpu].cancel(job.request.request_id, job.attempt)
        self.state.gpus[job.gpu].remove(job)
        job.gpu, job.attempt = None, 0

    def _progress(self, uuid: str, event: Progress) -> None:
        job = self.jobs.get(event.request_id)
        if job is None or job.attempt != event.attempt:
            return
        for growth in event.growth:
            job.grow(growth)
            self.num_tokens += len(growth.output.tokens)
        if job.first_token_s is None and job.has_output:
            job.first_token_s = self._now()
        if event.refused is not None:
            self.refused[event.request_id] = event.refused
        output = _so_far(job, "error") if event.refused is not None else event.output
        if output is not None:
            told, how = [known.tokens for known in job.known], job.request.sampling
            if event.output is not None and not how.is_beam_search and not how.ranks:
                whole = [sequence.tokens for sequence in event.output.sequences]
                assert whole == told, "a token is lost or repeated"
            self.state.gpus[uuid].remove(job)
            self._end(job, output)

    def _grown(self, event: Grown) -> None:
        now, jobs, num_tokens = self._now(), self.jobs, 0
        for request_id, attempt, start, tokens in event.requests:
            job = jobs.get(request_id)
            if job is None or job.attempt != attempt:
                continue
            known = job.known[0].tokens
            assert len(known) == start, "a token is lost or repeated"
            known += tokens
            num_tokens += len(tokens)
            if job.first_token_s is None:
                job.first_token_s = now
        self.num_tokens += num_tokens

    def _status(self, gpu: Gpu, status: Status) -> None:
        gpu.free_tokens, gpu.kv_tokens = status.free_tokens, status.kv_tokens
        self.num_adapter_loads += status.adapter_loads - gpu.adapter_loads
        gpu.adapter_loads = status.adapter_loads
        for counted in [each for each in gpu.promised if each in status.working_set]:
            del gpu.promised[counted]
        if status.newest is None:
            return
        # No eviction before all cancellations have reached the runner, as they will free memory.
        ours = {(name, job.attempt) for name, job in gpu.working_set.items()}
        victim = newest(gpu)
        if victim is None or not status.working_set <= ours:
            return
        self._take_away(victim)
        self._queue(victim)
        self.num_evictions += 1

    def _lose(self, gpu: Gpu) -> None:
        """Queue a dead runner's requests again (§5.3), or end them if no runner is left."""
        del self.state.gpus[gpu.uuid]
        for job in gpu.working_set.values():
            job.gpu, job.attempt = None, 0
            if self.state.gpus:
                self._queue(job)
                self.num_recoveries += 1
            else:
                self._end(job, _so_far(job, "error"))
        if not self.state.gpus:
            for job in self.state.queue:
                self._end(job, _so_far(job, "error"))
            self.state.queue.clear()

    def _end(self, job: Job, output: RequestOutput) -> None:
        request = job.request
        assert output.finish_reason is not None
        self.records.append(
            ClusterRecord(
                request_id=request.request_id,
                adapter=None if request.adapter is None else request.adapter.name,
                arrival_s=request.arrival_s,
                first_token_s=job.first_token_s,
                finish_s=self._now(),
                prompt_tokens=len(request.prompt),
                output_tokens=sum(len(sequence.tokens) for sequence in output.sequences),
                placements=job.placements,
                finish_reason=output.finish_reason,
            )
        )
        del self.jobs[request.request_id]
        self.outputs[request.request_id] = output


def _so_far(job: Job, reason: str) -> RequestOutput:
    """The output so far of a request that ends now for `reason`."""
    known = job.known or [SequenceOutput([], "", None)]
    return RequestOutput(
        request_id=job.request.request_id,
        prompt_tokens=list(job.request.prompt),
        sequences=[
            replace(output, finish_reason=output.finish_reason or reason) for output in known
        ],
        finished=True,
    )
