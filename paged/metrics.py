"""The engine's records: a row for each step and for each request, and the events of `EventLog`."""

from dataclasses import dataclass, field

import numpy as np

from paged.kv_cache.moves import count_units
from paged.kv_cache.usage import Usage
from paged.requests.sequence import RequestOutput, SequenceGroup
from paged.scheduling.scheduled_step import ScheduledStep
from paged.scheduling.scheduler import Scheduler

NO_TOKEN = -2  # value in the log for a row without a token in an iteration; beams yield none


@dataclass(frozen=True)
class StepRecord:
    """One step. Times are in seconds.

    time_s: the step's end on the engine's clock.
    host_s: wall time of the host's work in the round that dispatched this step (schedule, batch
        building, dispatch, and applying the previous step's outputs), without waiting; 0 for a step
        of a decode run.
    device_s: time from the later of schedule and the previous step's end to this step's end,
        measured on the host.
    decode_tokens: tokens of decode rows, including tokens that are dropped later.
    num_running, num_waiting: number of groups.
    preemptions: groups preempted since the last step.
    swapped_out, swapped_in: units of the policy's pools that were swapped before the step.
    copied_blocks: units that were copied before the step.
    kv_bytes: bytes in use, in all pools.
    other kv_*: tokens, as in `paged.kv_cache.usage.Usage`.
    """

    step: int
    time_s: float
    host_s: float
    device_s: float
    prefill_tokens: int
    decode_tokens: int
    num_running: int
    num_waiting: int
    preemptions: int
    kv_token_states: int
    kv_reserved: int
    kv_internal: int
    kv_external: int
    kv_free: int
    kv_shared: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    copied_blocks: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True)
class RequestRecord:
    """One finished request. Times are in seconds on the engine's clock.

    first_token_s: None if the request ended before its first token.
    output_tokens: output tokens of all its sequences, or of a beam search's returned hypotheses;
        known output included.
    cached_tokens: tokens from the prefix cache or a pinned prefix, also in recomputations after
        preemptions.
    """

    request_id: str
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    finish_reason: str
    cached_tokens: int = 0
    sequences: int = 1


def step_facts(step: ScheduledStep, scheduler: Scheduler) -> dict[str, int]:
    """The fields of a StepRecord that are known once its step is scheduled."""
    return {
        "prefill_tokens": step.num_prefill_tokens,
        "decode_tokens": step.num_decode_tokens,
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "preemptions": len(step.preempted),
        "swapped_out": count_units(step.moves.exports),
        "swapped_in": count_units(step.moves.imports),
        "copied_blocks": count_units(step.moves.copies),
        **memory_facts(scheduler.policy.usage()),
    }


def memory_facts(usage: Usage) -> dict[str, int]:
    """The fields of a StepRecord that describe KV memory."""
    return {
        "kv_token_states": usage.token_states,
        "kv_reserved": usage.reserved,
        "kv_internal": usage.internal,
        "kv_external": usage.external,
        "kv_free": usage.free,
        "kv_shared": usage.shared,
        "kv_bytes": sum(usage.bytes.values()),
    }


def request_record(group: SequenceGroup, output: RequestOutput, finish_s: float) -> RequestRecord:
    """The record of a request that ended at `finish_s`. output: its last output."""
    reason = group.sequences[0].finish_reason if group.search is None else output.finish_reason
    assert reason is not None
    # All sampled sequences are included, even if fewer are returned.
    outputs = [s.tokens[group.num_prompt_tokens :] for s in group.sequences]
    if group.search is not None:
        outputs = [np.array(sequence.tokens) for sequence in output.sequences]
    return RequestRecord(
        request_id=group.request_id,
        arrival_s=group.arrival_s,
        first_token_s=group.first_token_s,
        finish_s=finish_s,
        prompt_tokens=group.num_prompt_tokens,
        output_tokens=sum(map(len, outputs)),
        preemptions=group.num_preemptions,
        finish_reason=reason,
        cached_tokens=group.num_cached_tokens,
        sequences=len(outputs),
    )


@dataclass
class Metrics:
    """The records of an engine, which grow until `clear`.

    events: written by `EventLog`.
    compilations_warmup: programs that this process compiled, or loaded from JAX's cache, from
        construction to the end of `warm_up`.
    compilations_after_warmup: programs compiled or loaded since then, or since the construction
        without `warm_up`.
    """

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    compilations_warmup: int = 0
    compilations_after_warmup: int = 0

    def clear(self) -> None:
        """Delete all records, for a long-lived engine. Later events cannot be replayed."""
        for records in (self.steps, self.requests, self.events):
            records.clear()
