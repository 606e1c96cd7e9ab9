"""A cluster that packs requests onto few GPUs while the load rises and falls (Punica Fig. 13).

    python -m experiments.serve_cluster --flagfile=configs/cluster_simulated.flags
    python -m experiments.serve_cluster --flagfile=configs/cluster_bundled.flags

Arrivals are a Poisson process whose rate rises from 0 to --peak_rate and falls again over
--duration_s seconds. Other than the paper's, its requests ask for no adapters: the model alone
serves them. --runners is 'simulated' (the engines' own schedulers over the
time that a roofline says; not a measurement of any GPU), 'threads' (an engine on each of JAX's
devices) or 'ray' (an engine in each Ray actor; extra `cluster`).

The seed gives the requests, and in simulated time the whole run. Writes to --output_dir:
report.json, summary.json, working_sets.csv (each second), requests.csv and cluster.png.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from experiments.lib import cluster_report, run_record
from experiments.lib.cluster_report import Sample
from experiments.lib.engines import engine_config, keep_compilations, load_engine
from experiments.lib.flags import define_engine_flags, define_float, fields_of, loading
from experiments.lib.program import Options, Program, refusals
from experiments.workloads import ramp
from models import checkpoint
from models.config import ModelConfig
from paged.cluster.cluster import Arrival, Cluster
from paged.cluster.live import LiveCluster
from paged.cluster.ray_actors import RayRunner, import_ray
from paged.cluster.simulated import SimulatedCluster
from paged.cluster.threads import ThreadRunner
from paged.config import EngineConfig
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import RooflineCost, SimulatedExecutor
from pallas_kernels.specs import Rates

RUNNERS = ("simulated", "threads", "ray")
PERIOD_S = 1.0  # of samples


def serve(
    cluster: SimulatedCluster | LiveCluster, arrivals: Sequence[Arrival], progress: bool = True
) -> list[Sample]:
    """Serve all; a sample each second."""
    samples: list[Sample] = []
    with tqdm(total=len(arrivals), desc="serving", unit="req", disable=not progress) as bar:

        def observe(now: float) -> None:
            samples.append(Sample.of(now, cluster.cluster))
            bar.update(samples[-1].ended - bar.n)

        cluster.serve(arrivals, observe, PERIOD_S)
        bar.update(len(arrivals) - bar.n)
    return samples


def simulated(options: Options, model: ModelConfig, config: EngineConfig) -> SimulatedCluster:
    """Engines over a roofline."""
    rates = Rates(1e9 * options.gigabytes_per_s, 1e12 * options.teraflops_per_s)
    cost = RooflineCost(model, rates, options.dtype, more_s=options.more_s)
    engines = {
        uuid: Engine(
            model, config,
            SimulatedExecutor(cost, vocab_size=model.vocab_size, dtype=options.dtype),
        )
        for uuid in uuids(options.num_gpus)
    }  # fmt: skip
    return SimulatedCluster(engines, model, config, rebalance_s=options.rebalance_s)


def threads(options: Options, model: ModelConfig, config: EngineConfig) -> LiveCluster:
    """Engines on JAX's devices."""
    devices = jax.devices()[: options.num_gpus]
    if len(devices) < options.num_gpus:
        raise ValueError(f"--num_gpus ({options.num_gpus}): JAX sees {len(devices)} devices")
    keep_compilations(options.compilation_cache)
    _, params = checkpoint.load(options.model, options.dtype)
    implementation = options.attention_implementation or None

    def make_engine(device: jax.Device) -> Engine:
        own = jax.device_put(params, device)
        engine = Engine.from_model(own, model, config, implementation=implementation)
        engine.warm_up(progress=False)
        return engine

    runners = {
        uuid: ThreadRunner(partial(make_engine, device), device)
        for uuid, device in zip(uuids(options.num_gpus), devices, strict=True)
    }
    return LiveCluster(runners, model, config, rebalance_s=options.rebalance_s)


def warm_engine(config: EngineConfig, values: dict[str, Any]) -> Engine:
    """What a Ray actor makes. values: of flags, as `load_engine` takes them."""
    engine = load_engine(config, **values)
    engine.warm_up(progress=False)
    return engine


