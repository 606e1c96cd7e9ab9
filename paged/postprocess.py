"""Applies a step's outputs: records tokens, advances beams, ends sequences, and feeds streams."""

import numpy as np

from models.config import ModelConfig
from paged.device.step import StepOutputs
from paged.event_log import EventLog
from paged.in_flight import InFlight
from paged.outputs import record_logprobs
from paged.registry import Requests
from paged.requests.sequence import Sequence, SequenceGroup
from paged.requests.stopping import StopChecker
from paged.scheduling.scheduler import Scheduler


class Postprocessor:
    """Passes a step's tokens to the scheduler, and the requests' outputs to `Requests`."""

    def __init__(
        self, model: ModelConfig, scheduler: Scheduler, requests: Requests, event_log: EventLog
    ):
        self._scheduler, self._requests, self._event_log = scheduler, requests, event_log
        self._stops = StopChecker(model.eos_token_ids, model.vocab_size)

    def apply(
        self, flight: InFlight, sampled: np.ndarray, outputs: StepOutputs, now: float
    ) -> None:
        """Apply a step's outputs.

        sampled: [I, n] tokens by iteration and scheduled row.
        now: the step's end in seconds on the engine's clock.
        """
        for iteration in range(flight.step.iterations):
            self._tokens(flight, iteration, sampled[iteration], outputs, now)
        if flight.step.has_beams:
            self._advance_searches(flight, outputs, now)

    def _tokens(
        self, flight: InFlight, iteration: int, sampled: np.ndarray, outputs: StepOutputs, now
    ) -> None:
        s = self._scheduler.slots
        rows, tokens = self._scheduler.update(flight.step, iteration, sampled)
        slots = flight.step.slots[rows]
        if outputs.logprobs is not None:
            good = tokens >= 0
            at = [(iteration, int(row)) for row in flight.rows[rows[good]]]
            owners = [s.sequence_in(slot) for slot in slots[good]]
            record_logprobs(owners, tokens[good], outputs.logprobs, at)
        known = s.known[slots]
        ended = self._stops.ended(tokens, s.ignore_eos[slots], known, s.limit[slots])
        grown: dict[SequenceGroup, None] = {}
        for i in np.flatnonzero(s.watched[slots] & (tokens >= 0)).tolist():
            sequence = s.sequence_in(slots[i])
            group, how = sequence.group, sequence.group.sampling
            grown[group] = None
            if group.first_token_s is None:
                group.first_token_s = now
            s.watched[slots[i]] = bool(how.stop or how.stop_token_ids) or group.stream
            if self._stops_at(sequence, int(tokens[i])):
                ended[i] = "stop"
        for i in sorted(ended):
            self._finish(s.sequence_in(slots[i]), ended[i])
        for group in grown:
            if group.stream and not group.finished:
                self._show(group)

    def _stops_at(self, sequence: Sequence, token: int) -> bool:
        stream = sequence.text_stream
        if token in sequence.group.sampling.stop_token_ids:
            return True
        return stream is not None and stream.push(token)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if sequence.group.pin and reason != "error":
            # Pinned before `finish`, which frees the sequence's blocks.
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            self._scheduler.policy.pin(sequence.slot, prompt, sequence.group.cache_root)
        self._scheduler.finish(sequence, reason)
        if sequence.group.finished:
            self._requests.retire(sequence.group)

    def _show(self, group: SequenceGroup) -> None:
        for sequence in group.unfinished:
            sequence.tokens = self._scheduler.slots.known_tokens(sequence.slot)
        self._requests.deliver(group)

    def _advance_searches(self, flight: InFlight, outputs: StepOutputs, now: float) -> None:
        """Pass the step's candidates to each beam search that has some, and its new live beams to
        the scheduler (vLLM §4.4)."""
        s, step = self._scheduler.slots, flight.step
        at_end = step.samples & s.beam[step.slots] & (s.generation[step.slots] == step.generations)
        row_of = {int(step.slots[i]): int(flight.rows[i]) for i in np.flatnonzero(at_end)}
        for group in {s.sequence_in(slot).group: None for slot in row_of}:
            rows = [row_of[beam.slot] for beam in group.sequences]
            if group.first_token_s is None:
                group.first_token_s = now
            if (np.asarray(outputs.tokens)[0, rows] < 0).any():
                self._end_search(group, "error")
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
            self._event_log.beams(
                now,
                flight.number,
                group,
                before=before,
                candidates=candidates,
                candidate_logprobs=logprobs,
                parents=[before[parent] for parent, _ in moves],
                slots=[beam.slot for beam in group.sequences] if moves else [],
            )
            if not moves:
                self._end_search(group, "length")

    def _end_search(self, group: SequenceGroup, reason: str) -> None:
        for beam in group.unfinished:
            self._scheduler.finish(beam, reason)
        self._requests.retire(group)
