"""The engine's loop. Each step: schedule → build its inputs → dispatch → apply its outputs.

The host runs one step ahead. It dispatches a step before it has read the previous step's tokens,
which are inputs of the new step on the device. An end by a sampled token or a stop string is
therefore detected one step late, and the extra token is dropped. An end at the length limit is
known before.
"""

import time

import numpy as np

from models.config import ModelConfig
from paged.adapters.loads import AdapterLoads
from paged.adapters.store import AdapterStore
from paged.config import EngineConfig
from paged.decode_runs import LONGEST, Ahead, DecodeRuns
from paged.device.batch_builder import build_step_inputs
from paged.device.buckets import Buckets
from paged.device.executor import Executor, ReportingExecutor
from paged.event_log import EventLog
from paged.in_flight import InFlight
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.metrics import Metrics, StepRecord, step_facts
from paged.outputs import record_prompt_logprobs
from paged.postprocess import Postprocessor
from paged.registry import Requests
from paged.scheduling.admission import in_turn
from paged.scheduling.scheduled_step import ScheduledStep
from paged.scheduling.scheduler import Scheduler


class EngineLoop:
    """Runs the scheduler's steps on one executor; only `Engine` calls it.

    round: number of rounds so far. A `run_step` call is one round, or one for each step of a decode
        run. Calls that only waited for an adapter are excluded, because their number depends on the
        clock.

    After an exception from `run_step` host and device may disagree. Then `reset` must be called.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, executor: Executor, requests: Requests,
        metrics: Metrics, event_log: EventLog,
    ):  # fmt: skip
        self.model, self.config, self.executor = model, config, executor
        self.metrics, self.event_log = metrics, event_log
        self.round = 0
        self.loads = executor.adapters  # a replay puts `RecordedLoads` here
        self._requests = requests
        self._buckets = Buckets.declare(config)
        self._num_steps = 0
        self._previous_end_s = 0.0
        self._waited_s = 0.0
        self._compilations_at_start = executor.compilations
        self._start()

    def _start(self) -> None:
        config, gate = self.config, None
        if config.adapter_slots:
            gate = AdapterStore(config.adapter_slots, config.num_adapter_pages)
        self.adapter_store: AdapterStore | None = gate
        sharded = ShardedModel.split(self.model, config.tensor_parallel, self.executor.dtype)
        policy = policy_of(config.policy)
        self.host_policy = policy.host(config, sharded)
        if policy.simulated and isinstance(self.executor, ReportingExecutor):
            self.executor.report_by(policy.simulated, config, sharded)
        self.scheduler = Scheduler(config, self.host_policy, gate)
        self._postprocessor = Postprocessor(
            self.model, self.scheduler, self._requests, self.event_log
        )
        self._in_flight: InFlight | None = None
        self._runs = DecodeRuns.possible(
            config, self.scheduler, self.executor, self.model.eos_token_ids
        )

    def reset(self) -> None:
        """Drop all waiting and running requests and the cache, on host and device. An interrupted
        reset may be called again."""
        self._start()
        self.executor.reset()

    def warm_up(self, progress: bool) -> None:
        """Compile every declared step shape."""
        self.executor.warm_up(progress)
        self.metrics.compilations_warmup = self.executor.compilations - self._compilations_at_start
        self._compilations_at_start = self.executor.compilations

    @property
    def is_in_flight(self) -> bool:
        """Whether the outputs of a dispatched step have not been applied yet."""
        return self._in_flight is not None

    def run_step(self, until_s: float | None = None, max_steps: int = LONGEST) -> None:
        """Dispatch the next step, if there is anything to compute, and apply the previous step's
        outputs.

        until_s: if possible, run up to `max_steps` decode steps whose engine calls begin before
            this time (`DecodeRuns`).
        """
        if until_s is not None and self._skip(until_s, max_steps):
            return
        began, self._waited_s = time.perf_counter(), 0.0
        changed = False
        if self.adapter_store:
            changed = self._take_in_adapters(self.adapter_store)
        self.round += 1
        previous, decodes = self._in_flight, None
        # Beams cannot run ahead. Other rows of their step wait for them, or beams would miss every
        # other step.
        if previous and self.config.run_ahead and not previous.step.has_beams:
            decodes = self.scheduler.decodes()
        # The step in flight may end sequences, whose blocks can make a preemption needless.
        if previous and decodes is None:
            self._take_in(previous)
            previous, changed = None, True
        if self.adapter_store:
            changed |= self._begin_loads(self.adapter_store)
        step = self.scheduler.schedule(self._num_steps, decodes)
        self._in_flight = None if step is None else self._dispatch(step)
        waits = not previous and step is None and self.scheduler.has_unfinished()
        if previous:
            self._take_in(previous)
        if waits:
            assert self.scheduler.gate.loading, "requests are left and nothing can run"
            self._loads.wait()
        if self._in_flight is None and (pages := self.host_policy.drain_operations()):
            self.event_log.pages(self.executor.clock.now(), pages)
            changed = True
        if waits and not changed:  # the round has only waited
            self.round -= 1
        if self._in_flight:
            self._in_flight.host_s = time.perf_counter() - began - self._waited_s

    def _skip(self, until_s: float, max_steps: int) -> bool:
        """Execute a run of decode steps, if possible. Returns whether a run was executed."""
        run = None
        if self._runs and self._in_flight:
            run = self._runs.next(self._in_flight, until_s, max_steps, self._previous_end_s)
        if run:
            self.round += run.steps
            self._num_steps += run.steps
            if run.records:
                self.executor.clock.wait_until(run.clock_s)
                self._previous_end_s = run.clock_s
                self.metrics.steps += run.records
            elif self._in_flight:
                self._take_in(self._in_flight)
            self._in_flight = run.flight
        return run is not None

    def decodes_ahead(self) -> Ahead | None:
        """See `DecodeRuns.ahead`."""
        if self._runs is None or self._in_flight is None:
            return None
        return self._runs.ahead(self._in_flight, self._previous_end_s)

    @property
    def _loads(self) -> AdapterLoads:
        assert self.loads is not None, "the executor has no adapters"
        return self.loads

    def _take_in_adapters(self, store: AdapterStore) -> bool:
        """Install adapters that have arrived on the device, and end the requests of adapters whose
        loads failed. Returns whether any load has ended. Loads are only ended here, so that a
        replay ends them in the same round."""
        finished = self._loads.finished(self.round)
        for adapter, error in finished:
            now = self.executor.clock.now()
            self.event_log.loaded(now, self.round, adapter, error)
            if error is None:
                resident = store.arrive(adapter)
                self._loads.install(adapter, resident.slot, resident.pages)
                continue
            store.fail(adapter)
            for group in [g for g in self.scheduler.waiting if g.adapter is adapter]:
                self.scheduler.abort(group, "error")
                self._requests.retire(group)
        return bool(finished)

    def _begin_loads(self, store: AdapterStore) -> bool:
        """Begin the loads that are due. Returns whether any load has begun."""
        queue = in_turn(self.scheduler.waiting, self.scheduler.returning)
        loads = store.plan(group.adapter for group in queue)
        for load in loads:
            self.event_log.load(self.executor.clock.now(), load)
            self._loads.begin(load.adapter)
        return bool(loads)

    def _dispatch(self, step: ScheduledStep) -> InFlight:
        scheduler, now = self.scheduler, self.executor.clock.now()
        number = self._num_steps
        self._num_steps += 1
        for group in step.preempted:
            self.event_log.preempt(now, group)
        for group in step.admitted:
            self.event_log.admit(now, group)
        self.event_log.schedule(now, number, step, self.host_policy.drain_operations())
        self.executor.apply(step.moves)
        replays = scheduler.slots.replays and self.config.multi_step > 1
        for group in step.admitted:
            how = group.sampling
            for sequence in group.sequences:
                if sequence.slot >= 0 and (how.uses_history or how.logit_bias or replays):
                    tokens = np.append(sequence.tokens, np.array(sequence.still_forced, np.int32))
                    self.executor.load_slot(sequence.slot, tokens, how.logit_bias)
        inputs, rows = build_step_inputs(
            step,
            scheduler.slots,
            self.host_policy,
            self._buckets,
            self.config.max_prefills_per_step,
            adapters=self.adapter_store is not None,
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
        metrics.steps.append(record)
        report = outputs.report
        if report is not None:
            self.host_policy.observe(flight.number, report)
        self.event_log.step(record, step, sampled, report)
        metrics.compilations_after_warmup = self.executor.compilations - self._compilations_at_start

        record_prompt_logprobs(step, self.scheduler.slots, outputs.prompt_logprobs)
        self._postprocessor.apply(flight, sampled, outputs, now)
