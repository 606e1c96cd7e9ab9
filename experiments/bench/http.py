"""What HTTP costs: a trace served by the engine alone, and by the server to clients.

    python -m experiments.bench.http   # extra `serve`

Requests arrive open-loop, Poisson, at each of --request_rates: the lowest for latencies, the
highest, which should be more than the engine can serve, for throughput. In each round three serve
them: the engine in this process; the server, a process of its own, to a client in this one that
waits for whole answers; and the same with streams, an event for each token. The client is a plain
socket that reads its bytes when all is over. Then --disconnects clients cut their connections at
random times, while others are served whose tokens are compared too.

Claims (measured where the report says): at the highest rate unstreamed requests get at least 90% of
the engine's own throughput and streamed ones 60%, on two cores that engine, server and client
share; no token is lost or doubled; clients that go away leave no KV memory behind. Tokens that
differ from the engine's own count as lost, but for near ties (`experiments.lib.near_ties`) and what
follows them. Writes to --output_dir: http.csv, http.png, server.log, report.json and summary.json.
"""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench import http_load
from experiments.bench.http_runs import HOWS, OFFLINE, STREAMED, WHOLE, Bench, Row
from experiments.lib import run_record
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.flags import (
    define_engine_flags,
    define_executor_flag,
    define_fields,
    define_float,
    define_path,
    fields_of,
    loading,
)
from experiments.lib.program import Options, Program, refusals
from experiments.workloads import workloads
from experiments.workloads.workloads import Request, Vocabulary, WorkloadConfig
from models import checkpoint, load_tokenizer
from paged.checks import help_of
from paged.engine import EngineConfig
from paged.server.settings import ServerConfig

GOALS = {WHOLE: 0.9, STREAMED: 0.6}
WITNESSES = 32  # requests whose tokens are compared while clients disconnect
LATENCIES = ("ttft", "tpot", "whole")


@dataclass(frozen=True)
class Disconnects:
    """clients: all who came; cut: those of them who got no whole answer. leaked_bytes: of KV memory
    in use when all was over, less what was before. pending: requests that were left then. lost:
    tokens of others, served meanwhile."""

    clients: int
    cut: int
    leaked_bytes: int
    pending: int
    lost: int


def disconnects(bench: Bench, trace: Sequence[Request], options: Options) -> Disconnects:
    """Clients that leave at random times, beside some that stay."""
    count, rate = options.disconnects, options.disconnect_rate
    gaps = count / rate / WITNESSES
    witnesses = [replace(r, arrival_s=i * gaps) for i, r in enumerate(trace[:WITNESSES])]
    expected = bench.engine.generate(
        [r.prompt for r in witnesses],
        [http_load.sampling(r, i) for i, r in enumerate(witnesses)],
    )
    before = http_load.idle(bench.port)

    async def all_of_them():
        return await asyncio.gather(
            http_load.leave_early(
                bench.port, bench.model, trace, count, rate, options.disconnect_s,
                bench.engine.config.max_model_len, options.seed,
            ),
            http_load.served(bench.port, bench.model, witnesses, streams=True),
        )  # fmt: skip

    cut, done = asyncio.run(all_of_them())
    after = http_load.idle(bench.port)
    return Disconnects(
        clients=count,
        cut=cut,
        leaked_bytes=int(after.kv_bytes - before.kv_bytes),
        pending=int(after.pending),
        lost=bench.lost(expected, done)[0],
    )


def throughput(rows: Sequence[Row], rate: float, how: str) -> float:
    """Output tokens a second, the median of the rounds."""
    mine = [row.output_tokens_per_s for row in rows if (row.request_rate, row.how) == (rate, how)]
    return float(np.median(mine))


