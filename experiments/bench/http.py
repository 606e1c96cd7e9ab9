"""The cost of HTTP: a trace served by the engine alone, and by the server to clients.

python -m experiments.bench.http   # extra `serve`

Requests arrive open-loop, Poisson, at each of --request_rates. Latencies are measured at the lowest
rate, and throughput at the highest rate, which should exceed the engine's throughput. Each round
serves the trace in three ways:

    offline     the engine in this process
    unstreamed  the server in its own process; the client in this process waits for whole answers
    streamed    the same server and client, with an event for each token

The client is a plain socket; it parses the received bytes after the run. Then --disconnects clients
cut their connections at random times while other requests run. Tokens of all completed requests are
compared with the engine's own. Tokens that differ count as lost, except near ties
(`experiments.lib.near_ties`) and the tokens after near ties. The server's log is server.log.
"""

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments import serve
from experiments.bench import http_load
from experiments.bench.http_load import Answer, open_loop, read
from experiments.lib import near_ties, report
from experiments.lib.engines import load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import ExecutorFlags, flag
from experiments.serve_http import ServerFlags
from experiments.study import Run, Setting, Study, Values
from experiments.workloads import workloads
from experiments.workloads.workloads import Request, Vocabulary, WorkloadConfig
from models import checkpoint, load_tokenizer
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sequence import RequestOutput, SequenceOutput
from paged.server.settings import ServerConfig

OFFLINE, WHOLE, STREAMED = HOWS = ("offline", "unstreamed", "streamed")
LEFT = "disconnects"
GOALS = {WHOLE: 0.9, STREAMED: 0.6}
WITNESSES = 32  # requests whose tokens are compared while clients disconnect
LATENCIES = ("ttft", "tpot", "whole")
ENGINE, SERVER = EngineConfig(), ServerConfig()


@dataclass(frozen=True)
class HttpFlags(ExecutorFlags):
    workload: str = flag("alpaca", "as of experiments.serve", path=True)
    max_tokens: int = flag(64, "most tokens of an output", least=1)
    length_divisor: int = flag(1, "of synthetic lengths", least=1)
    num_requests: int = flag(450, "of each trace", least=1)
    request_rates: tuple[float, ...] = flag((20.0, 250.0), "Poisson arrivals per second", above=0)
    rounds: int = flag(3, "of the highest rate", least=1)
    disconnects: int = flag(1000, "clients that leave early", least=1)
    disconnect_rate: float = flag(50.0, "disconnections per second", least=0.1)
    disconnect_s: float = flag(2.0, "seconds after which the last client has left", least=0.001)
    engine: EngineConfig = ENGINE
    server: ServerConfig = SERVER

    def __post_init__(self):
        super().__post_init__()
        if self.num_requests > self.server.max_pending:
            raise ValueError(
                f"--num_requests={self.num_requests} may all be pending: "
                f"--max_pending={self.server.max_pending} refuses some"
            )


@dataclass(frozen=True)
class Row:
    """A trace served once.

    Times are seconds from a request's arrival: offline from the engine's records, otherwise from
    the client's clock.

    cpu_ms_per_token: CPU time of all processes.
    lost: see `Bench.lost`.

    In the row of the disconnects, `requests` is the number of clients that leave early, and `lost`
    is the number of lost tokens of the other requests. Only this row has:

    cut: number of clients without a whole answer.
    leaked_bytes: KV memory in use at the end, less KV memory in use before.
    pending: number of running and waiting requests of the server at the end.
    """

    request_rate: float
    round: int
    how: str
    requests: int
    output_tokens: int
    last_arrival_s: float
    duration_s: float
    output_tokens_per_s: float
    cpu_ms_per_token: float
    lost: int = 0
    near_ties: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p99_s: float | None = None
    whole_p50_s: float | None = None
    whole_p99_s: float | None = None
    cut: int | None = None
    leaked_bytes: int | None = None
    pending: int | None = None


@dataclass
class Bench:
    """The engine in this process, and a server in another process on `port`."""

    engine: Engine
    model: str
    port: int

    def offline(self, trace: Sequence[Request], **of_row: Any) -> tuple[Row, list[RequestOutput]]:
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
        return _row(trace, tokens, duration_s, cpu_s, seen, how=OFFLINE, **of_row), outputs

    def over_http(
        self, how: str, trace: Sequence[Request], expected: Sequence[RequestOutput], **of_row: Any
    ) -> Row:
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
        return _row(
            trace, tokens, duration_s, after.cpu_s - before.cpu_s + client_s, seen, how=how,
            lost=lost, near_ties=ties, **of_row,
        )  # fmt: skip

    def lost(self, expected: Sequence[RequestOutput], answers: Sequence[Answer]) -> tuple[int, int]:
        """(lost tokens, near ties).

        From the first difference on, all tokens of an output are lost, unless the difference is a
        near tie and the lengths are equal. A wrong text, or a wrong number of tokens in the usage
        field, is one lost token.
        """
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