def ray_actors(options: Options, model: ModelConfig, config: EngineConfig) -> LiveCluster:
    """Engines in Ray actors, each with a GPU if the Ray cluster has any."""
    ray = import_ray()
    ray.init(include_dashboard=False, log_to_driver=False)
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    make_engine = partial(warm_engine, config, loading(options))
    wanted: dict[str, Any] = {"num_gpus": 1} if has_gpus else {"num_cpus": 0}
    runners = {uuid: RayRunner(make_engine, wanted) for uuid in uuids(options.num_gpus)}
    return LiveCluster(runners, model, config, rebalance_s=options.rebalance_s)


def uuids(count: int) -> list[str]:
    return [f"gpu-{i:02}" for i in range(count)]


MAKE: dict[str, Callable[[Options, ModelConfig, EngineConfig], Any]] = {
    "simulated": simulated,
    "threads": threads,
    "ray": ray_actors,
}


def prepare(options: Options) -> tuple[ModelConfig, EngineConfig, list[ramp.RampRequest]]:
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
    return model, config, requests


def main(options: Options) -> None:
    if options.runners == "threads":  # a CPU is as many devices as it is told to be at first
        jax.config.update("jax_num_cpu_devices", options.num_gpus)
    with refusals():
        model, config, requests = prepare(options)
        cluster = MAKE[options.runners](options, model, config)
    arrivals = [
        Arrival(
            each.arrival_s, each.prompt,  # type: ignore[arg-type]
            SamplingParams(max_tokens=each.max_tokens, ignore_eos=True, seed=i),
        )
        for i, each in enumerate(requests)
    ]  # fmt: skip
    if isinstance(cluster, LiveCluster):
        with cluster:
            samples = serve(cluster, arrivals)
    else:
        samples = serve(cluster, arrivals)
    write(options, model, config, cluster.cluster, samples)


def write(
    options: Options, model: ModelConfig, config: EngineConfig, cluster: Cluster,
    samples: Sequence[Sample],
) -> None:  # fmt: skip
    """Write every file, and print the table."""
    environment = run_record.describe_environment()
    footer = run_record.hardware_line(environment)
    if options.runners == "simulated":
        footer = (
            f"simulated time: roofline of {options.gigabytes_per_s:g} GB/s and "
            f"{options.teraflops_per_s:g} TFLOP/s, {1e3 * options.more_s:g} ms more a step"
        )
    numbers = cluster_report.summary(cluster, samples, config.max_num_seqs)
    table = cluster_report.table(numbers, config.max_num_seqs)
    facts = {
        "experiment": "serve_cluster",
        "flags": vars(options),
        "measured_on": footer,
        "model": asdict(model),
        "engine": config,
        "measured": numbers,
        "claims": table.splitlines(),
    }
    folder = options.output_dir
    run_record.write_csv(folder, "requests.csv", cluster.records)
    run_record.write_csv(folder, "working_sets.csv", [sample.row() for sample in samples])
    run_record.write_json(folder, "report.json", facts | environment)
    run_record.write_summary(folder, numbers)
    title = f"{options.num_gpus} {'simulated GPUs' * (options.runners == 'simulated') or 'engines'}"
    offered = partial(ramp.rate, duration_s=options.duration_s, peak_rate=options.peak_rate)
    cluster_report.plot(
        samples, offered, config.max_num_seqs, Path(folder) / "cluster.png",
        f"{title}, {options.model}", footer,
    )  # fmt: skip
    print(f"{table}\n({footer})")


def define_flags() -> None:
    flags.DEFINE_enum("runners", "simulated", RUNNERS, "where the engines run")
    flags.DEFINE_integer("num_gpus", 4, "GPUs, each with an engine", lower_bound=1)
    define_float("duration_s", 120.0, "from the first to the last request", lower_bound=1)
    define_float("peak_rate", 10.0, "requests a second at half of it", lower_bound=1e-3)
    define_float("rebalance_s", 10.0, "period of consolidation in seconds", lower_bound=1e-3)
    flags.DEFINE_integer("length_divisor", 1, "divides all lengths", lower_bound=1, upper_bound=64)
    define_float("gigabytes_per_s", 1244.0, "of memory, on simulated GPUs", lower_bound=1e-3)
    define_float("teraflops_per_s", 218.0, "on simulated GPUs", lower_bound=1e-3)
    define_float("more_s", 0.0, "of each step on simulated GPUs, beside its roofline", 0.0)
    define_engine_flags()


PROGRAM = Program(
    main,
    define_flags,
    "results/serve_cluster",
    ("requests.csv", "working_sets.csv", "cluster.png"),
)

if __name__ == "__main__":
    PROGRAM.run()