def summary(rows: Sequence[Row], left: Disconnects) -> dict[str, float]:
    calm, full = (choose(row.request_rate for row in rows) for choose in (min, max))
    alone = throughput(rows, full, OFFLINE)
    numbers: dict[str, float] = {
        "throughput_over_offline": throughput(rows, full, WHOLE) / alone,
        "streamed_over_offline": throughput(rows, full, STREAMED) / alone,
        "lost_tokens": sum(row.lost for row in rows) + left.lost,
        "near_ties": sum(row.near_ties for row in rows),
        "leaked_bytes_after_disconnects": left.leaked_bytes,
        "pending_after_disconnects": left.pending,
        "disconnected_clients": left.cut,
    }
    for how in HOWS:
        numbers[f"output_tokens_per_s_{how}"] = throughput(rows, full, how)
        cpu = [r.cpu_ms_per_token for r in rows if (r.request_rate, r.how) == (full, how)]
        numbers[f"cpu_ms_per_token_{how}"] = float(np.median(cpu))
    for row in rows:
        if row.request_rate == calm and row.round == 0:
            for name in LATENCIES:
                for p in ("p50", "p99"):
                    value = getattr(row, f"{name}_{p}_s")
                    if value is not None:
                        numbers[f"{name}_{p}_s_{row.how}"] = value
    return numbers


