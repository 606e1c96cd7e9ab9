"""Applies a step's candidates to beam searches (vLLM §4.4)."""

import numpy as np

from paged.device.step import StepOutputs
from paged.event_log import EventLog
from paged.in_flight import InFlight
from paged.registry import Requests
from paged.requests.sequence import SequenceGroup
from paged.scheduling.scheduler import Scheduler


class Beams:
    """Passes each beam's candidates to its search, and the new live beams to the scheduler."""

    def __init__(self, scheduler: Scheduler, requests: Requests, event_log: EventLog):
        self._scheduler, self._requests, self._event_log = scheduler, requests, event_log

    def advance(self, flight: InFlight, outputs: StepOutputs, now: float) -> None:
        """Advance each search whose beams have candidates from this step. now: the step's end, in
        seconds on the engine's clock."""
        s, step = self._scheduler.slots, flight.step
        at_end = step.samples & s.beam[step.slots] & (s.generation[step.slots] == step.generations)
        row_of = {int(step.slots[i]): int(flight.rows[i]) for i in np.flatnonzero(at_end)}
        for group in {s.sequence_in(slot).group: None for slot in row_of}:
            rows = [row_of[beam.slot] for beam in group.sequences]
            if group.first_token_s is None:
                group.first_token_s = now
            if (np.asarray(outputs.tokens)[0, rows] < 0).any():
                self._end(group, "error")
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
                self._end(group, "length")

    def _end(self, group: SequenceGroup, reason: str) -> None:
        for beam in group.unfinished:
            self._scheduler.finish(beam, reason)
        self._requests.retire(group)