def _row(
    trace: Sequence[Request], tokens: int, duration_s: float, cpu_s: float,
    seen: Mapping[str, Sequence[float]], **of_row: Any,
) -> Row:  # fmt: skip
    for name, seconds in seen.items():
        found = report.distribution(seconds) or {}
        of_row |= {f"{name}_{p}_s": float(found[p]) for p in ("p50", "p99") if found}
    return Row(
        requests=len(trace), last_arrival_s=trace[-1].arrival_s, output_tokens=tokens,
        duration_s=duration_s, output_tokens_per_s=tokens / duration_s,
        cpu_ms_per_token=1e3 * cpu_s / max(1, tokens), **of_row,
    )  # fmt: skip


def tpot_s(answer: Answer) -> float | None:
    """TPOT of a streamed answer: seconds per token after the first; None if it was not streamed."""
    if answer.first_token_s is None or len(answer.tokens) < 2:
        return None
    return (answer.whole_s - answer.first_token_s) / (len(answer.tokens) - 1)


def disconnects(bench: Bench, trace: Sequence[Request], flags: HttpFlags) -> Row:
    """Serve clients that disconnect at random times, beside WITNESSES clients that stay."""
    count, rate = flags.disconnects, flags.disconnect_rate
    gaps, began_s = count / rate / WITNESSES, time.perf_counter()
    witnesses = [replace(r, arrival_s=i * gaps) for i, r in enumerate(trace[:WITNESSES])]
    expected = bench.engine.generate(
        [r.prompt for r in witnesses],
        [http_load.sampling(r, i) for i, r in enumerate(witnesses)],
    )
    before = http_load.idle(bench.port)

    async def all_of_them():
        return await asyncio.gather(
            http_load.leave_early(
                bench.port, bench.model, trace, count, rate, flags.disconnect_s,
                bench.engine.config.max_model_len, flags.engine.seed,
            ),
            http_load.served(bench.port, bench.model, witnesses, streams=True),
        )  # fmt: skip

    cut, done = asyncio.run(all_of_them())
    after = http_load.idle(bench.port)
    return Row(
        rate, 0, LEFT, count, 0, count / rate, time.perf_counter() - began_s, 0.0, 0.0, cut=cut,
        leaked_bytes=int(after.kv_bytes - before.kv_bytes), pending=int(after.pending),
        lost=bench.lost(expected, done)[0],
    )  # fmt: skip


def traces(flags: HttpFlags) -> dict[float, list[Request]]:
    """The requests at each rate. Raises ValueError if one does not fit the engine."""
    longest = min(flags.engine.max_model_len, flags.engine.kv_cache_tokens)
    size = checkpoint.load_config(flags.model).vocab_size
    vocabulary = Vocabulary(load_tokenizer(flags.model), size, longest)
    return {
        rate: workloads.load(
            WorkloadConfig(
                flags.workload, num_requests=flags.num_requests, request_rate=rate,
                seed=flags.engine.seed, max_tokens=flags.max_tokens,
                length_divisor=flags.length_divisor,
            ),
            vocabulary,
        ).requests
        for rate in sorted(set(flags.request_rates))
    }  # fmt: skip


def check(flags: HttpFlags) -> None:
    traces(flags)


def serve_all(bench: Bench, made: Mapping[float, list[Request]], rounds: int) -> Iterator[Row]:
    """Serve each trace in all three ways, and the trace of the highest rate `rounds` times."""
    full = max(made)
    plan = [(rate, 0) for rate in sorted(made)] + [(full, i) for i in range(1, rounds)]
    for rate, round_ in tqdm(plan, "serving", unit=" rounds", leave=False):
        row, expected = bench.offline(made[rate], request_rate=rate, round=round_)
        yield row
        for how in (WHOLE, STREAMED):
            yield bench.over_http(how, made[rate], expected, request_rate=rate, round=round_)


def measure(flags: HttpFlags, run: Run) -> Iterator[Row]:
    made = traces(flags)
    engine = load_engine(flags.engine, load_tokenizer(flags.model), **loading(flags))
    engine.warm_up()
    server = ServerFlags(
        **loading(flags), served_model_name=flags.model, engine=flags.engine, limits=flags.server
    )
    with http_load.running_server(server, run.folder / "server.log") as port:
        bench = Bench(engine, flags.model, port)
        gc.freeze()  # so that collections during a run scan the client's few objects only
        yield from serve_all(bench, made, flags.rounds)
        yield disconnects(bench, made[min(made)], flags)


def at(rows: Sequence[Row], choose: Any, how: str) -> list[Row]:
    """The rows of serving mode `how`, at the lowest (`choose`: min) or the highest (max) rate."""
    rate = choose(row.request_rate for row in rows if row.how != LEFT)
    return [row for row in rows if (row.request_rate, row.how) == (rate, how)]


