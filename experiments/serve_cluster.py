"""A cluster that packs requests onto few GPUs while the load rises and falls (Punica §7.3).

    python -m experiments.serve_cluster --flagfile=configs/cluster_bundled.flags

Arrivals are a Poisson process whose rate rises from 0 to --peak_rate and falls again over
--duration_s seconds. Requests ask for --adapters by the paper's --popularity, and each runner loads
those that its requests ask for into --adapter_slots. --runners is 'simulated' (the engines' own
schedulers over a cost model's time, on GPUs of a data sheet; not a measurement of any GPU),
'threads' (an engine on each of JAX's devices) or 'ray' (an engine in each Ray actor; extra
`cluster`).

The seed gives the requests, and in simulated time the whole run. Writes to --output_dir:
report.json, summary.json, working_sets.csv (each second), requests.csv, cluster.png, and random
adapters, if such are served. Ctrl-C, SIGTERM and a failure end it as they end `experiments.serve`.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from experiments.lib import adapters, cluster_report, run_record, serving
from experiments.lib.cluster_report import Sample
from experiments.lib.engines import engine_config
from experiments.lib.flags import (
    define_engine_flags,
    define_float,
    define_simulated_flags,
    fields_of,
)
from experiments.lib.program import Options, Program, refusals
from experiments.lib.runners import ray_actors, threads, uuids
from experiments.workloads import popularity, ramp
from models import checkpoint
from models.config import ModelConfig
from paged.adapters.adapter import Adapter
from paged.cluster.cluster import Arrival
from paged.cluster.live import LiveCluster
from paged.cluster.ray_actors import import_ray
from paged.cluster.simulated import SimulatedCluster
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.step_cost import StepCost

RUNNERS = ("simulated", "threads", "ray")
PERIOD_S = 1.0  # of samples
AnyCluster = SimulatedCluster | LiveCluster


def serve(
    cluster: AnyCluster, arrivals: Sequence[Arrival], samples: list[Sample],
    stop_requested: Callable[[], bool] = lambda: False, progress: bool = True,
) -> None:  # fmt: skip
    """Serve all, until `stop_requested`; a sample each second."""
    with tqdm(total=len(arrivals), desc="serving", unit="req", disable=not progress) as bar:

        def observe(now: float) -> None:
            samples.append(Sample.of(now, cluster.cluster))
            bar.update(samples[-1].ended - bar.n)

        cluster.serve(arrivals, observe, PERIOD_S, stop_requested)
        bar.update(len(cluster.cluster.records) - bar.n)


def simulated(options: Options, model: ModelConfig, config: EngineConfig) -> SimulatedCluster:
    """Engines over a cost model."""
    cost = StepCost.declare(model, config, options.gpu, options.dtype, options.host)
    engines = {
        uuid: Engine(
            model, config,
            SimulatedExecutor(
                cost, vocab_size=model.vocab_size, dtype=options.dtype,
                adapter_page_s=cost.adapter_page_s,
            ),
        )
        for uuid in uuids(options.num_gpus)
    }  # fmt: skip
    return SimulatedCluster(engines, model, config, rebalance_s=options.rebalance_s)


def live(make: Callable[..., LiveCluster]) -> Callable[..., LiveCluster]:
    """Engines in real time."""

    def made(options: Options, model: ModelConfig, config: EngineConfig) -> LiveCluster:
        return make(options, model, config, options.num_gpus, rebalance_s=options.rebalance_s)

    return made


MAKE: dict[str, Callable[[Options, ModelConfig, EngineConfig], AnyCluster]] = {
    "simulated": simulated,
    "threads": live(threads),
    "ray": live(ray_actors),
}


def prepare(options: Options) -> tuple[ModelConfig, EngineConfig, list[Adapter], list[Arrival]]:
    """What the flags ask for. Raises ValueError for what cannot be."""
    if options.tensor_parallel > 1:
        raise ValueError("--tensor_parallel: each engine of a cluster has one device")
    model = checkpoint.load_config(options.model)
    config = engine_config(model, **fields_of(EngineConfig, options))
    longest = min(config.max_model_len, config.num_blocks * config.page_size - config.page_size)
    requests = ramp.requests(
        options.duration_s, options.peak_rate, model.vocab_size, longest, options.length_divisor,
        options.seed,
    )  # fmt: skip
    if not requests:
        raise ValueError(
            f"--peak_rate={options.peak_rate} over --duration_s={options.duration_s} is no request"
        )
    if options.runners == "ray":
        try:
            import_ray()
        except ImportError as error:
            raise ValueError(f"--runners=ray: {error}") from error
    served = adapters.asked_for(options, model, config, simulated=options.runners == "simulated")
    names: Sequence[str | None] = [None] * len(requests)
    if served:
        given = [adapter.name for adapter in served]
        names = popularity.assign(given, options.popularity, len(requests), options.seed)
    arrivals = [
        Arrival(
            each.arrival_s, each.prompt,  # type: ignore[arg-type]
            SamplingParams(max_tokens=each.max_tokens, ignore_eos=True, seed=i), name,
        )
        for i, (each, name) in enumerate(zip(requests, names, strict=True))
    ]  # fmt: skip
    return model, config, served, arrivals


def main(options: Options) -> int:
    if options.runners == "threads":  # a CPU is as many devices as it is told to be at first
        jax.config.update("jax_num_cpu_devices", options.num_gpus)
    with refusals():
        model, config, served, arrivals = prepare(options)
        cluster = MAKE[options.runners](options, model, config)
    for adapter in served:
        cluster.cluster.add_known_adapter(adapter)
    facts = {"flags": vars(options), "model": asdict(model), "engine": config}
    with cluster if isinstance(cluster, LiveCluster) else contextlib.nullcontext():
        return serve_and_write(options, cluster, arrivals, facts)


def serve_and_write(
    options: Options, cluster: AnyCluster, arrivals: Sequence[Arrival], facts: dict[str, Any]
) -> int:
    """As `serving.serve_and_write`."""
    samples: list[Sample] = []

    def write_served(cause: str | None) -> tuple[str, list[OSError]]:
        cluster.cluster.cancel_all()  # a failure may have left some
        reasons = [record.finish_reason for record in cluster.cluster.records]
        missing = serving.missing(cause, len(arrivals), reasons)
        if not samples:
            samples.append(Sample.of(0.0, cluster.cluster))
        return write(options, cluster, samples, facts | {"partial": missing})

    files = f"report.json, summary.json, cluster.png and more are in {options.output_dir}/"
    serve_until = partial(serve, cluster, arrivals, samples)
    return serving.serve_and_write(serve_until, write_served, files)


def write(
    options: Options, served: AnyCluster, samples: Sequence[Sample], facts: dict[str, Any]
) -> tuple[str, list[OSError]]:
    """Write every file; the table, and what could not be written."""
    folder, cluster, max_batch = options.output_dir, served.cluster, options.max_num_seqs
    failures = run_record.write_all([
        lambda: run_record.write_csv(folder, "requests.csv", cluster.records)
    ])  # fmt: skip
    missing = facts["partial"]
    if missing:
        cause = missing["interrupted_by"]
        print(f"{cause}: writing the report on what was served", file=sys.stderr)
    environment = run_record.describe_environment()
    footer = run_record.hardware_line(environment)
    if options.runners == "simulated":
        footer = (
            f"simulated time: cost model of {options.gpu} (experiments.fit_cost_model), "
            f"host {options.host}"
        )
    numbers = cluster_report.summary(cluster, samples, max_batch)
    table = cluster_report.table(numbers, max_batch)
    content = {
        "experiment": "serve_cluster",
        **facts,
        "measured_on": footer,
        "measured": numbers,
        "deaths": served.deaths if isinstance(served, LiveCluster) else {},
        "refused": cluster.refused,
        "claims": table.splitlines(),
    }
    title = f"{options.num_gpus} {'simulated GPUs' * (options.runners == 'simulated') or 'engines'}"
    title += f", {options.model}" + ", interrupted" * bool(missing)
    offered = partial(ramp.rate, duration_s=options.duration_s, peak_rate=options.peak_rate)
    numbers = numbers | {"partial": int(bool(missing))}
    failures += run_record.write_all([
        lambda: run_record.write_csv(folder, "working_sets.csv", [each.row() for each in samples]),
        lambda: run_record.write_json(folder, "report.json", content | environment),
        lambda: run_record.write_summary(folder, numbers),
        lambda: cluster_report.plot(
            samples, offered, max_batch, Path(folder) / "cluster.png", title, footer
        ),
    ])  # fmt: skip
    return f"{table}\n({footer}){serving.partial_line(missing)}", failures


def define_flags() -> None:
    flags.DEFINE_enum("runners", "simulated", RUNNERS, "where the engines run")
    flags.DEFINE_integer("num_gpus", 4, "GPUs, each with an engine", lower_bound=1)
    define_float("duration_s", 120.0, "from the first to the last request", lower_bound=1)
    define_float("peak_rate", 10.0, "requests a second at half of it", lower_bound=1e-3)
    define_float("rebalance_s", 10.0, "period of consolidation in seconds", lower_bound=1e-3)
    flags.DEFINE_integer("length_divisor", 1, "divides all lengths", lower_bound=1, upper_bound=64)
    define_simulated_flags("a100-40")
    adapters.define_flags("skewed")
    define_engine_flags()


PROGRAM = Program(
    main,
    define_flags,
    "results/serve_cluster",
    ("requests.csv", "working_sets.csv", "cluster.png"),
)

if __name__ == "__main__":
    PROGRAM.run()
