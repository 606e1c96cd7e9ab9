"""A trace served by the engine alone, or over HTTP, and what that took."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments import serve
from experiments.bench import http_load
from experiments.bench.http_client import Answer, open_loop, read
from experiments.lib import near_ties, report
from experiments.workloads.workloads import Request
from paged.engine import Engine
from paged.requests.sequence import RequestOutput, SequenceOutput

OFFLINE, WHOLE, STREAMED = HOWS = ("offline", "unstreamed", "streamed")


@dataclass(frozen=True)
class Row:
    """A trace served once. Times are seconds from a request's arrival, as the engine has them where
    it is alone and as the client has them otherwise. server_*: means of what the server saw.
    cpu_ms_per_token: of all processes; client_cpu_ms_per_token: of it the client's. lost: tokens
    that are not the engine's."""

    request_rate: float
    round: int
    how: str
    requests: int
    output_tokens: int
    last_arrival_s: float
    duration_s: float
    output_tokens_per_s: float
    cpu_ms_per_token: float
    client_cpu_ms_per_token: float = 0.0
    lost: int = 0
    near_ties: int = 0
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p90_s: float | None = None
    tpot_p99_s: float | None = None
    whole_p50_s: float | None = None
    whole_p90_s: float | None = None
    whole_p99_s: float | None = None
    server_ttft_mean_s: float | None = None
    server_tpot_mean_s: float | None = None


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    found = report.distribution(values) or {}
    return {f"{name}_{p}_s": float(found[p]) for p in ("p50", "p90", "p99") if found}


@dataclass
class Bench:
    """The engine of this process, and a server beside it on `port`."""

    engine: Engine
    model: str
    port: int
    rows: list[Row]

    def offline(self, trace: Sequence[Request], **of_row: Any) -> list[RequestOutput]:
        self.engine.metrics.clear()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        outputs = serve.run(self.engine, trace, progress=False)
        duration_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        records, tokens = self.engine.metrics.requests, sum(len(o.tokens) for o in outputs)
        seen = {
            "ttft": report.present(map(report.ttft_s, records)),
            "tpot": report.present(map(report.tpot_s, records)),
            "whole": [r.finish_s - r.arrival_s for r in records],
        }
        self._add(trace, tokens, duration_s, cpu_s, seen, how=OFFLINE, **of_row)
        return outputs

    def over_http(
        self, how: str, trace: Sequence[Request], expected: Sequence[RequestOutput], **of_row: Any
    ) -> None:
        requests = http_load.completions(self.model, trace, how == STREAMED)
        arrivals = [request.arrival_s for request in trace]
        before, client_s = http_load.told(self.port), time.process_time()
        began_s = time.perf_counter()
        done = asyncio.run(open_loop(self.port, requests, arrivals))
        duration_s, client_s = time.perf_counter() - began_s, time.process_time() - client_s
        after = http_load.told(self.port)
        answers = list(map(read, done))
        seen = {
            "ttft": report.present(answer.first_token_s for answer in answers),
            "tpot": report.present(map(tpot_s, answers)),
            "whole": [answer.whole_s for answer in answers],
        }
        tokens = sum(len(answer.tokens) for answer in answers)
        lost, ties = self.lost(expected, answers)
        self._add(
            trace, tokens, duration_s, after.cpu_s - before.cpu_s + client_s, seen, how=how,
            lost=lost, near_ties=ties, client_cpu_ms_per_token=1e3 * client_s / max(1, tokens),
            server_ttft_mean_s=after.mean_since(before, "paged_time_to_first_token_seconds"),
            server_tpot_mean_s=after.mean_since(before, "paged_time_per_output_token_seconds"),
            **of_row,
        )  # fmt: skip

    def _add(
        self, trace: Sequence[Request], tokens: int, duration_s: float, cpu_s: float,
        seen: dict[str, list[float]], **of_row: Any,
    ) -> None:  # fmt: skip
        for name, values in seen.items():
            of_row |= percentiles(name, values)
        self.rows.append(
            Row(
                requests=len(trace),
                last_arrival_s=trace[-1].arrival_s,
                output_tokens=tokens,
                duration_s=duration_s,
                output_tokens_per_s=tokens / duration_s,
                cpu_ms_per_token=1e3 * cpu_s / max(1, tokens),
                **of_row,
            )
        )

    def lost(self, expected: Sequence[RequestOutput], answers: Sequence[Answer]) -> tuple[int, int]:
        """Tokens that are not the engine's own, and near ties, whose answers count for none."""
        theirs = [
            replace(ours, sequences=[SequenceOutput(answer.tokens, answer.text, "length")])
            for ours, answer in zip(expected, answers, strict=True)
        ]
        found = near_ties.differences(self.engine, expected, theirs)
        lost = 0
        for each in found:
            if not each.near_tie or len(each.ours.tokens) != len(each.theirs.tokens):
                lost += max(len(each.ours.tokens), len(each.theirs.tokens)) - each.at
        for ours, answer in zip(expected, answers):
            told = answer.tokens == ours.tokens and answer.text != ours.text
            lost += told or answer.completion_tokens != len(answer.tokens)
        return lost, sum(each.near_tie for each in found)


def tpot_s(answer: Answer) -> float | None:
    """Time per token after the first, of one that was streamed."""
    if answer.first_token_s is None or len(answer.tokens) < 2:
        return None
    return (answer.whole_s - answer.first_token_s) / (len(answer.tokens) - 1)
