"""Decode runs: consecutive steps that only decode, executed in one call in simulated time.

A run equals the engine's loop: the same rows decode, none of them ends, and no waiting request is
admitted. A run ends before the first step in which the scheduler might decide anything else. The
policy still decides how memory grows. After a step with prefills, or with rows that end, a run has
only one step, and the engine applies the outputs of the step before the run as usual.

The steps of a run have records, but no `schedule` events. A step whose outputs a run applies has no
`step` event.
"""

import functools
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np

from paged.config import EngineConfig
from paged.device.executor import Executor, PendingOutputs
from paged.in_flight import InFlight
from paged.kv_cache.host import HostPolicy
from paged.kv_cache.moves import Moves
from paged.kv_cache.usage import Usage
from paged.metrics import StepRecord, memory_facts
from paged.scheduling.scheduled_step import ScheduledStep, by_adapter
from paged.scheduling.scheduler import Scheduler
from paged.simulator.executor import SimulatedExecutor

LONGEST = 512  # most steps of a run, to bound its arrays [steps, rows]
# Methods whose work `decode_steps` does for many steps.
REPEATED = ("can_append", "append", "advance", "usage")


class SteadyHost(HostPolicy, Protocol):
    """A host half whose free memory only shrinks while rows decode, so that a request without room
    stays without room."""

    def decode_steps(
        self, number: int, slots: np.ndarray, num_tokens: np.ndarray, most: int
    ) -> list[Usage]:
        """Grow slots [n] by one token a step, like `append` and `advance` in each step.

        Stops after `most` steps, or before the first step that lacks room (`can_append`) or would
        move a block. Returns the usage after each step.

        number: number of the first step.
        num_tokens: [n] tokens after the first step.
        """
        ...


class ForeseenHost(SteadyHost, Protocol):
    """A `SteadyHost` whose free memory is known ahead. With other hosts, a simulated cluster
    executes the steps of a run one by one."""

    def free_ahead(self, slots: np.ndarray, num_tokens: np.ndarray, most: int) -> np.ndarray:
        """Free tokens [k] after each of the steps that `decode_steps` would take; changes nothing.
        num_tokens: [n] tokens after the first step."""
        ...


@dataclass(frozen=True)
class Run:
    """Dispatched steps. The last step is in flight. The outputs of all others have been applied.

    steps: number of dispatched steps.
    records: records of the steps whose outputs have been applied, beginning with the step that was
        in flight before the run; empty if that step's outputs have not been applied.
    flight: the last step.
    clock_s: the end of the newest step whose outputs have been applied; unused without records.
    """

    steps: int
    records: list[StepRecord]
    flight: InFlight
    clock_s: float


@dataclass(frozen=True)
class Ahead:
    """The next k steps, which only decode, if no request arrives or is aborted in between.

    ends_s: [k] the clock after the engine call that dispatches each step: the end of the step
        before it.
    free: [k] free tokens of KV memory at that time.
    """

    ends_s: np.ndarray
    free: np.ndarray


@dataclass(frozen=True)
class _Certain:
    """The k steps after the step in flight that need no decision of the scheduler, if they have
    enough memory.

    slots: [n] slots of their rows.
    lengths: [n] computed tokens after the first step.
    ends_s: [k + 1 or more] end of the step in flight, and of each step.
    tokens: [k + 1, n] tokens sampled by the step in flight, and by each step.
    """

    slots: np.ndarray
    lengths: np.ndarray
    ends_s: np.ndarray
    tokens: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.tokens) - 1

    def without_first(self) -> "_Certain":
        return _Certain(self.slots, self.lengths + 1, self.ends_s[1:], self.tokens[1:])

    def until(self, until_s: float) -> "_Certain":
        """The steps that begin before `until_s`, at least one."""
        steps = 1 + int(self.ends_s[: self.steps - 1].searchsorted(until_s))
        return replace(self, tokens=self.tokens[: steps + 1])


