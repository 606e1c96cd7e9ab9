"""The engine's loop: each step is schedule → build → dispatch → update.

The host runs one step ahead: it dispatches a step before it has read the previous one's tokens,
which feed the new step on the device. Ends are therefore seen one step late; the token that was
computed in vain is dropped.
"""

import time
from collections import deque
from dataclasses import asdict

import numpy as np

from models.config import ModelConfig
from paged.checks import is_bool, is_real, is_text, refusal
from paged.config import EngineConfig
from paged.device.executor import Executor
from paged.device.step_inputs import Buckets, build_step_inputs
from paged.exclusive import exclusive
from paged.intake import InFlight, Intake
from paged.kv_cache import POLICIES
from paged.kv_cache.policy import ShardedModel
from paged.metrics import Metrics, StepRecord, step_facts
from paged.requests.outputs import record_prompt_logprobs, request_output
from paged.requests.registry import Requests
from paged.requests.sequence import (
    RequestOutput,
    SamplingParams,
    SequenceGroup,
    Status,
    changed_fields,
)
from paged.requests.stopping import TextStream
from paged.requests.validation import Prompt, check_model, token_limit, validated_prompt
from paged.scheduling.scheduled_step import ScheduledStep
from paged.scheduling.scheduler import Scheduler


class EngineLoop:
    """Requests, and the loop that serves them through one executor."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, executor: Executor, tokenizer=None
    ):
        check_model(model, config)
        self.model, self.config, self.executor, self.tokenizer = model, config, executor, tokenizer
        self.metrics = Metrics()
        self._buckets = Buckets.declare(config)
        self._rng = np.random.default_rng(config.seed)
        self.requests = Requests()
        self._num_requests = self._num_steps = self._round = 0
        self._previous_end_s = 0.0
        self._waited_s = 0.0
        self._owner: str | None = None  # the thread that is in a call: see `exclusive`
        self._half_done = False  # a change has begun and not ended: see `_settle`
        self._compilations_at_start = executor.compilations
        self.metrics.event(
            "engine", 0.0, config=asdict(config), model=asdict(model), dtype=executor.dtype
        )
        self._reset()

    def _reset(self) -> None:
        sharded = ShardedModel.split(self.model, self.config.tensor_parallel, self.executor.dtype)
        self.host_policy = POLICIES[self.config.policy].host(self.config, sharded)
        self.scheduler = Scheduler(self.config, self.host_policy)
        self._intake = Intake(
            self.model, self.scheduler, self.requests, self.metrics, self.executor.clock,
            self.tokenizer,
        )  # fmt: skip
        self._in_flight: InFlight | None = None

    @property
    def events(self) -> list[dict]:
        """All that came in and all that was done, in order: enough to do it again.

        engine, arrival, abort and pin say what came, before which round (call of `step`);
        admit, preempt and schedule what was decided, page operations included (pages: those after
        the last step); step, finish and failure, which ends all requests, what came of it. beams:
        the candidates for a beam search's beams, in slots `before`, and the beams that go on: the
        slot of each one's parent, and its own. After `metrics.clear()` the rest cannot be replayed.
        """
        return self.metrics.events

    # Requests

    def _validated(self, prompt: Prompt, sampling: SamplingParams) -> np.ndarray:
        return validated_prompt(
            prompt, sampling, self.tokenizer, self.model, self.config, self.host_policy
        )

    @exclusive
    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        arrival_time: float | None = None,
        stream: bool = False,
        cache_salt: str = "",
    ) -> str:
        """Queue a request; returns its id.

        prompt: text, or token ids. arrival_time: seconds on the engine's clock, now by default.
        stream: have `step` return its output whenever it grows, not only at its end. cache_salt:
        cached prefixes are shared only among requests of the same salt. Generation ends at
        max_tokens or max_model_len, whichever comes first. Interrupted, it has queued nothing.

        Raises ValueError, and queues nothing, if the prompt is empty, holds a token outside the
        vocabulary, is longer than the model or the cache allows, if the id is that of a request
        that is unfinished or has outputs that nobody has fetched, or if the arrival lies in the
        future. This and all other calls raise RuntimeError while another thread's call runs.
        """
        sampling = SamplingParams() if sampling is None else sampling
        tokens = self._validated(prompt, sampling)
        if request_id is not None and not is_text(request_id):
            raise refusal("request_id", "a text", request_id)
        if request_id is not None and self.requests.in_use(request_id):
            raise ValueError(f"request id {request_id!r} is in use")
        if not is_bool(stream):
            raise refusal("stream", "True or False", stream)
        now = self.executor.clock.now()
        if arrival_time is not None and not is_real(arrival_time):
            raise refusal("arrival_time", "a finite number", arrival_time)
        if arrival_time is not None and arrival_time > now:
            raise ValueError(f"arrival_time {arrival_time} is in the future: it is {now}")
        group = self._new_group(tokens, sampling, request_id, arrival_time, cache_salt)
        group.stream = bool(stream)
        self._accept(group)
        return group.request_id

    def _new_group(
        self, tokens: np.ndarray, sampling: SamplingParams, request_id: str | None = None,
        arrival_time: float | None = None, cache_salt: str = "",
        mailbox: deque[RequestOutput] | None = None,
    ) -> SequenceGroup:  # fmt: skip
        """A request that is not queued yet; mailbox: where its outputs go, if not to `step`."""
        if not is_text(cache_salt):  # admission, which hashes it, would end all that runs
            raise refusal("cache_salt", "a text", cache_salt)
        order = self._num_requests
        self._num_requests += 1
        if request_id is None:
            request_id = self.requests.new_id()
        seed = int(self._rng.integers(2**32)) if sampling.seed is None else sampling.seed
        limit = token_limit(tokens, sampling, self.config)
        eos = self.model.eos_token_ids
        group = SequenceGroup(request_id, order, tokens, sampling, seed, limit, eos)
        group.arrival_s = self.executor.clock.now() if arrival_time is None else float(arrival_time)
        group.cache_salt, group.mailbox = cache_salt, mailbox
        return group

    def _accept(self, group: SequenceGroup) -> None:
        """Queue a request: the last moment at which it could be left out."""
        how, sequences = group.sampling, group.sequences
        if self.tokenizer is not None and not group.search and (how.stop or group.stream):
            for sequence in sequences:
                sequence.text_stream = TextStream(self.tokenizer, how.stop)
        sampling = changed_fields(how) | {"seed": sequences[0].seed}
        self._half_done = True
        self.metrics.event(
            "arrival",
            group.arrival_s,
            round=self._round,
            request_id=group.request_id,
            prompt_tokens=group.num_prompt_tokens,
            prompt=sequences[0].tokens,
            sampling=sampling,
            stream=group.stream,
            cache_salt=group.cache_salt,
        )
        self.scheduler.add(group)
        self.requests.add(group)
        self._half_done = False

    @exclusive
    def abort(self, request_id: str) -> RequestOutput:
        """End a request in whatever state it is; returns what it has. If that is interrupted,
        `step` returns it.

        Raises ValueError for an id that is unknown or has finished.
        """
        if not isinstance(request_id, str) or request_id not in self.requests.unfinished:
            raise ValueError(f"request {request_id!r} is unknown or has finished")
        group = self.requests.unfinished[request_id]
        self._abort(group)
        output = self.requests.final_output(group)
        assert output is not None
        # What it streamed and nobody has fetched is in this output.
        self.requests.outputs = [
            kept for kept in self.requests.outputs if kept.request_id != request_id
        ]
        return output

    def _abort(self, group: SequenceGroup) -> None:
        self._half_done = True
        now = self.executor.clock.now()
        self.metrics.event("abort", now, round=self._round, request_id=group.request_id)
        self.scheduler.abort(group)
        self._intake.retire(group)
        self._half_done = False

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        requests = self.requests
        return bool(self._half_done or requests.unfinished or self._in_flight or requests.outputs)

    def skip_rounds(self, count: int) -> None:
        """Count rounds of an engine that has nothing to do, without running them."""
        assert not self.has_unfinished()
        self._round += count

    # Steps

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, take in the previous one; outputs that ended, or grew if they
        stream, but for those that a running `generate` or `stream` waits for.

        If this or another call fails or is interrupted in the middle of its work, all requests end
        with reason 'error', and the engine starts afresh: without cached and pinned prefixes. Their
        outputs come as any others do, with the tokens so far; a text that the tokenizer cannot
        decode is empty, and the last log-probabilities may be missing.
        """
        self._advance()
        outputs, self.requests.outputs = self.requests.outputs, []
        return outputs

    def _advance(self) -> None:
        self._half_done = True
        self._run_step()
        self._half_done = False

    def _settle(self) -> None:
        """Bring in order what was interrupted, and end the requests that nobody waits for.

        It may be interrupted anywhere too: then it begins again when it is called next.
        """
        if self._half_done:
            self._start_afresh()
        dropped = self.requests.dropped
        while dropped:
            group = dropped[0]
            if self.requests.unfinished.get(group.request_id) is group:
                self._abort(group)
            if group.mailbox is not None:
                group.mailbox.clear()
            del dropped[0]

    def _start_afresh(self) -> None:
        """In the middle of a change host and device may disagree: end everything."""
        for group in list(self.requests.unfinished.values()):
            if self.requests.final_output(group) is None:
                self._fail(group)
        self.requests.unfinished.clear()
        # Only now: an interruption may have left a request without the event of its end.
        self.metrics.event("failure", self.executor.clock.now(), round=self._round)
        self._reset()
        self.executor.reset()
        self._half_done = False

    def _fail(self, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            if (slot := sequence.slot) >= 0:
                sequence.tokens, sequence.slot = self.scheduler.slots.known_tokens(slot), -1
            sequence.status = Status.FINISHED
            if sequence.finish_reason is None:
                sequence.finish_reason = "error"
        try:
            output = request_output(group, self.tokenizer)
        except Exception:  # the tokenizer's: it may be what has failed
            output = request_output(group, None)
        self._intake.deliver_last(group, output)

    def _run_step(self) -> None:
        began, self._waited_s = time.perf_counter(), 0.0
        self._round += 1
        previous, decodes = self._in_flight, None
        # Beams cannot run ahead, and the others in their step wait for them: or beams would be left
        # out of every other step.
        if previous and self.config.run_ahead and not previous.step.has_beams:
            decodes = self.scheduler.decodes()
        # What is in flight may end sequences that would otherwise be preempted for lack of blocks.
        if previous and decodes is None:
            self._take_in(previous)
            previous = None
        step = self.scheduler.schedule(self._num_steps, decodes)
        self._in_flight = None if step is None else self._dispatch(step)
        if previous:
            self._take_in(previous)
        elif step is None and self.scheduler.gate.loading:
            self.scheduler.gate.wait()
        elif step is None:
            assert not self.scheduler.has_unfinished(), "requests are left and nothing can run"
        if self._in_flight is None and (pages := self.host_policy.drain_operations()):
            self.metrics.event("pages", self.executor.clock.now(), pages=pages)
        if self._in_flight:
            self._in_flight.host_s = time.perf_counter() - began - self._waited_s

    def _dispatch(self, step: ScheduledStep) -> InFlight:
        scheduler, now = self.scheduler, self.executor.clock.now()
        number = self._num_steps
        self._num_steps += 1
        for group in step.preempted:
            self.metrics.event("preempt", now, request_id=group.request_id)
        for group in step.admitted:
            slots = [sequence.slot for sequence in group.sequences if sequence.slot >= 0]
            self.metrics.event("admit", now, request_id=group.request_id, slots=slots)
        self.metrics.event(
            "schedule",
            now,
            step=number,
            slots=step.slots,
            starts=step.starts,
            counts=step.counts,
            sources=step.sources,
            moves=step.moves.facts(),
            pages=self.host_policy.drain_operations(),
        )
        self.executor.apply(step.moves)
        for group in step.admitted:
            how = group.sampling
            for sequence in group.sequences:
                if sequence.slot >= 0 and (how.uses_history or how.logit_bias):
                    self.executor.load_slot(sequence.slot, sequence.tokens, how.logit_bias)
        inputs, rows = build_step_inputs(
            step,
            scheduler.slots,
            self.host_policy,
            self._buckets,
            self.config.max_prefills_per_step,
        )
        facts = step_facts(step, scheduler)
        outputs = self.executor.execute(inputs)
        self.executor.apply_after(step.moves)
        return InFlight(number, step, rows, outputs, now, facts)

    def _take_in(self, flight: InFlight) -> None:
        """Wait for a step's outputs and apply them."""
        wait_began = time.perf_counter()
        outputs = flight.outputs.wait()
        self._waited_s += time.perf_counter() - wait_began
        now, metrics, step = self.executor.clock.now(), self.metrics, flight.step
        device_s = now - max(flight.dispatched_s, self._previous_end_s)
        self._previous_end_s = now
        sampled = np.asarray(outputs.tokens)[: step.iterations, flight.rows]
        record = StepRecord(flight.number, now, flight.host_s, device_s, **flight.facts)
        report = outputs.report
        if report is None:
            report = self.host_policy.simulated_report(flight.number)
        if report is not None:
            self.host_policy.observe(flight.number, report)
        metrics.add_step(record, step, sampled, report)
        metrics.compilations_after_warmup = self.executor.compilations - self._compilations_at_start

        record_prompt_logprobs(step, self.scheduler.slots, outputs.prompt_logprobs)
        self._intake.apply(flight, sampled, outputs, now)
