"""The engine's loop: each step is schedule → build → dispatch → update.

The host runs one step ahead: it dispatches a step before it has read the previous one's tokens,
which feed the new step on the device. Ends are therefore seen one step late; the token that was
computed in vain is dropped.
"""

import itertools
import time
from collections import deque
from dataclasses import asdict, dataclass

import numpy as np

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.executor import Executor, PendingOutputs
from paged.kv_cache import POLICIES
from paged.metrics import Metrics, StepRecord, step_facts
from paged.outputs import record_logprobs, record_prompt_logprobs, request_output
from paged.scheduled_step import ScheduledStep
from paged.scheduler import Scheduler
from paged.sequence import (
    RequestOutput,
    SamplingParams,
    Sequence,
    SequenceGroup,
    Status,
    changed_fields,
    is_real,
)
from paged.step import StepOutputs
from paged.step_inputs import Buckets, build_step_inputs
from paged.stopping import StopChecker, TextStream
from paged.validation import Prompt, token_limit, validated_prompt


@dataclass
class _InFlight:
    """A dispatched step whose tokens have not been read."""

    number: int
    step: ScheduledStep
    rows: np.ndarray  # row of the step's inputs for each scheduled row
    outputs: PendingOutputs
    dispatched_s: float
    facts: dict  # of its StepRecord
    host_s: float = 0.0