def table(rows: Sequence[Row], left: Disconnects) -> str:
    """A line a run, and what came of the goals."""
    lines = [
        "seconds from a request's arrival: the engine's own where it is offline, else its client's",
        f"{'':22}{'tokens/s':>9}{'of goal':>14}{'CPU ms':>8}"
        + "".join(f"{name + ' ' + p:>10}" for name in LATENCIES for p in ("p50", "p99")),
    ]
    for row in rows:
        alone = throughput(rows, row.request_rate, OFFLINE)
        goal = f"{row.output_tokens_per_s / alone:.0%}"
        if row.how in GOALS and row.request_rate == max(r.request_rate for r in rows):
            goal += f" of {GOALS[row.how]:.0%}"
        times = (getattr(row, f"{name}_{p}_s") for name in LATENCIES for p in ("p50", "p99"))
        lines.append(
            f"{row.request_rate:5g}/s {row.how:13}{row.output_tokens_per_s:11,.0f}{goal:>14}"
            f"{row.cpu_ms_per_token:8.2f}"
            + "".join(f"{'-':>10}" if t is None else f"{t:10.3f}" for t in times)
        )
    last = next(row for row in reversed(rows) if row.how == OFFLINE)
    lines.append(
        f"at {last.request_rate:g}/s requests came for {last.last_arrival_s:.1f} s, and the engine "
        f"alone took {last.duration_s:.1f} s to serve them"
    )
    lines.append(
        f"{left.cut:,} of {left.clients:,} clients left before their answer was whole: "
        f"{left.leaked_bytes:,} bytes of KV memory and {left.pending} requests remain; "
        f"{sum(row.lost for row in rows) + left.lost} tokens lost or doubled in all"
    )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path, footer: str) -> None:
    """Throughput at the highest rate, and latencies at the lowest."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    bars, *times = figure.subplots(1, 3, width_ratios=[1, 1, 1])
    calm, full = (choose(row.request_rate for row in rows) for choose in (min, max))
    colours = dict(zip(HOWS, ("#888888", "#2f6b9a", "#e0a030")))
    tokens_per_s = [throughput(rows, full, how) for how in HOWS]
    bars.bar(HOWS, tokens_per_s, color=list(colours.values()))
    for at, how in enumerate(HOWS):
        if how in GOALS:
            bars.hlines(
                GOALS[how] * tokens_per_s[0], at - 0.4, at + 0.4, "#c8553d", "--", label="goal"
            )
    bars.set(ylabel="output tokens/s", title=f"{full:g} requests/s")
    shown = [row for row in rows if row.request_rate == calm and row.round == 0]
    for axes, (name, title) in zip(times, (("ttft", "first token"), ("tpot", "per output token"))):
        for row in shown:
            values = [getattr(row, f"{name}_{p}_s") for p in ("p50", "p90", "p99")]
            if None not in values:
                axes.plot(
                    ["p50", "p90", "p99"], [1e3 * t for t in values], "o-", color=colours[row.how],
                    label="engine's own" if row.how == OFFLINE else f"client, {row.how}",
                )  # fmt: skip
        axes.set(ylim=(0, None), ylabel="ms", title=f"{title}, {calm:g} requests/s")
        axes.legend()
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=110)


def traces(
    options: Options, rates: Sequence[float], vocabulary: Vocabulary
) -> dict[float, list[Request]]:
    """The requests at each rate. Raises ValueError for what cannot be served."""
    made: dict[float, list[Request]] = {}
    count = options.num_requests
    if count > options.max_pending:
        raise ValueError(
            f"--num_requests={count} may all be pending: --max_pending={options.max_pending} "
            "refuses some"
        )
    for rate in rates:
        wanted = WorkloadConfig(
            options.workload, num_requests=count, request_rate=rate, seed=options.seed,
            max_tokens=options.max_tokens, length_divisor=options.length_divisor,
        )  # fmt: skip
        made[rate] = workloads.load(wanted, vocabulary).requests
    return made


def rates_of(flag: Sequence[str]) -> list[float]:
    """Raises ValueError unless they are positive numbers."""
    try:
        rates = sorted({float(rate) for rate in flag})
    except ValueError:
        rates = []
    if not rates or not 0 < rates[0] <= rates[-1] < np.inf:
        raise ValueError(f"--request_rates must be positive numbers, not {','.join(flag)!r}")
    return rates


def run(bench: Bench, made: dict[float, list[Request]], rounds: int, progress: bool = True) -> None:
    """All traces; the one of the highest rate in each of `rounds`, all three ways in turn."""
    full = max(made)
    plan = [(rate, 0) for rate in sorted(made)] + [(full, i) for i in range(1, rounds)]
    bar = tqdm(total=len(plan) * len(HOWS), desc="serving", disable=not progress)
    for rate, round_ in plan:
        expected = bench.offline(made[rate], request_rate=rate, round=round_)
        bar.update()
        for how in (WHOLE, STREAMED):
            bench.over_http(how, made[rate], expected, request_rate=rate, round=round_)
            bar.update()
    bar.close()


def main(options: Options) -> None:
    output_dir = Path(options.output_dir)
    with refusals():
        ServerConfig(**fields_of(ServerConfig, options))
        model = checkpoint.load_config(options.model)
        config = engine_config(model, **fields_of(EngineConfig, options))
        tokenizer = load_tokenizer(options.model)
        longest = min(config.max_model_len, config.kv_cache_tokens)
        vocabulary = Vocabulary(tokenizer, model.vocab_size, longest)
        made = traces(options, rates_of(options.request_rates), vocabulary)
        engine = load_engine(config, tokenizer, **loading(options))
    engine.warm_up()
    with http_load.running_server(options, output_dir / "server.log") as port:
        bench = Bench(engine, options.model, port, [])
        gc.freeze()  # the client is in this process, and its objects are few
        run(bench, made, options.rounds)
        left = disconnects(bench, made[min(made)], options)
    rows, environment = bench.rows, run_record.describe_environment()
    facts = {
        "experiment": "bench_http", "flags": vars(options), "rows": rows, "disconnects": left,
        "goals": GOALS,
    }  # fmt: skip
    run_record.write_csv(output_dir, "http.csv", rows)
    run_record.write_json(output_dir, "report.json", facts | environment)
    run_record.write_summary(output_dir, summary(rows, left))
    footer = run_record.hardware_line(environment)
    plot(rows, output_dir / "http.png", footer)
    print(f"{table(rows, left)}\n({footer})")


def define_flags() -> None:
    described = help_of(WorkloadConfig)
    define_path("workload", "alpaca", described["workload"])
    flags.DEFINE_integer("max_tokens", 64, described["max_tokens"], lower_bound=1)
    flags.DEFINE_integer("length_divisor", 1, described["length_divisor"], lower_bound=1)
    flags.DEFINE_integer("num_requests", 450, described["num_requests"], lower_bound=1)
    flags.DEFINE_list("request_rates", ["20", "250"], "Poisson arrivals per second, one or several")
    flags.DEFINE_integer("rounds", 3, "of the highest rate", lower_bound=1)
    flags.DEFINE_integer("disconnects", 1000, "clients that leave early", lower_bound=1)
    define_float("disconnect_rate", 50.0, "of them per second", lower_bound=0.1)
    define_float("disconnect_s", 2.0, "after which the last has left", lower_bound=0.001)
    define_fields(ServerConfig)
    define_engine_flags()
    define_executor_flag()


PROGRAM = Program(main, define_flags, "results/bench_http", ("http.csv", "http.png", "server.log"))

if __name__ == "__main__":
    PROGRAM.run()