class DecodeRuns:
    """Finds runs, and applies their steps to scheduler, policy and executor."""

    def __init__(
        self, config: EngineConfig, scheduler: Scheduler, executor: SimulatedExecutor,
        eos_token_ids: tuple[int, ...],
    ):  # fmt: skip
        self._config, self._scheduler, self._executor = config, scheduler, executor
        self._eos = np.array(eos_token_ids, np.int64)
        self._seen: tuple[InFlight, _Certain] | None = None  # result to reuse in `_certain`

    @classmethod
    def possible(
        cls, config: EngineConfig, scheduler: Scheduler, executor: Executor,
        eos_token_ids: tuple[int, ...],
    ) -> "DecodeRuns | None":  # fmt: skip
        """The runs of an engine; None on a real device, with multi_step, and for an executor that
        cannot compute several steps in advance."""
        if not isinstance(executor, SimulatedExecutor):
            return None
        if config.multi_step > 1 or not executor.takes_runs:
            return None
        return cls(config, scheduler, executor, eos_token_ids)

    def next(
        self, flight: InFlight, until_s: float, max_steps: int, previous_end_s: float
    ) -> Run | None:
        """A run of the steps whose engine calls begin before `until_s`, at least one and at most
        `max_steps`; None if the scheduler must decide.

        flight: the step in flight.
        previous_end_s: the end of the step before `flight`.
        """
        rows = self._rows(flight) if self._can_grow() else None
        if rows is None:
            return None
        slots, same = rows
        certain = self._certain(flight, slots, until_s, previous_end_s)
        if certain is None:
            return None
        most = min(max_steps, certain.steps) if same else 1
        usages = self._grow(flight.number + 1, slots, certain.lengths, most)
        if not usages:
            return None
        steps, s, executor = len(usages), self._scheduler.slots, self._executor
        if same:
            s.decoded(slots, certain.tokens[:steps])
            if self._config.prefix_caching:
                known = np.minimum(s.known[slots], s.computed[slots])
                self._scheduler.policy.confirm(slots, known, s.tokens)
        else:
            s.dispatched(slots)
        last = certain.tokens[steps : steps + 1]
        outputs = executor.run_decodes(steps, float(certain.ends_s[steps]), last)
        run = self._run(flight, slots, outputs, usages, certain.ends_s, previous_end_s)
        if same:
            return run
        if certain.steps > 1:
            self._seen = run.flight, certain.without_first()
        return replace(run, records=[])

    def ahead(self, flight: InFlight, previous_end_s: float) -> Ahead | None:
        """The steps that `next` would take if no request arrived in between, without taking them.
        None if there are none, if the step in flight has other rows, if a request waits, or if the
        host half is not a `ForeseenHost`."""
        policy = self._scheduler.policy
        if self._scheduler.waiting or not _is_steady(type(policy)):
            return None
        if not hasattr(policy, "free_ahead"):
            return None
        rows = self._rows(flight)
        if rows is None or not rows[1]:
            return None
        found = self._certain(flight, rows[0], np.inf, previous_end_s)
        if found is None:
            return None
        self._seen = flight, found
        free = cast(ForeseenHost, policy).free_ahead(found.slots, found.lengths, found.steps)
        return Ahead(found.ends_s[: len(free)], free) if len(free) else None

    def _certain(
        self, flight: InFlight, slots: np.ndarray, until_s: float, previous_end_s: float
    ) -> _Certain | None:
        """The certain steps that begin before `until_s`, at least one; None if there are none.
        slots: slots of their rows."""
        seen, self._seen = self._seen, None
        if seen and seen[0] is flight and np.array_equal(seen[1].slots, slots):
            return seen[1].until(until_s)
        s, executor = self._scheduler.slots, self._executor
        lengths = s.length[slots].copy()
        most = min(LONGEST, int((s.limit[slots] - lengths).min()))
        begins = executor.device_free_s
        # Compute no more steps than `until_s` allows if each step takes as long as the last. Too
        # low an estimate only costs another run.
        a_step = begins - max(flight.dispatched_s, previous_end_s)
        if a_step > 0 and until_s - begins < LONGEST * a_step:
            most = min(most, 3 + max(0, int((until_s - begins) / a_step)))
        contexts = lengths + np.arange(most)[:, None]
        times = executor.decode_times(slots, contexts, s.adapter[slots])
        ends = np.add.accumulate(np.concatenate([[begins], times]))
        most = 1 + int(ends[: most - 1].searchsorted(until_s))
        sampled_at = lengths + np.arange(-1, most)[:, None]
        tokens = executor.decoded(s.sampling["seed"][slots], sampled_at)
        if len(self._eos) and not s.ignore_eos[slots].all():
            stops = (np.isin(tokens[:most], self._eos) & ~s.ignore_eos[slots]).any(1)
            most = int(stops.argmax()) if stops.any() else most
        return _Certain(slots, lengths, ends, tokens[: most + 1]) if most else None

    def _rows(self, flight: InFlight) -> tuple[np.ndarray, bool] | None:
        """(slots of the next step's rows, whether the step in flight decodes exactly these rows);
        None if the scheduler must decide."""
        scheduler, step, s = self._scheduler, flight.step, self._scheduler.slots
        if scheduler.waiting and not scheduler.nobody_enters:
            return None
        if scheduler.gate.loading or step.has_beams:
            return None
        slots = scheduler.running_slots()
        generate = s.generate(slots)
        same = len(slots) == len(step.slots) and not (step.num_prefills or len(step.sources))
        same = same and bool(generate.all()) and not s.watched[slots].any()
        same = same and np.array_equal(step.generations, s.generation[step.slots])
        if not same:
            ends = s.length[slots] >= s.limit[slots]
            if not (generate | ends).all() or not generate.any() or not self._takes_one():
                return None
            slots = slots[generate]
        if s.beam[slots].any():
            return None
        if self._config.adapter_slots:
            slots = by_adapter([], slots, s.adapter, self._config.adapter_slots)
        return slots, same

    def _takes_one(self) -> bool:
        """Whether a run of one step can follow a step with other rows. Such a run needs run_ahead
        and a `SteadyHost`. No request may wait for prefill room, which the other rows took."""
        scheduler = self._scheduler
        waits_for_room = scheduler.waiting and scheduler.lacked_room
        steady = _is_steady(type(scheduler.policy))
        return self._config.run_ahead and steady and not waits_for_room

    def _can_grow(self) -> bool:
        """Whether a run is possible now. If the host half is no `SteadyHost`, a run needs run_ahead
        and an empty queue."""
        alone = self._config.run_ahead and not self._scheduler.waiting
        return alone or _is_steady(type(self._scheduler.policy))

    def _grow(
        self, number: int, slots: np.ndarray, num_tokens: np.ndarray, most: int
    ) -> list[Usage]:
        """See `SteadyHost.decode_steps`. Other hosts grow step by step."""
        policy, usages = self._scheduler.policy, []
        if _is_steady(type(policy)):
            return cast(SteadyHost, policy).decode_steps(number, slots, num_tokens, most)
        for step in range(number, number + most):
            if not policy.can_append(slots, num_tokens):
                break
            policy.append(slots, num_tokens)
            policy.advance(step, slots, num_tokens - 1, num_tokens)
            moves = policy.take_moves()
            moved = moves.copies or moves.exports or moves.imports
            assert not moved, "rows that generate move nothing"
            usages.append(policy.usage())
            if (report := self._executor.report()) is not None:
                policy.observe(step - 1, report)
                self._executor.apply(moves)
                self._executor.grow(slots, num_tokens)
            num_tokens = num_tokens + 1
        return usages

    def _run(
        self, flight: InFlight, slots: np.ndarray, outputs: PendingOutputs, usages: list[Usage],
        ends: np.ndarray, previous_end_s: float,
    ) -> Run:  # fmt: skip
        """ends: end of the step in flight, and of each step of the run, in seconds."""
        scheduler, s, steps = self._scheduler, self._scheduler.slots, len(usages)
        facts_of_all = {
            "prefill_tokens": 0,
            "decode_tokens": len(slots),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "preemptions": 0,
        }
        facts = [flight.facts, *(facts_of_all | memory_facts(usage) for usage in usages)]
        times = ends[: steps + 1].tolist()
        starts = [max(flight.dispatched_s, previous_end_s), *times]
        records = [
            StepRecord(flight.number + i, times[i], flight.host_s if i == 0 else 0.0,
                       times[i] - starts[i], **facts[i])
            for i in range(steps)
        ]  # fmt: skip
        step = ScheduledStep(
            slots=slots,
            starts=s.computed[slots] - 1,
            counts=np.ones_like(slots),
            samples=np.ones(len(slots), bool),
            yields=np.ones_like(slots),
            generations=s.generation[slots],
            num_prefills=0,
            sources=np.zeros(0, np.int64),
            moves=Moves(),
            has_beams=False,
            preempted=[],
            admitted=[],
        )
        ahead = times[steps - 2] if steps > 1 else self._executor.clock.now()
        last = InFlight(
            flight.number + steps, step, np.arange(len(slots)), outputs,
            ahead if self._config.run_ahead else times[steps - 1], facts[steps],
        )  # fmt: skip
        return Run(steps, records, last, times[steps - 1])


@functools.cache
def _is_steady(policy: type[HostPolicy]) -> bool:
    """Whether `policy` has `decode_steps`, and no later subclass overrides a method of REPEATED."""
    classes = policy.__mro__
    first = next((i for i, of in enumerate(classes) if "decode_steps" in vars(of)), len(classes))
    later = {name for of in classes[:first] for name in vars(of)}
    return first < len(classes) and later.isdisjoint(REPEATED)