class EngineLoop:
    """Requests, and the loop that serves them through one executor."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, executor: Executor, tokenizer=None
    ):
        if config.max_model_len > model.max_position_embeddings:
            raise ValueError(
                f"max_model_len ({config.max_model_len}) exceeds the model's "
                f"max_position_embeddings ({model.max_position_embeddings})"
            )
        self.model, self.config, self.executor, self.tokenizer = model, config, executor, tokenizer
        self.metrics = Metrics()
        self._buckets = Buckets.declare(config)
        self._stops = StopChecker(model.eos_token_ids, model.vocab_size)
        self._rng = np.random.default_rng(config.seed)
        self._groups: dict[str, SequenceGroup] = {}
        self._streams: dict[Sequence, TextStream] = {}
        self._num_requests = self._num_steps = self._round = 0
        self._previous_end_s = 0.0
        self._waited_s = 0.0
        self._outputs: list[RequestOutput] = []  # for the next `step`
        self._mailboxes: dict[str, deque[RequestOutput]] = {}  # for `generate` and `stream`
        self._compilations_at_start = executor.compilations
        self.metrics.event("engine", 0.0, config=asdict(config), model=asdict(model))
        self._reset()

    def _reset(self) -> None:
        self.host_policy = POLICIES[self.config.policy].host(self.config)
        self.scheduler = Scheduler(self.config, self.host_policy)
        self._in_flight: _InFlight | None = None

    @property
    def events(self) -> list[dict]:
        """All that came in and all that was done, in order: enough to do it again.

        engine, arrival, abort and pin say what came, before which round (call of `step`);
        admit, preempt and schedule what was decided, page operations included (pages: those after
        the last step); step, finish and failure what came of it. beams: the candidates for a beam
        search's beams, in slots `before`, and the beams that go on: the slot of each one's parent,
        and its own. After `metrics.clear()` the rest cannot be done again.
        """
        return self.metrics.events

    # Requests

    def _validated(self, prompt: Prompt, sampling: SamplingParams) -> np.ndarray:
        return validated_prompt(
            prompt, sampling, self.tokenizer, self.model, self.config, self.host_policy
        )

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
        max_tokens or max_model_len, whichever comes first.

        Raises ValueError, and queues nothing, if the prompt is empty, holds a token outside the
        vocabulary, is longer than the model or the cache allows, if the id is in use, or if the
        arrival lies in the future.
        """
        sampling = sampling or SamplingParams()
        tokens = self._validated(prompt, sampling)
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id must be a text, not {request_id!r}")
        if request_id is not None and request_id in self._groups:
            raise ValueError(f"request id {request_id!r} is in use")
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt must be a text, not {cache_salt!r}")
        cache_salt.encode()  # or admission would fail, and with it all that runs
        now = self.executor.clock.now()
        if arrival_time is not None and not is_real(arrival_time):
            raise ValueError(f"arrival_time must be a finite number, not {arrival_time!r}")
        if arrival_time is not None and arrival_time > now:
            raise ValueError(f"arrival_time {arrival_time} is in the future: it is {now}")
        return self._enqueue(tokens, sampling, request_id, arrival_time, stream, cache_salt)

    def _enqueue(
        self, tokens: np.ndarray, sampling: SamplingParams, request_id: str | None = None,
        arrival_time: float | None = None, stream: bool = False, cache_salt: str = "",
    ) -> str:  # fmt: skip
        order = self._num_requests
        self._num_requests += 1
        if request_id is None:
            names = (f"request-{i}" for i in itertools.count(order))
            request_id = next(name for name in names if name not in self._groups)
        seed = int(self._rng.integers(2**32)) if sampling.seed is None else sampling.seed
        limit = token_limit(tokens, sampling, self.config)
        eos = self.model.eos_token_ids
        group = SequenceGroup(request_id, order, tokens, sampling, seed, limit, eos)
        group.arrival_s = self.executor.clock.now() if arrival_time is None else arrival_time
        group.stream, group.cache_salt = stream, cache_salt
        if self.tokenizer is not None and not group.search and (sampling.stop or stream):
            for sequence in group.sequences:
                self._streams[sequence] = TextStream(self.tokenizer, sampling.stop)
        self.metrics.event(
            "arrival",
            group.arrival_s,
            round=self._round,
            request_id=request_id,
            prompt_tokens=len(tokens),
            prompt=tokens,
            sampling=changed_fields(sampling) | {"seed": seed},
            stream=stream,
            cache_salt=cache_salt,
        )
        self._groups[request_id] = group
        self.scheduler.add(group)
        return request_id

    def abort(self, request_id: str) -> RequestOutput:
        """End a request in whatever state it is; returns what it has.

        Raises ValueError for an id that is unknown or has finished.
        """
        if request_id not in self._groups:
            raise ValueError(f"request {request_id!r} is unknown or has finished")
        group = self._groups[request_id]
        now = self.executor.clock.now()
        self.metrics.event("abort", now, round=self._round, request_id=request_id)
        self.scheduler.abort(group)
        output = self._retire(group)
        # What it streamed and nobody has fetched is in this output.
        self._outputs = [kept for kept in self._outputs if kept.request_id != request_id]
        if request_id in self._mailboxes:
            self._mailboxes[request_id].append(output)
        return output

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self._groups or self._in_flight or self._outputs)

    # Steps

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, take in the previous one; outputs that ended, or grew if they
        stream, but for those that a running `generate` or `stream` waits for.

        If it raises, or is interrupted, all requests end with reason 'error', and the engine starts
        afresh: without cached and pinned prefixes.
        """
        self._advance()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _advance(self) -> None:
        try:
            self._run_step()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """After a failure in the middle of a step host and device may disagree: end everything."""
        self.metrics.event("failure", self.executor.clock.now(), round=self._round)
        for group in list(self._groups.values()):
            for sequence in group.unfinished:
                if sequence.slot >= 0:
                    sequence.tokens = self.scheduler.slots.known_tokens(sequence.slot)
                sequence.status, sequence.finish_reason = Status.FINISHED, "error"
            self._deliver(self._retire(group))
        self._reset()

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
        step = self.scheduler.schedule(decodes)
        self._in_flight = None if step is None else self._dispatch(step)
        if previous:
            self._take_in(previous)
        elif step is None:
            assert not self.scheduler.has_unfinished(), "requests are left and nothing can run"
        if self._in_flight is None and (pages := self.host_policy.drain_operations()):
            self.metrics.event("pages", self.executor.clock.now(), pages=pages)
        if self._in_flight:
            self._in_flight.host_s = time.perf_counter() - began - self._waited_s

    def _dispatch(self, step: ScheduledStep) -> _InFlight:
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
            swaps_out=step.swaps_out,
            swaps_in=step.swaps_in,
            copies=step.copies,
            pages=self.host_policy.drain_operations(),
        )
        if step.swaps_out:
            self.executor.swap_out(step.swaps_out)
        if step.swaps_in:
            self.executor.swap_in(step.swaps_in)
        if step.copies:
            self.executor.copy_blocks(step.copies)
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
        return _InFlight(number, step, rows, self.executor.execute(inputs), now, facts)

    def _take_in(self, flight: _InFlight) -> None:
        """Wait for a step's outputs and apply them."""
        wait_began = time.perf_counter()
        outputs = flight.outputs.wait()
        self._waited_s += time.perf_counter() - wait_began
        now, metrics, step = self.executor.clock.now(), self.metrics, flight.step
        device_s = now - max(flight.dispatched_s, self._previous_end_s)
        self._previous_end_s = now
        sampled = np.asarray(outputs.tokens)[: step.iterations, flight.rows]
        record = StepRecord(flight.number, now, flight.host_s, device_s, **flight.facts)
        metrics.add_step(record, step, sampled)
        metrics.compilations_after_warmup = self.executor.compilations - self._compilations_at_start

        record_prompt_logprobs(step, self.scheduler.slots, outputs.prompt_logprobs)
        for iteration in range(step.iterations):
            self._take_in_tokens(flight, iteration, sampled[iteration], outputs, now)
        if step.has_beams:
            self._take_in_beams(flight, outputs, now)

    def _take_in_tokens(
        self, flight: _InFlight, iteration: int, sampled: np.ndarray, outputs: StepOutputs, now
    ) -> None:
        s = self.scheduler.slots
        rows, tokens = self.scheduler.update(flight.step, iteration, sampled)
        slots = flight.step.slots[rows]
        if outputs.logprobs is not None:
            good = tokens >= 0
            at = [(iteration, int(row)) for row in flight.rows[rows[good]]]
            owners = [self._owner(slot) for slot in slots[good]]
            record_logprobs(owners, tokens[good], outputs.logprobs, at)
        known = s.known[slots]
        ended = self._stops.ended(tokens, s.ignore_eos[slots], known, s.limit[slots])
        grown: dict[SequenceGroup, None] = {}
        for i in np.flatnonzero(s.watched[slots] & (tokens >= 0)).tolist():
            sequence = self._owner(slots[i])
            group, how = sequence.group, sequence.group.sampling
            grown[group] = None
            if group.first_token_s is None:
                group.first_token_s = now
            s.watched[slots[i]] = bool(how.stop or how.stop_token_ids) or group.stream
            if self._stops_at(sequence, int(tokens[i])):
                ended[i] = "stop"
        for i in sorted(ended):
            self._finish(self._owner(slots[i]), ended[i])
        for group in grown:
            if group.stream and not group.finished:
                self._deliver(self._output(group))

    def _take_in_beams(self, flight: _InFlight, outputs: StepOutputs, now: float) -> None:
        """Let the searches go on whose beams have their candidates."""
        s, step = self.scheduler.slots, flight.step
        at_end = step.samples & s.beam[step.slots] & (s.generation[step.slots] == step.generations)
        row_of = {int(step.slots[i]): int(flight.rows[i]) for i in np.flatnonzero(at_end)}
        for group in {self._owner(slot).group: None for slot in row_of}:
            rows = [row_of[beam.slot] for beam in group.sequences]
            if group.first_token_s is None:
                group.first_token_s = now
            if (np.asarray(outputs.tokens)[0, rows] < 0).any():
                for beam in group.unfinished:
                    self._finish(beam, "error")
                continue
            assert group.search is not None and outputs.logprobs is not None
            known = [
                s.known_tokens(beam.slot)[group.num_prompt_tokens :] for beam in group.sequences
            ]
            asked = slice(0, group.search.num_candidates)
            candidates = np.asarray(outputs.logprobs.top_tokens)[0, rows, asked]
            logprobs = np.asarray(outputs.logprobs.top)[0, rows, asked]
            before = [beam.slot for beam in group.sequences]
            moves = group.search.advance(known, candidates, logprobs)
            if moves:
                self.scheduler.advance_beams(group, moves)
            self.metrics.event(
                "beams",
                now,
                step=flight.number,
                request_id=group.request_id,
                before=before,
                candidates=candidates,
                candidate_logprobs=logprobs,
                parents=[before[parent] for parent, _ in moves],
                slots=[beam.slot for beam in group.sequences] if moves else [],
            )
            if not moves:
                for beam in group.unfinished:
                    self._finish(beam, "length")

    def _stops_at(self, sequence: Sequence, token: int) -> bool:
        stream = self._streams.get(sequence)
        if token in sequence.group.sampling.stop_token_ids:
            return True
        return stream is not None and stream.push(token)

    def _owner(self, slot) -> Sequence:
        sequence = self.scheduler.slots.owner[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if sequence.group.pin and reason != "error":
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            self.host_policy.pin(sequence.slot, prompt, sequence.group.cache_salt)
        self.scheduler.finish(sequence, reason)
        if sequence.group.finished:
            self._deliver(self._retire(sequence.group))

    def _deliver(self, output: RequestOutput) -> None:
        self._mailboxes.get(output.request_id, self._outputs).append(output)

    def _retire(self, group: SequenceGroup) -> RequestOutput:
        """Record a finished group and forget it."""
        output = self._output(group)
        self.metrics.add_request(group, output, self.executor.clock.now())
        for sequence in group.sequences:
            self._streams.pop(sequence, None)
        del self._groups[group.request_id]
        return output

    def _output(self, group: SequenceGroup) -> RequestOutput:
        for sequence in group.sequences:
            if sequence.status is Status.RUNNING:
                sequence.tokens = self.scheduler.slots.known_tokens(sequence.slot)
        return request_output(group, self._streams, self.tokenizer)
