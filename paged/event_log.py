"""The event log of an engine: every event and its fields, enough to replay the run."""

from dataclasses import asdict
from typing import Any

import numpy as np

from models.config import ModelConfig
from paged.adapters.store import Load
from paged.config import EngineConfig
from paged.metrics import NO_TOKEN, RequestRecord, StepRecord
from paged.requests.adapter import Adapter
from paged.requests.sequence import SequenceGroup
from paged.scheduling.scheduled_step import ScheduledStep


class EventLog:
    """Appends an event to `events`, a list of dicts, for each input, decision and result, in order.

    Fields that several events share:
        event: the event's name.
        time_s: seconds on the engine's clock.
        round: `EngineLoop.round` at that time.
        step: the number of a dispatched step.
        pages: in schedule and pages events, (pool, verb, units) of each operation on units of the
            policy's pools since the last such event, in order. In load events, the adapter's rank
            pages.

    Events by name:
        engine: the first event.
        adapter, arrival, abort, pin: inputs.
        load: a load of an adapter's weights to the device begins.
        loaded: a load has finished or failed. This is an input of a replay too.
        preempt, admit, schedule: the scheduler's decisions for a step.
        step: the result of a step.
        beams: the result of a step for one beam search.
        pages: operations after the last step, when nothing is in flight.
        finish: a request ends.
        failure: all requests end, because a call failed or was interrupted halfway.
    """

    def __init__(self, events: list[dict]):
        self._events = events

    def _add(self, event: str, time_s: float, **fields) -> None:
        self._events.append({"event": event, "time_s": time_s, **fields})

    def engine(self, config: EngineConfig, model: ModelConfig, dtype: str) -> None:
        """dtype: the model's compute dtype."""
        self._add("engine", 0.0, config=asdict(config), model=asdict(model), dtype=dtype)

    def arrival(self, round_: int, group: SequenceGroup, sampling: dict) -> None:
        """sampling: the parameters that differ from their defaults, and the seed.

        The event's field known has each sequence's known output without log-probabilities; empty if
        there is none."""
        start = group.num_prompt_tokens
        known: list[dict[str, Any]] = [
            {
                "tokens": sequence.tokens[start:],
                "finish_reason": sequence.finish_reason,
                "score": sequence.cumulative_logprob,
            }
            for sequence in group.sequences
        ]
        self._add(
            "arrival",
            group.arrival_s,
            round=round_,
            request_id=group.request_id,
            prompt_tokens=group.num_prompt_tokens,
            prompt=group.sequences[0].tokens[:start],
            sampling=sampling,
            stream=group.stream,
            cache_salt=group.cache_salt,
            adapter=group.adapter and group.adapter.name,
            known=known if any(len(each["tokens"]) for each in known) else [],
        )

    def adapter(self, time_s: float, round_: int, adapter: Adapter) -> None:
        self._add("adapter", time_s, round=round_, **vars(adapter))

    def load(self, time_s: float, load: Load) -> None:
        """The event's field evicted has the names of the evicted adapters."""
        self._add(
            "load",
            time_s,
            adapter=load.adapter.name,
            content_hash=load.adapter.content_hash,
            slot=load.slot,
            pages=load.pages,
            evicted=[adapter.name for adapter in load.evicted],
        )

    def loaded(self, time_s: float, round_: int, adapter: Adapter, error: str | None) -> None:
        self._add(
            "loaded",
            time_s,
            round=round_,
            adapter=adapter.name,
            content_hash=adapter.content_hash,
            error=error,
        )

    def abort(self, time_s: float, round_: int, group: SequenceGroup) -> None:
        self._add("abort", time_s, round=round_, request_id=group.request_id)

    def pin(self, time_s: float, round_: int, prompt: np.ndarray, group: SequenceGroup) -> None:
        self._add(
            "pin",
            time_s,
            round=round_,
            prompt=prompt,
            cache_salt=group.cache_salt,
            adapter=group.adapter and group.adapter.name,
        )

    def failure(self, time_s: float, round_: int) -> None:
        self._add("failure", time_s, round=round_)

    def preempt(self, time_s: float, group: SequenceGroup) -> None:
        self._add("preempt", time_s, request_id=group.request_id)

    def admit(self, time_s: float, group: SequenceGroup) -> None:
        """The event's field slots has the slots of the group's running sequences, in order."""
        slots = [sequence.slot for sequence in group.sequences if sequence.slot >= 0]
        self._add("admit", time_s, request_id=group.request_id, slots=slots)

    def schedule(self, time_s: float, number: int, step: ScheduledStep, pages: list) -> None:
        """The event's fields slots, starts, counts and sources are as in `ScheduledStep`; moves has
        the moves that are not empty."""
        self._add(
            "schedule",
            time_s,
            step=number,
            slots=step.slots,
            starts=step.starts,
            counts=step.counts,
            sources=step.sources,
            moves=step.moves.facts(),
            pages=pages,
        )

    def step(
        self, record: StepRecord, step: ScheduledStep, sampled: np.ndarray, report: Any = None
    ) -> None:
        """sampled: [I, n] tokens by iteration and scheduled row; the event has NO_TOKEN where a row
            yields none.
        report: the KV policy's report; None if the policy makes none.
        """
        asked = np.arange(len(sampled))[:, None] < step.yields
        tokens = np.where(asked, sampled, NO_TOKEN)
        self._events.append({"event": "step", **vars(record), "tokens": tokens, "report": report})

    def beams(
        self, time_s: float, number: int, group: SequenceGroup, *, before: list[int],
        candidates: np.ndarray, candidate_logprobs: np.ndarray, parents: list[int],
        slots: list[int],
    ) -> None:  # fmt: skip
        """One step of a beam search.

        before: slots of the B live beams before the step.
        candidates, candidate_logprobs: [B, A] best next tokens of each beam.
        slots: slots of the new live beams; empty at the end of the search.
        parents: slots in `before`, the parent of each new beam.
        """
        self._add(
            "beams",
            time_s,
            step=number,
            request_id=group.request_id,
            before=before,
            candidates=candidates,
            candidate_logprobs=candidate_logprobs,
            parents=parents,
            slots=slots,
        )

    def pages(self, time_s: float, pages: list) -> None:
        self._add("pages", time_s, pages=pages)


def finish_event(record: RequestRecord) -> dict:
    """The event 'finish'. `Requests.retire` appends it, as one change with the request's end."""
    return {"event": "finish", "time_s": record.finish_s, **vars(record)}
