"""A cluster that packs requests onto few GPUs while the load rises and falls (Punica §7.3).

    python -m experiments.serve_cluster --flagfile=configs/cluster_bundled.flags

Arrivals are a Poisson process. Its rate rises linearly from 0 to --peak_rate at half of
--duration_s, and falls back to 0 at --duration_s. Requests use --adapters with the paper's
--popularity. Each runner loads the adapters of its requests into --adapter_slots. Values of
--runners:

    simulated  the engines' own schedulers, with step times of a cost model from a GPU's data sheet;
               not a measurement of any GPU
    threads    an engine on each of JAX's devices
    ray        an engine in each Ray actor (extra `cluster`)

The seed determines the requests, and in simulated time the whole run. Writes to --output_dir:
report.json, summary.json, working_sets.csv (a line each second), requests.csv, cluster.png, and
random adapters unless simulated. On Ctrl-C, SIGTERM or a failure, results so far are still
written, as in `experiments.serve`.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from experiments.lib import adapters, cluster_report, run_record, runners, serving
from experiments.lib.adapters import adapters_flag, popularity_flag
from experiments.lib.cluster_report import Sample
from experiments.lib.program import Program, refusals
from experiments.lib.typed_flags import ModelFlags, Output, flag, part
from experiments.workloads import popularity, ramp
from models import checkpoint
from models.config import ModelConfig
from paged.cluster.cluster import Arrival
from paged.cluster.live import LiveCluster
from paged.cluster.ray_actors import import_ray
from paged.cluster.simulated import SimulatedCluster
from paged.config import EngineConfig
from paged.requests.adapter import Adapter
from paged.requests.sampling_params import SamplingParams
from paged.simulator.machines import MACHINES
from paged.simulator.step_cost import HOSTS, StepCost

RUNNERS = ("simulated", "threads", "ray")
PERIOD_S = 1.0  # seconds between samples
AnyCluster = SimulatedCluster | LiveCluster


@dataclass(frozen=True)
class ClusterFlags(ModelFlags):
    runners: str = flag("simulated", "where the engines run", choices=RUNNERS)
    num_gpus: int = flag(4, "GPUs, each with an engine", least=1)
    duration_s: float = flag(120.0, "from the first to the last request", least=1)
    peak_rate: float = flag(10.0, "requests a second after half of the duration", least=1e-3)
    rebalance_s: float = flag(10.0, "period of consolidation in seconds", least=1e-3)
    length_divisor: int = flag(1, "divides all lengths", least=1, most=64)
    gpu: str = flag("a100-40", "simulated GPU, by its data sheet", choices=tuple(MACHINES))
    host: str = flag("none", "system whose host time a step includes", choices=tuple(HOSTS))
    adapters: str = adapters_flag()
    popularity: str = popularity_flag("skewed")
    engine: EngineConfig = part(EngineConfig())

    @classmethod
    def begin(cls, values: Mapping[str, Any]) -> None:
        if values["tensor_parallel"] > 1:
            raise ValueError("--tensor_parallel: each engine of a cluster has one device")
        if values["runners"] == "threads":  # must be set before JAX's first use
            jax.config.update("jax_num_cpu_devices", values["num_gpus"])


def serve(
    cluster: AnyCluster, arrivals: Sequence[Arrival], samples: list[Sample],
    stop_requested: Callable[[], bool] = lambda: False, progress: bool = True,
) -> None:  # fmt: skip
    """Serve all arrivals, or until `stop_requested` returns True. Adds a sample per PERIOD_S."""
    with tqdm(total=len(arrivals), desc="serving", unit="req", disable=not progress) as bar:

        def observe(now: float) -> None:
            samples.append(Sample.of(now, cluster.cluster))
            bar.update(samples[-1].ended - bar.n)

        cluster.serve(arrivals, observe, PERIOD_S, stop_requested)
        bar.update(len(cluster.cluster.records) - bar.n)


def simulated(flags: ClusterFlags, model: ModelConfig) -> SimulatedCluster:
    cost = StepCost.declare(model, flags.engine, flags.gpu, flags.dtype, flags.host)
    return runners.simulated(
        model, flags.engine, cost, flags.num_gpus, flags.dtype, flags.rebalance_s
    )


def live(make: Callable[..., LiveCluster], flags: ClusterFlags, model: ModelConfig) -> LiveCluster:
    """The cluster of `make`, which is `runners.threads` or `runners.ray_actors`."""
    return make(flags, model, flags.engine, flags.num_gpus, rebalance_s=flags.rebalance_s)


MAKE: dict[str, Callable[[ClusterFlags, ModelConfig], AnyCluster]] = {
    "simulated": simulated,
    "threads": partial(live, runners.threads),
    "ray": partial(live, runners.ray_actors),
}


def prepare(
    flags: ClusterFlags, output_dir: Path
) -> tuple[ModelConfig, list[Adapter], list[Arrival]]:
    """The flags' model, adapters and arrivals. Raises ValueError for invalid flags."""
    model, config = checkpoint.load_config(flags.model), flags.engine
    longest = min(config.max_model_len, config.num_blocks * config.page_size - config.page_size)
    requests = ramp.requests(
        flags.duration_s, flags.peak_rate, model.vocab_size, longest, flags.length_divisor,
        config.seed,
    )  # fmt: skip
    if not requests:
        raise ValueError(
            f"--peak_rate={flags.peak_rate} over --duration_s={flags.duration_s} is no request"
        )
    if flags.runners == "ray":
        try:
            import_ray()
        except ImportError as error:
            raise ValueError(f"--runners=ray: {error}") from error
    folder = None if flags.runners == "simulated" else output_dir
    served = adapters.asked_for(flags.adapters, model, config, flags.dtype, folder)
    names: Sequence[str | None] = [None] * len(requests)
    if served:
        given = [adapter.name for adapter in served]
        names = popularity.assign(given, flags.popularity, len(requests), config.seed)
    arrivals = [
        Arrival(
            each.arrival_s, each.prompt,
            SamplingParams(max_tokens=each.max_tokens, ignore_eos=True, seed=i), name,
        )
        for i, (each, name) in enumerate(zip(requests, names, strict=True))
    ]  # fmt: skip
    return model, served, arrivals