def throughput(rows: Sequence[Row], how: str) -> float:
    """Output tokens a second at the highest rate, the median of the rounds."""
    return float(np.median([row.output_tokens_per_s for row in at(rows, max, how)]))


def values(_: HttpFlags, rows: Sequence[Row]) -> Values:
    alone = throughput(rows, OFFLINE)
    numbers: dict[str, float | None] = {
        "throughput_over_offline": throughput(rows, WHOLE) / alone,
        "streamed_over_offline": throughput(rows, STREAMED) / alone,
        "lost_tokens": sum(row.lost for row in rows),
        "near_ties": sum(row.near_ties for row in rows),
    }
    for left in (row for row in rows if row.how == LEFT):
        numbers["leaked_bytes_after_disconnects"] = left.leaked_bytes
        numbers["pending_after_disconnects"] = left.pending
        numbers["disconnected_clients"] = left.cut
    for how in HOWS:
        numbers[f"output_tokens_per_s_{how}"] = throughput(rows, how)
        cpu = [row.cpu_ms_per_token for row in at(rows, max, how)]
        numbers[f"cpu_ms_per_token_{how}"] = float(np.median(cpu))
        calm = at(rows, min, how)[0]
        for name in LATENCIES:
            for p in ("p50", "p99"):
                seconds = getattr(calm, f"{name}_{p}_s")
                if seconds is not None:
                    numbers[f"{name}_{p}_s_{how}"] = seconds
    return numbers


def holds(v: Mapping[str, float]) -> bool:
    nothing = "lost_tokens", "leaked_bytes_after_disconnects", "pending_after_disconnects"
    served = v["throughput_over_offline"] >= GOALS[WHOLE]
    streamed = v["streamed_over_offline"] >= GOALS[STREAMED]
    return served and streamed and not any(v[name] for name in nothing)


def table(_: HttpFlags, rows: Sequence[Row]) -> str:
    """A line for each run."""
    lines = [
        "seconds from a request's arrival: the engine's own where it is offline, else its client's",
        f"{'':22}{'tokens/s':>11}{'CPU ms':>8}"
        + "".join(f"{name + ' ' + p:>10}" for name in LATENCIES for p in ("p50", "p99")),
    ]
    for row in rows:
        times = (getattr(row, f"{name}_{p}_s") for name in LATENCIES for p in ("p50", "p99"))
        lines.append(
            f"{row.request_rate:5g}/s {row.how:13}{row.output_tokens_per_s:11,.0f}"
            f"{row.cpu_ms_per_token:8.2f}"
            + "".join(f"{'-':>10}" if t is None else f"{t:10.3f}" for t in times)
        )
    return "\n".join(lines)


def draw(_: HttpFlags, figure: Figure, rows: Sequence[Row]) -> None:
    """Throughput at the highest rate, and latencies at the lowest."""
    bars, *times = figure.subplots(1, 3)
    colours = dict(zip(HOWS, ("#888888", "#2f6b9a", "#e0a030")))
    tokens_per_s = [throughput(rows, how) for how in HOWS]
    bars.bar(HOWS, tokens_per_s, color=list(colours.values()))
    for place, how in enumerate(HOWS):
        if how in GOALS:
            goal = GOALS[how] * tokens_per_s[0]
            bars.hlines(goal, place - 0.4, place + 0.4, "#c8553d", "--", label="goal")
    bars.set(ylabel="output tokens/s", title="highest rate")
    for axes, (name, title) in zip(times, (("ttft", "first token"), ("tpot", "per output token"))):
        for how in HOWS:
            seconds = [getattr(at(rows, min, how)[0], f"{name}_{p}_s") for p in ("p50", "p99")]
            if None not in seconds:
                axes.plot(
                    ["p50", "p99"], [1e3 * t for t in seconds], "o-", color=colours[how],
                    label="engine's own" if how == OFFLINE else f"client, {how}",
                )  # fmt: skip
        axes.set(ylim=(0, None), ylabel="ms", title=f"{title}, lowest rate")
        axes.legend(frameon=False)


STUDY = Study(
    __file__,
    title="What HTTP costs over the engine alone",
    kind="measured",
    claim="unstreamed requests get 90 % of the engine's own throughput and streamed ones 60 %, on "
    "two cores that engine, server and client share; no token is lost or doubled; clients that go "
    "away leave no KV memory behind",
    rule="at the highest rate; no lost token, and no byte or request left after disconnections",
    holds=holds,
    setting=Setting("the bundled model (1.5M), Alpaca-like requests on this machine", "", "paper"),
    flags=HttpFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    table=table,
    quick={"num_requests": 60, "rounds": 1, "disconnects": 40},
    minutes=(1, 4),
    needs="the extra serve",
    size=(11, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
