"""Counters and gauges of an engine, for monitoring."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from paged.checks import described
from paged.engine import Engine
from paged.kv_cache.policy import ShardedModel


@dataclass
class Totals:
    """Counters since the start, of one engine or of several together."""

    steps: int = described(0, "steps of engines")
    step_s: float = described(0.0, "seconds in which the device ran steps")
    host_s: float = described(0.0, "seconds that the host worked on steps")
    failed_steps: int = described(0, "steps that failed, with all requests that they served")
    prefill_tokens: int = described(0, "tokens of prompts that were computed")
    decode_tokens: int = described(0, "tokens that were computed one by one, after their prompts")
    prompt_tokens: int = described(0, "prompt tokens of requests that have ended")
    output_tokens: int = described(0, "output tokens of requests that have ended")
    cached_tokens: int = described(0, "prompt tokens that the prefix cache had")
    preemptions: int = described(0, "preemptions of requests")
    swapped_units: int = described(0, "units of KV memory that were swapped out or in")
    copied_blocks: int = described(0, "KV blocks that were copied on write")
    adapter_loads: int = described(0, "loads of adapters to a device")
    compilations: int = described(0, "programs that were compiled")
    moves: int = described(0, "moves of requests between runners")
    lost_runners: int = described(0, "runners that have died")


def summed(parts: Iterable[Totals]) -> Totals:
    return Totals(*map(sum, zip(*map(astuple, parts))))


def _gauges(label: str, help: str) -> Any:
    """A field with a gauge for each value of `label`."""
    return field(default_factory=dict, metadata={"help": help, "label": label})


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of one engine.

    kv_tokens: KV memory in tokens, by category of `paged.kv_cache.usage.Usage`.
    policy: the result of `policy_figures`.
    adapters: names of the adapters on the device.
    """

    running: int = described(0, "requests that run")
    waiting: int = described(0, "requests that wait")
    kv_bytes: Mapping[str, int] = _gauges("pool", "KV memory in use, by pool")
    kv_bytes_total: Mapping[str, int] = _gauges("pool", "KV memory that there is, by pool")
    kv_tokens: Mapping[str, int] = _gauges("kind", "KV memory in tokens, by what it holds")
    policy: Mapping[str, float] = _gauges(
        "figure", "the KV policy's own figures of requests that run, such as tokens kept or read"
    )
    adapters: frozenset[str] = field(
        default=frozenset(),
        metadata={"help": "adapters on the device", "name": "resident_adapters"},
    )


class Tally:
    """Adds up an engine's records in `totals`."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.totals = Totals()
        self._report: Mapping[str, Any] | None = None  # last report of the policy's device half

    def count(self) -> None:
        """Add the engine's records to `totals`, and clear them."""
        engine, totals = self._engine, self.totals
        metrics = engine.metrics
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
        # The count of `AdapterStore` begins anew after a failed step.
        totals.adapter_loads += sum(event["event"] == "load" for event in metrics.events)
        steps = (event for event in reversed(metrics.events) if event["event"] == "step")
        if (last := next(steps, None)) is not None:
            self._report = last["report"]
        metrics.clear()

    def stats(self) -> EngineStats:
        """The engine's state at this moment."""
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
    """Figures of the running sequences by name: the policy's own gauges, and two further figures.

    context_tokens: tokens computed so far.
    dense_kv_bytes: bytes that the vllm policy would hold for these tokens.

    report: the last report of the policy's device half.
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
