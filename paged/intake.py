"""What a step has sampled, applied: tokens, ends, the growth of streams, the choice of beams."""

from dataclasses import dataclass
from typing import cast

import numpy as np

from models.config import ModelConfig
from paged.clock import VirtualClock, WallClock
from paged.device.executor import PendingOutputs
from paged.device.step import StepOutputs
from paged.kv_cache.policy import PrefixCachingHost
from paged.metrics import Metrics
from paged.requests.outputs import record_logprobs, request_output
from paged.requests.registry import Requests
from paged.requests.sequence import RequestOutput, Sequence, SequenceGroup, Status
from paged.requests.stopping import StopChecker
from paged.scheduling.scheduled_step import ScheduledStep
from paged.scheduling.scheduler import Scheduler


@dataclass
class InFlight:
    """A dispatched step whose tokens have not been read."""

    number: int
    step: ScheduledStep
    rows: np.ndarray  # row of the step's inputs for each scheduled row
    outputs: PendingOutputs
    dispatched_s: float
    facts: dict  # of its StepRecord
    host_s: float = 0.0


class Intake:
    """Brings a step's tokens to the scheduler's sequences, and their outputs to those who wait."""

    def __init__(
        self, model: ModelConfig, scheduler: Scheduler, requests: Requests, metrics: Metrics,
        clock: WallClock | VirtualClock, tokenizer,
    ):  # fmt: skip
        self._scheduler, self._requests, self._metrics = scheduler, requests, metrics
        self._clock, self._tokenizer = clock, tokenizer
        self._stops = StopChecker(model.eos_token_ids, model.vocab_size)

    def apply(
        self, flight: InFlight, sampled: np.ndarray, outputs: StepOutputs, now: float
    ) -> None:
        """sampled: [I, n] tokens by iteration and scheduled row. now: when the step had ended."""
        for iteration in range(flight.step.iterations):
            self._tokens(flight, iteration, sampled[iteration], outputs, now)
        if flight.step.has_beams:
            self._beams(flight, outputs, now)

    def _tokens(
        self, flight: InFlight, iteration: int, sampled: np.ndarray, outputs: StepOutputs, now
    ) -> None:
        s = self._scheduler.slots
        rows, tokens = self._scheduler.update(flight.step, iteration, sampled)
        slots = flight.step.slots[rows]
        if outputs.logprobs is not None:
            good = tokens >= 0
            at = [(iteration, int(row)) for row in flight.rows[rows[good]]]
            owners = [self._sequence_in(slot) for slot in slots[good]]
            record_logprobs(owners, tokens[good], outputs.logprobs, at)
        known = s.known[slots]
        ended = self._stops.ended(tokens, s.ignore_eos[slots], known, s.limit[slots])
        grown: dict[SequenceGroup, None] = {}
        for i in np.flatnonzero(s.watched[slots] & (tokens >= 0)).tolist():
            sequence = self._sequence_in(slots[i])
            group, how = sequence.group, sequence.group.sampling
            grown[group] = None
            if group.first_token_s is None:
                group.first_token_s = now
            s.watched[slots[i]] = bool(how.stop or how.stop_token_ids) or group.stream
            if self._stops_at(sequence, int(tokens[i])):
                ended[i] = "stop"
        for i in sorted(ended):
            self._finish(self._sequence_in(slots[i]), ended[i])
        for group in grown:
            if group.stream and not group.finished:
                self._requests.deliver(group, self._output(group))

    def _beams(self, flight: InFlight, outputs: StepOutputs, now: float) -> None:
        """Let the searches go on whose beams have their candidates."""
        s, step = self._scheduler.slots, flight.step
        at_end = step.samples & s.beam[step.slots] & (s.generation[step.slots] == step.generations)
        row_of = {int(step.slots[i]): int(flight.rows[i]) for i in np.flatnonzero(at_end)}
        for group in {self._sequence_in(slot).group: None for slot in row_of}:
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
                self._scheduler.advance_beams(group, moves)
            self._metrics.event(
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
        stream = sequence.text_stream
        if token in sequence.group.sampling.stop_token_ids:
            return True
        return stream is not None and stream.push(token)

    def _sequence_in(self, slot) -> Sequence:
        sequence = self._scheduler.slots.owner[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if sequence.group.pin and reason != "error":
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            policy = cast(PrefixCachingHost, self._scheduler.policy)
            policy.pin(sequence.slot, prompt, sequence.group.cache_salt)
        self._scheduler.finish(sequence, reason)
        if sequence.group.finished:
            self.retire(sequence.group)

    def retire(self, group: SequenceGroup) -> None:
        """Deliver and record the last output of a group, and forget it."""
        self.deliver_last(group, self._output(group))

    def deliver_last(self, group: SequenceGroup, output: RequestOutput) -> None:
        """The same with an output at hand. In this order: what is unfinished and delivered is known
        to have ended, wherever this is interrupted."""
        self._requests.deliver(group, output)
        self._metrics.add_request(group, output, self._clock.now())
        del self._requests.unfinished[group.request_id]

    def _output(self, group: SequenceGroup) -> RequestOutput:
        for sequence in group.sequences:
            if sequence.status is Status.RUNNING:
                sequence.tokens = self._scheduler.slots.known_tokens(sequence.slot)
        return request_output(group, self._tokenizer)
