"""Applies a step's sampled tokens: records them, ends sequences, and feeds streams."""

from typing import cast

import numpy as np

from models.config import ModelConfig
from paged.beams import Beams
from paged.device.step import StepOutputs
from paged.event_log import EventLog
from paged.in_flight import InFlight
from paged.kv_cache.host import PrefixCachingHost
from paged.outputs import record_logprobs
from paged.registry import Requests
from paged.requests.sequence import Sequence, SequenceGroup
from paged.requests.stopping import StopChecker
from paged.scheduling.scheduler import Scheduler


class Intake:
    """Passes a step's tokens to the scheduler's sequences, and their outputs to `Requests`."""

    def __init__(
        self, model: ModelConfig, scheduler: Scheduler, requests: Requests, event_log: EventLog
    ):
        self._scheduler, self._requests = scheduler, requests
        self._stops = StopChecker(model.eos_token_ids, model.vocab_size)
        self._beams = Beams(scheduler, requests, event_log)

    def apply(
        self, flight: InFlight, sampled: np.ndarray, outputs: StepOutputs, now: float
    ) -> None:
        """sampled: [I, n] tokens by iteration and scheduled row. now: the step's end in seconds on
        the engine's clock."""
        for iteration in range(flight.step.iterations):
            self._tokens(flight, iteration, sampled[iteration], outputs, now)
        if flight.step.has_beams:
            self._beams.advance(flight, outputs, now)

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
            policy = cast(PrefixCachingHost, self._scheduler.policy)
            policy.pin(sequence.slot, prompt, sequence.group.cache_root)
        self._scheduler.finish(sequence, reason)
        if sequence.group.finished:
            self._requests.retire(sequence.group)

    def _show(self, group: SequenceGroup) -> None:
        for sequence in group.unfinished:
            sequence.tokens = self._scheduler.slots.known_tokens(sequence.slot)
        self._requests.deliver(group)