def main(flags: ClusterFlags, output: Output) -> int:
    with refusals():
        model, served, arrivals = prepare(flags, output.folder)
        cluster = MAKE[flags.runners](flags, model)
    for adapter in served:
        cluster.cluster.add_known_adapter(adapter)
    facts = {"flags": flags, "model": asdict(model)}
    with cluster if isinstance(cluster, LiveCluster) else contextlib.nullcontext():
        return serve_and_write(flags, output.folder, cluster, arrivals, facts)


def serve_and_write(
    flags: ClusterFlags, folder: Path, cluster: AnyCluster, arrivals: Sequence[Arrival],
    facts: dict[str, Any],
) -> int:  # fmt: skip
    """Serve and write a run; see `serving.serve_and_write`."""
    samples: list[Sample] = []

    def write_served(cause: str | None) -> tuple[str, list[OSError]]:
        cluster.cluster.cancel_all()  # a failure may have left unfinished requests
        reasons = [record.finish_reason for record in cluster.cluster.records]
        missing = serving.missing(cause, len(arrivals), reasons)
        if not samples:
            samples.append(Sample.of(0.0, cluster.cluster))
        return write(flags, folder, cluster, samples, facts | {"partial": missing})

    files = f"report.json, summary.json, cluster.png and more are in {folder}/"
    serve_until = partial(serve, cluster, arrivals, samples)
    return serving.serve_and_write(serve_until, write_served, files)


def write(
    flags: ClusterFlags, folder: Path, served: AnyCluster, samples: Sequence[Sample],
    facts: dict[str, Any],
) -> tuple[str, list[OSError]]:  # fmt: skip
    """Write every file of a run. Returns (table, errors of files that could not be written)."""
    cluster, max_batch = served.cluster, flags.engine.max_num_seqs
    failures = run_record.write_all([
        lambda: run_record.write_csv(folder, "requests.csv", cluster.records)
    ])  # fmt: skip
    missing = facts["partial"]
    if missing:
        cause = missing["interrupted_by"]
        print(f"{cause}: writing the report on what was served", file=sys.stderr)
    environment = run_record.describe_environment()
    footer = run_record.hardware_line(environment)
    if flags.runners == "simulated":
        footer = (
            f"simulated time: cost model of {flags.gpu} (experiments.fit_cost_model), "
            f"host {flags.host}"
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
    title = f"{flags.num_gpus} {'simulated GPUs' * (flags.runners == 'simulated') or 'engines'}"
    title += f", {flags.model}" + ", interrupted" * bool(missing)
    offered = partial(ramp.rate, duration_s=flags.duration_s, peak_rate=flags.peak_rate)
    numbers = numbers | {"partial": int(bool(missing))}
    failures += run_record.write_all([
        lambda: run_record.write_csv(folder, "working_sets.csv", [each.row() for each in samples]),
        lambda: run_record.write_json(folder, "report.json", content | environment),
        lambda: run_record.write_summary(folder, numbers),
        lambda: cluster_report.plot(
            samples, offered, max_batch, folder / "cluster.png", title, footer
        ),
    ])  # fmt: skip
    return f"{table}\n({footer}){serving.partial_line(missing)}", failures


PROGRAM = Program(
    main, ClusterFlags, Output("results/serve_cluster"),
    ("requests.csv", "working_sets.csv", "cluster.png"),
)  # fmt: skip

if __name__ == "__main__":
    PROGRAM.run()
