"""OPT models on A100s, as vLLM §6 serves them, in simulated time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments import serve
from experiments.workloads import synthetic_lengths
from experiments.workloads.workloads import Request
from models import checkpoint
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.engine import Engine
from paged.kv_cache.work import kv_bytes_of_token
from paged.requests.sampling_params import SamplingParams
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.machines import GIB
from paged.simulator.step_cost import StepCost

CONTEXT = 2048
POLICIES = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "vllm")


@dataclass(frozen=True)
class Server:
    """A column of Table 1. kv_gib: memory for the KV cache, on all GPUs together. paper_slots: the
    table's number of KV slots."""

    model: str
    gpu: str
    gpus: int
    kv_gib: int
    paper_slots: int

    @property
    def config(self) -> ModelConfig:
        return checkpoint.load_config(f"configs/models/{self.model}")

    @property
    def kv_slots(self) -> int:
        """Tokens whose keys and values fit."""
        config = self.config
        return self.kv_gib * GIB // (config.num_layers * kv_bytes_of_token(config, "float16"))


SERVERS = {
    "13b": Server("opt-13b", "a100-40", 1, 12, 15_700),
    "66b": Server("opt-66b", "a100-40", 4, 21, 9_700),
    "175b": Server("opt-175b", "a100-80", 8, 264, 60_100),
}


@dataclass(frozen=True)
class Case:
    """A system that serves a trace.

    rate: requests/s.
    sigma: of the log-normal lengths.
    duration_s: of the arrivals.
    host: whose host time a step includes (`step_cost.HOSTS`).
    attention_knob, host_knob: factors on the time of attention and of the host.
    best_of, beam_width: sequences of each request, 1 for basic sampling.
    """

    server: str
    dataset: str
    policy: str
    rate: float
    sigma: float
    duration_s: float
    seed: int = 0
    host: str = "vllm"
    attention_knob: float = 1.0
    host_knob: float = 1.0
    best_of: int = 1
    beam_width: int = 1


@dataclass(frozen=True)
class Row(Case):
    """What came of a case.

    batch: running requests, mean over the steps.
    latency_s: a request's latency divided by its output tokens (the paper's normalised latency),
        mean over the requests.
    step_s: mean duration of a step that only decodes.
    """

    batch: float = 0.0
    latency_s: float = 0.0
    step_s: float = 0.0
    preemptions: int = 0
    steps: int = 0
    requests: int = 0
    simulated_s: float = 0.0


def setting(server: str, host: str) -> str:
    """The setting in words, for tables and reports."""
    which = SERVERS[server]
    return (
        f"{which.model.upper()}, {which.gpus} × {which.gpu} by data sheet "
        f"(experiments.fit_cost_model), {which.kv_slots:,} KV slots, whole lengths, Poisson "
        f"arrivals, host {host}; lengths are log-normal with the published means"
    )


def requests_of(
    dataset: str, rate: float, duration_s: float, sigma: float, seed: int
) -> list[Request]:
    """Poisson arrivals over `duration_s`; the same seed gives the same lengths at all rates."""
    count = max(1, round(rate * duration_s))
    lengths, _ = synthetic_lengths.draw(count, dataset, sigma, CONTEXT, seed)
    gaps = np.random.default_rng([seed, 0]).exponential(1 / rate, count)
    return [
        Request(float(arrival), [5] * prompt, output, ignore_eos=True)
        for arrival, (prompt, output) in zip(np.cumsum(gaps), lengths, strict=True)
    ]


def run(case: Case) -> Row:
    """Serve a trace to its end."""
    server = SERVERS[case.server]
    model = server.config
    config = EngineConfig(
        policy=case.policy, kv_cache_tokens=server.kv_slots, max_model_len=CONTEXT,
        max_num_seqs=256, max_num_batched_tokens=2560, max_prefills_per_step=64,
        tensor_parallel=server.gpus,
    )  # fmt: skip
    clock = StepCost.declare(
        model, config, server.gpu, host=case.host, attention_knob=case.attention_knob,
        host_knob=case.host_knob,
    )  # fmt: skip
    engine = Engine(model, config, SimulatedExecutor(clock, vocab_size=model.vocab_size))
    requests = requests_of(case.dataset, case.rate, case.duration_s, case.sigma, case.seed)
    sampling = SamplingParams()
    if case.beam_width > 1:
        sampling = SamplingParams(beam_width=case.beam_width, n=1)
    elif case.best_of > 1:
        sampling = SamplingParams(temperature=1.0, n=case.best_of)
    serve.run(engine, requests, sampling, progress=False, skip=True)
    steps, records = engine.metrics.steps, engine.metrics.requests
    latencies = [(each.finish_s - each.arrival_s) / each.output_tokens for each in records]
    decodes = [step.device_s for step in steps if not step.prefill_tokens]
    return Row(
        **vars(case),
        batch=float(np.mean([step.num_running for step in steps])),
        latency_s=float(np.mean(latencies)),
        step_s=float(np.mean(decodes)),
        preemptions=sum(step.preemptions for step in steps),
        steps=len(steps),
        requests=len(records),
        simulated_s=steps[-1].time_s,
    )


def crossing(xs: Sequence[float], ys: Sequence[float], level: float) -> float:
    """Where the line through the points, xs ascending, first comes to `level` from either side;
    the last x if it never does."""
    for (x0, y0), (x1, y1) in zip(zip(xs, ys), zip(xs[1:], ys[1:])):
        if min(y0, y1) <= level <= max(y0, y1) and y0 != y1:
            return x0 + (level - y0) / (y1 - y0) * (x1 - x0)
    return xs[-1]
