"""Prometheus metrics: the server's own requests, and its engines' counters and gauges."""

import asyncio
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paged.server.engine_client import Client, Reply, Stats
from paged.stats import EngineStats, Totals

SECONDS = [0.005 * 2**i for i in range(18)]
TOKEN_SECONDS = [0.001 * 2**i for i in range(11)]
PREFIX = "paged_"
STATS_S = 30.0  # seconds without an answer of the engine's thread after which /metrics fails


class ServerMetrics:
    """Times begin when a prompt is submitted to the `Client`, and end when the client's thread
    delivers tokens.

    http: responses, by path and status.
    """

    def __init__(self, client: Client):
        self._client = client
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        counter, histogram = self._counter, self._histogram
        self.http = counter("http_requests", "HTTP requests by path and status", "path", "status")
        self._ttft = histogram(
            "time_to_first_token_seconds", "from the request to its first token", SECONDS
        )
        self._tpot = histogram(
            "time_per_output_token_seconds", "time per token after the first", TOKEN_SECONDS
        )
        self._whole = histogram("request_seconds", "from the request to its end", SECONDS)
        self._prompts = counter("prompts", "prompts that have ended, by reason", "reason")

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: list[float]) -> Histogram:
        return Histogram(PREFIX + name, help, buckets=buckets, registry=self._registry)

    def ended(self, reply: Reply) -> None:
        """Count a prompt that has ended or was aborted; observe its times if it has an output."""
        if reply.end_s is None:
            self._prompts.labels("abort").inc()
            return
        output = reply.output
        self._prompts.labels(output.finish_reason if output else "refused").inc()
        if output is None or reply.first_token_s is None:
            return
        self._ttft.observe(reply.first_token_s - reply.began_s)
        self._whole.observe(reply.end_s - reply.began_s)
        num_tokens = max(len(sequence.tokens) for sequence in output.sequences)
        if num_tokens > 1:
            self._tpot.observe((reply.end_s - reply.first_token_s) / (num_tokens - 1))

    async def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        async with asyncio.timeout(STATS_S):
            stats = await asyncio.wrap_future(self._client.stats())
        registry = CollectorRegistry()
        registry.register(_Engines(stats))
        return generate_latest(self._registry) + generate_latest(registry)


class _Engines:
    """A collector: a counter for each field of Totals, a gauge for each field of EngineStats."""

    def __init__(self, stats: Stats):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for each in fields(Totals):
            name = each.name.removesuffix("_s") + "_seconds" * each.name.endswith("_s")
            value = getattr(self._stats.totals, each.name)
            yield CounterMetricFamily(PREFIX + name, each.metadata["help"], value=value)
        for each in fields(EngineStats):
            yield self._gauge(each)

    def _gauge(self, each: Field[Any]) -> Metric:
        """A gauge by runner, and by the field's label if it has one."""
        label, name = each.metadata.get("label"), each.metadata.get("name", each.name)
        labels = ["runner"] if label is None else ["runner", label]
        gauge = GaugeMetricFamily(PREFIX + name, each.metadata["help"], labels=labels)
        for runner, stats in self._stats.runners.items():
            value = getattr(stats, each.name)
            if label is not None:
                for kind, one in value.items():
                    gauge.add_metric([runner, kind], one)
            else:
                gauge.add_metric([runner], len(value) if isinstance(value, frozenset) else value)
        return gauge
