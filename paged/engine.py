"""The engine: requests in, tokens out. Each step is schedule → build → dispatch → update.

The host runs one step ahead: it dispatches a step before it has read the previous one's tokens,
which feed the new step on the device. Ends are therefore seen one step late; the token that was
computed in vain is dropped.
"""

import dataclasses
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from models.config import ModelConfig
from paged.executor import DeviceExecutor, Executor, PendingTokens
from paged.kv_cache import POLICIES
from paged.metrics import Metrics, RequestRecord, StepRecord
from paged.scheduler import ScheduledStep, Scheduler, SchedulerConfig
from paged.sequence import RequestOutput, SamplingParams, Sequence, SequenceGroup, Status
from paged.step_inputs import Buckets, build_step_inputs
from paged.stopping import StopChecker, TextStream


@dataclass(frozen=True)
class EngineConfig(SchedulerConfig):
    """Scheduler limits, and:

    page_size: tokens of a page. kv_cache_tokens: tokens that all pages hold. watermark: share of
    blocks that admission leaves free. policy: a key of `POLICIES`. run_ahead: dispatch a step
    before reading the last one's tokens. seed: for requests that bring none.

    Raises ValueError for values that cannot work.
    """

    page_size: int = 16
    kv_cache_tokens: int = 32_768
    watermark: float = 0.01
    policy: str = "vllm"
    run_ahead: bool = True
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.kv_cache_tokens < self.page_size:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold at least one page of "
                f"{self.page_size} tokens"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")
        if self.policy not in POLICIES:
            raise ValueError(
                f"unknown policy {self.policy!r}; allowed: {', '.join(sorted(POLICIES))}"
            )

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the reserved null block included."""
        return self.kv_cache_tokens // self.page_size + 1

    @property
    def table_width(self) -> int:
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True)
class _InFlight:
    step: ScheduledStep
    rows: np.ndarray  # row of the step's inputs for each scheduled row
    tokens: PendingTokens
    dispatched_s: float
    record: dict


class Engine:
    """Serves one model through one executor.

    `events` is a list of dicts (arrivals, admissions, steps, preemptions, ends) in order, `metrics`
    the same as records.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, executor: Executor, tokenizer=None
    ):
        if config.max_model_len > model.max_position_embeddings:
            raise ValueError(
                f"max_model_len ({config.max_model_len}) exceeds the model's "
                f"max_position_embeddings ({model.max_position_embeddings})"
            )
        _, host = POLICIES[config.policy]
        if config.chunked_prefill and not host.capabilities.chunked_prefill:
            raise ValueError(f"policy {config.policy!r} cannot prefill in chunks")
        self.model, self.config, self.executor, self.tokenizer = model, config, executor, tokenizer
        self.policy = host(
            config.num_blocks, config.page_size, config.max_num_seqs, config.max_model_len,
            config.watermark,
        )  # fmt: skip
        self.scheduler = Scheduler(config, self.policy)
        self.metrics = Metrics()
        self.events: list[dict] = []
        self._buckets = Buckets.declare(config)
        self._stops = StopChecker(model.eos_token_ids, model.vocab_size)
        self._rng = np.random.default_rng(config.seed)
        self._groups: dict[str, SequenceGroup] = {}
        self._streams: dict[Sequence, TextStream] = {}
        self._num_requests = 0
        self._num_steps = 0
        self._in_flight: _InFlight | None = None
        self._previous_end_s = 0.0
        self._outputs: list[RequestOutput] = []
        self._compilations_at_start = executor.compilations

    @classmethod
    def from_model(
        cls, params, model: ModelConfig, config: EngineConfig, tokenizer=None, implementation=None
    ) -> "Engine":
        """An engine on the default JAX device; `implementation` goes to the attention ops."""
        policy_class, _ = POLICIES[config.policy]
        executor = DeviceExecutor(
            params, model,
            policy_class.create(model, config.num_blocks, config.page_size, implementation),
            shapes=Buckets.declare(config).shapes(),
            num_slots=config.max_num_seqs,
            table_width=config.table_width,
            prefill_rows=config.max_prefills_per_step,
        )  # fmt: skip
        return cls(model, config, executor, tokenizer)

    def warm_up(self, progress: bool = True) -> None:
        """Compile every declared step shape; afterwards nothing compiles."""
        self.executor.warm_up(progress)
        self.metrics.compilations_warmup = self.executor.compilations - self._compilations_at_start
        self._compilations_at_start = self.executor.compilations

    # Requests

    def _validated(self, prompt: str | list[int], sampling: SamplingParams) -> np.ndarray:
        """The prompt as token ids; ValueError says what is wrong with it."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer; pass token ids")
            prompt = self.tokenizer.encode(prompt)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        tokens = np.asarray(prompt)
        if tokens.size == 0:
            raise ValueError("the prompt is empty")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError("a prompt of token ids must be a flat list of integers")
        if tokens.min() < 0 or tokens.max() >= self.model.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self.model.vocab_size)][0]
            raise ValueError(
                f"token {bad} is outside the vocabulary [0, {self.model.vocab_size - 1}]"
            )
        longest = self.config.max_model_len - 1
        if len(tokens) > longest:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; max_model_len ({self.config.max_model_len}) "
                f"allows {longest}, and one to generate"
            )
        if not self.policy.fits(self._limit(len(tokens), sampling)):
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and {sampling.max_tokens} to generate exceed "
                f"the cache of {self.config.kv_cache_tokens} tokens (kv_cache_tokens)"
            )
        return tokens.astype(np.int32)

    def _limit(self, prompt_tokens: int, sampling: SamplingParams) -> int:
        return min(prompt_tokens + sampling.max_tokens, self.config.max_model_len)

    def add_request(
        self,
        prompt: str | list[int],
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        arrival_time: float | None = None,
        stream: bool = False,
    ) -> str:
        """Queue a request; returns its id.

        prompt: text, or token ids. arrival_time: seconds on the engine's clock, now by default.
        stream: have `step` return its output whenever it grows, not only at its end. Generation
        ends at max_tokens or max_model_len, whichever comes first.

        Raises ValueError, and queues nothing, if the prompt is empty, holds a token outside the
        vocabulary, is longer than the model or the cache allows, or if the id is in use.
        """
        sampling = sampling or SamplingParams()
        tokens = self._validated(prompt, sampling)
        request_id = f"request-{self._num_requests}" if request_id is None else request_id
        if request_id in self._groups:
            raise ValueError(f"request id {request_id!r} is in use")
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=int(self._rng.integers(2**32)))
        limit = self._limit(len(tokens), sampling)
        group = SequenceGroup(request_id, self._num_requests, tokens, sampling, limit)
        group.arrival_s = self.executor.clock.now() if arrival_time is None else arrival_time
        group.stream = stream
        self._num_requests += 1
        self._groups[request_id] = group
        if self.tokenizer is not None and (sampling.stop or stream):
            self._streams[group.sequences[0]] = TextStream(self.tokenizer, sampling.stop)
        self._event("arrival", group, time_s=group.arrival_s, prompt_tokens=len(tokens))
        self.scheduler.add(group)
        return request_id

    def abort(self, request_id: str) -> RequestOutput:
        """End a request in whatever state it is; returns what it has.

        Raises ValueError for an id that is unknown or has finished.
        """
        if request_id not in self._groups:
            raise ValueError(f"request {request_id!r} is unknown or has finished")
        group = self._groups[request_id]
        self.scheduler.abort(group)
        return self._retire(group)

    def has_unfinished(self) -> bool:
        return bool(self._groups or self._in_flight or self._outputs)

    def generate(
        self,
        prompts: Collection[str | list[int]],
        sampling: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Outputs of `prompts` in order. Nothing is queued if one of them is refused."""
        if isinstance(prompts, str):
            raise ValueError("generate takes a list of prompts, not one string")
        many = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        if len(many) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts with {len(many)} sampling parameters")
        for prompt, how in zip(prompts, many, strict=True):
            self._validated(prompt, how or SamplingParams())
        ids = [self.add_request(p, how) for p, how in zip(prompts, many, strict=True)]
        done: dict[str, RequestOutput] = {}
        others: list[RequestOutput] = []
        while len(done) < len(ids):
            for output in self.step():
                mine = output.finished and output.request_id in ids
                if mine:
                    done[output.request_id] = output
                else:
                    others.append(output)
        self._outputs = others + self._outputs
        return [done[i] for i in ids]

    def stream(
        self, prompt: str | list[int], sampling: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """One request's output each time it grows; other requests run on beside it. Closing the
        iterator early aborts the request."""
        request_id = self.add_request(prompt, sampling, stream=True)
        others: list[RequestOutput] = []
        try:
            while request_id in self._groups:
                for output in self.step():
                    if output.request_id == request_id:
                        yield output
                    else:
                        others.append(output)
        finally:
            if request_id in self._groups:
                self.abort(request_id)
            self._outputs = others + self._outputs

    # Steps

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, take in the previous one; outputs that ended, or grew if they
        stream."""
        began = time.perf_counter()
        previous, waited_s = self._in_flight, 0.0
        if previous is not None and not self.config.run_ahead:
            waited_s, previous = self._take_in(previous), None
        step = self.scheduler.schedule()
        self._in_flight = None if step is None else self._dispatch(step)
        if previous is not None:
            waited_s = self._take_in(previous)
        assert self._in_flight or previous or not self.scheduler.has_unfinished(), "nothing can run"
        if self.metrics.steps:
            spent = time.perf_counter() - began - waited_s
            last = self.metrics.steps[-1]
            self.metrics.steps[-1] = dataclasses.replace(last, host_s=last.host_s + spent)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _dispatch(self, step: ScheduledStep) -> _InFlight:
        for group in step.preempted:
            self._event("preempt", group)
        for group in step.admitted:
            self._event("admit", group)
        if step.copies:
            self.executor.copy_blocks(step.copies)
        scheduler, config = self.scheduler, self.config
        inputs = build_step_inputs(
            step, scheduler.slots, self.policy, self._buckets, config.max_prefills_per_step
        )
        rows = np.arange(len(step.slots))
        rows[step.num_prefills :] += inputs.num_prefill_rows - step.num_prefills
        dispatched_s = self.executor.clock.now()
        tokens = self.executor.execute(inputs)
        slots = scheduler.running_slots()
        usage = self.policy.usage(slots, scheduler.slots.computed[slots])
        record = {
            "prefill_tokens": step.num_prefill_tokens,
            "decode_tokens": step.num_decodes,
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "preemptions": len(step.preempted),
            **{f"kv_{k}": v for k, v in dataclasses.asdict(usage).items()},
        }
        return _InFlight(step, rows, tokens, dispatched_s, record)

    def _take_in(self, flight: _InFlight) -> float:
        """Apply a step's tokens; returns the seconds spent waiting for them."""
        wait_began = time.perf_counter()
        sampled = flight.tokens.wait()
        waited_s = time.perf_counter() - wait_began
        now = self.executor.clock.now()
        device_s = now - max(flight.dispatched_s, self._previous_end_s)
        self._previous_end_s = now
        self.metrics.steps.append(StepRecord(self._num_steps, now, 0.0, device_s, **flight.record))
        self.events.append(
            {"event": "step", "step": self._num_steps, "time_s": now, **flight.record}
        )
        self._num_steps += 1
        self.metrics.compilations_after_warmup = (
            self.executor.compilations - self._compilations_at_start
        )

        scheduler, s = self.scheduler, self.scheduler.slots
        slots = scheduler.update(flight.step, sampled[flight.rows])
        newest = s.tokens[slots, s.known[slots] - 1]
        reasons = self._stops.reasons(newest, s.ignore_eos[slots], s.known[slots], s.limit[slots])
        for slot in slots[s.known[slots] == s.prompt_length[slots] + 1]:
            s.owner[slot].group.first_token_s = now
        for i in np.flatnonzero(s.watched[slots]):
            sequence = s.owner[slots[i]]
            stream = self._streams.get(sequence)
            if stream and reasons[i] != "error" and stream.push(int(newest[i])):
                reasons[i] = "stop"
        for slot, reason in zip(slots.tolist(), reasons, strict=True):
            if reason is not None:
                self._finish(s.owner[slot], reason)
        for slot in slots[s.watched[slots] & s.active[slots]]:
            if s.owner[slot].group.stream:
                self._outputs.append(self._output(s.owner[slot]))
        return waited_s

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if reason == "error":
            # The row gave no token: take the mark back.
            self.scheduler.slots.known[sequence.slot] -= 1
        self.scheduler.finish(sequence, reason)
        if sequence.group.finished:
            self._outputs.append(self._retire(sequence.group))

    def _retire(self, group: SequenceGroup) -> RequestOutput:
        """Record a finished group and forget it."""
        sequence, now = group.sequences[0], self.executor.clock.now()
        output = self._output(sequence)
        assert output.finish_reason is not None
        self._event("finish", group, reason=output.finish_reason, output_tokens=len(output.tokens))
        self.metrics.requests.append(
            RequestRecord(
                group.request_id,
                group.arrival_s,
                group.first_token_s,
                now,
                group.num_prompt_tokens,
                len(output.tokens),
                group.num_preemptions,
                output.finish_reason,
            )
        )
        self._streams.pop(sequence, None)
        del self._groups[group.request_id]
        return output

    def _output(self, sequence: Sequence) -> RequestOutput:
        if sequence.status is Status.RUNNING:
            tokens = self.scheduler.slots.known_tokens(sequence.slot)
        else:
            tokens = sequence.tokens
        prompt, output = np.split(tokens, [sequence.num_prompt_tokens])
        stream, text = self._streams.get(sequence), ""
        if stream is not None:
            text = stream.text
        elif self.tokenizer is not None:
            text = self.tokenizer.decode(output, skip_special_tokens=True)
        return RequestOutput(
            sequence.group.request_id, prompt.tolist(), output.tolist(), text,
            sequence.status is Status.FINISHED, sequence.finish_reason,
        )  # fmt: skip

    def _event(self, event: str, group: SequenceGroup, **more) -> None:
        now = self.executor.clock.now()
        self.events.append({"event": event, "time_s": now, "request_id": group.request_id} | more)
