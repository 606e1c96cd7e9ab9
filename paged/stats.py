"""What an engine has done and does, in numbers, for people who watch it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paged.engine import Engine
from paged.kv_cache.policy import ShardedModel


@dataclass
class Totals:
    """What has been done since the start, by one engine or by all of them together."""

    steps: int = 0
    step_s: float = 0.0
    host_s: float = 0.0
    failed_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swapped_units: int = 0
    copied_blocks: int = 0
    adapter_loads: int = 0
    compilations: int = 0
    moves: int = 0
    lost_runners: int = 0


@dataclass(frozen=True)
class EngineStats:
    """One engine, when it was asked. kv_bytes: in use, by pool; kv_tokens: by what they serve for,
    as in `paged.kv_cache.policy.Usage`. adapters: names of those on the device. policy: what
    `policy_figures` says."""

    running: int
    waiting: int
    kv_bytes: Mapping[str, int] = field(default_factory=dict)
    kv_bytes_total: Mapping[str, int] = field(default_factory=dict)
    kv_tokens: Mapping[str, int] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    policy: Mapping[str, float] = field(default_factory=dict)


class Tally:
    """Adds up what an engine records."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.totals = Totals()
        self._report: Mapping[str, Any] | None = None  # of the KV policy's device half, the last

    def count(self) -> None:
        """Take in the engine's records, and have it forget them."""
        engine, totals = self._engine, self.totals
        metrics, store = engine.metrics, engine.loop.adapter_store
        for step in metrics.steps:
            totals.steps += 1
            totals.step_s += step.device_s
            totals.host_s += step.host_s
            totals.prefill_tokens += step.prefill_tokens
            totals.decode_tokens += step.decode_tokens
            totals.preemptions += step.preemptions
            totals.swapped_units += step.swapped_out + step.swapped_in
            totals.copied_blocks += step.copied_blocks
        for request in metrics.requests:
            totals.prompt_tokens += request.prompt_tokens
            totals.output_tokens += request.output_tokens
            totals.cached_tokens += request.cached_tokens
        totals.compilations = metrics.compilations_warmup + metrics.compilations_after_warmup
        totals.adapter_loads = store.num_loads if store else 0
        steps = (event for event in reversed(metrics.events) if event["event"] == "step")
        if (last := next(steps, None)) is not None:
            self._report = last["report"]
        metrics.clear()

    def stats(self) -> EngineStats:
        """Of this moment."""
        engine = self._engine
        policy, store = engine.host_policy, engine.loop.adapter_store
        usage = policy.usage()
        return EngineStats(
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            kv_bytes=dict(usage.bytes),
            kv_bytes_total={
                pool.name: (pool.num_units - 1) * pool.unit_bytes for pool in policy.pools
            },
            kv_tokens={name: count for name, count in vars(usage).items() if name != "bytes"},
            adapters=frozenset(store.ready if store else ()),
            policy=policy_figures(engine, self._report),
        )


def policy_figures(engine: Engine, report: Mapping[str, Any] | None) -> dict[str, float]:
    """Of the running sequences, by name: the policy's own gauges, and

    context_tokens: tokens computed so far.
    dense_kv_bytes: bytes that the dense policy would hold for them.

    report: the last one of the policy's device half.
    """
    config, scheduler = engine.config, engine.scheduler
    slots = scheduler.running_slots()
    contexts = scheduler.slots.computed[slots]
    model = ShardedModel.split(engine.model, config.tensor_parallel, engine.executor.dtype)
    figures: dict[str, float] = {
        "context_tokens": int(contexts.sum()),
        "dense_kv_bytes": int(contexts.sum()) * model.kv_token_bytes(config.kv_dtype),
    }
    return figures | engine.host_policy.gauges(report, slots, contexts)
