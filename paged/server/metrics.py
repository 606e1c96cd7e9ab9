"""What /metrics tells: the server's requests, and what the engines say of themselves when asked."""

import asyncio
from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paged.server.owner import Owner, Stats
from paged.server.reply import Reply
from paged.stats import Totals

SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    163.84, 327.68, 655.36,
)  # fmt: skip
TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
PREFIX = "paged_"
STATS_S = 30.0  # after which /metrics fails: the engine's thread says nothing
TOTALS = {
    "steps": "steps of engines",
    "step_s": "seconds in which the device ran steps",
    "host_s": "seconds that the host worked on steps",
    "failed_steps": "steps that failed, with all requests that they served",
    "prefill_tokens": "tokens of prompts that were computed",
    "decode_tokens": "tokens that were computed one by one, after their prompts",
    "prompt_tokens": "prompt tokens of requests that have ended",
    "output_tokens": "output tokens of requests that have ended",
    "cached_tokens": "prompt tokens that the prefix cache had",
    "preemptions": "preemptions of requests",
    "swapped_units": "units of KV memory that were swapped out or in",
    "copied_blocks": "KV blocks that were copied on write",
    "adapter_loads": "loads of adapters to a device",
    "compilations": "programs that were compiled",
    "moves": "moves of requests between runners",
    "lost_runners": "runners that have died",
}
assert set(TOTALS) == {field.name for field in fields(Totals)}


class ServerMetrics:
    """TTFT, TPOT and the whole time of a prompt are those that the server sees: from the request to
    what the engine's thread has told it of."""

    def __init__(self, owner: Owner):
        self._owner = owner
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.http = Counter(
            PREFIX + "http_requests", "HTTP requests by path and status", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self.ttft = Histogram(
            PREFIX + "time_to_first_token_seconds", "from the request to its first token",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.tpot = Histogram(
            PREFIX + "time_per_output_token_seconds", "of tokens after the first",
            buckets=TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self.whole = Histogram(
            PREFIX + "request_seconds", "from the request to its end",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.prompts = Counter(
            PREFIX + "prompts", "prompts that have ended, by reason", ["reason"], registry=registry
        )

    def ended(self, reply: Reply) -> None:
        """Count a prompt, whatever has become of it."""
        if reply.end_s is None:
            self.prompts.labels("abort").inc()
            return
        output = reply.output
        self.prompts.labels(output.finish_reason if output else "refused").inc()
        if output is None or reply.first_token_s is None:
            return
        self.ttft.observe(reply.first_token_s - reply.began_s)
        self.whole.observe(reply.end_s - reply.began_s)
        most = max(len(sequence.tokens) for sequence in output.sequences)
        if most > 1:
            self.tpot.observe((reply.end_s - reply.first_token_s) / (most - 1))

    async def text(self) -> bytes:
        """In Prometheus's format."""
        async with asyncio.timeout(STATS_S):
            stats = await asyncio.wrap_future(self._owner.stats())
        registry = CollectorRegistry()
        registry.register(_Told(stats))
        return generate_latest(self._registry) + generate_latest(registry)


class _Told:
    """The engines' own figures as Prometheus's metrics."""

    def __init__(self, stats: Stats):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, help in TOTALS.items():
            named = PREFIX + (name[:-2] + "_seconds" if name.endswith("_s") else name)
            yield CounterMetricFamily(named, help, value=getattr(self._stats.totals, name))
        runners = self._stats.runners
        for name, help in (("running", "requests that run"), ("waiting", "requests that wait")):
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=["runner"])
            for runner, stats in runners.items():
                gauge.add_metric([runner], getattr(stats, name))
            yield gauge
        for name, help, label in (
            ("kv_bytes", "KV memory in use, by pool", "pool"),
            ("kv_bytes_total", "KV memory that there is, by pool", "pool"),
            ("kv_tokens", "KV memory in tokens, by what it serves for", "kind"),
            ("policy", "what the KV policy saves, of the requests that run", "figure"),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=["runner", label])
            for runner, stats in runners.items():
                for kind, value in getattr(stats, name).items():
                    gauge.add_metric([runner, kind], value)
            yield gauge
        gauge = GaugeMetricFamily(
            PREFIX + "resident_adapters", "adapters on the device", labels=["runner"]
        )
        for runner, stats in runners.items():
            gauge.add_metric([runner], len(stats.adapters))
        yield gauge
