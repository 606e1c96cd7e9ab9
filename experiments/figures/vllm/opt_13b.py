"""OPT-13B on an A100 with 40 GB, as vLLM §6 serves it, in simulated time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments import serve
from experiments.workloads import synthetic_lengths
from experiments.workloads.workloads import Request
from models import checkpoint
from paged.config import EngineConfig
from paged.engine import Engine
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.step_cost import StepCost

MODEL, GPU = "configs/models/opt-13b", "a100-40"
KV_TOKENS, CONTEXT = 15_700, 2048  # Table 1: 15.7K slots in 12 GB
POLICIES = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "vllm")
SETTING = (
    "OPT-13B, A100-40GB by its data sheet (experiments.fit_cost_model), 15.7K KV slots, whole "
    "lengths, Poisson arrivals, no host time; lengths are log-normal with the published means"
)


@dataclass(frozen=True)
class Row:
    """One system at one rate.

    batch: running requests, mean over the steps.
    latency_s: a request's latency divided by its output tokens (the paper's normalised latency),
        mean over the requests.
    """

    dataset: str
    policy: str
    rate: float
    sigma: float
    attention_knob: float
    batch: float
    latency_s: float
    preemptions: int
    steps: int
    requests: int
    simulated_s: float


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


def run(
    dataset: str, policy: str, rate: float, sigma: float, duration_s: float, seed: int = 0,
    attention_knob: float = 1.0,
) -> Row:  # fmt: skip
    """Serve a trace to its end."""
    model = checkpoint.load_config(MODEL)
    config = EngineConfig(
        policy=policy, kv_cache_tokens=KV_TOKENS, max_model_len=CONTEXT, max_num_seqs=256,
        max_num_batched_tokens=2560, max_prefills_per_step=64,
    )  # fmt: skip
    clock = StepCost.declare(model, config, GPU, attention_knob=attention_knob)
    engine = Engine(model, config, SimulatedExecutor(clock, vocab_size=model.vocab_size))
    requests = requests_of(dataset, rate, duration_s, sigma, seed)
    serve.run(engine, requests, progress=False, skip=True)
    steps, records = engine.metrics.steps, engine.metrics.requests
    latencies = [(each.finish_s - each.arrival_s) / each.output_tokens for each in records]
    return Row(
        dataset, policy, rate, sigma, attention_knob,
        float(np.mean([step.num_running for step in steps])), float(np.mean(latencies)),
        sum(step.preemptions for step in steps), len(steps), len(records), steps[-1].time_s,
    )  # fmt: skip


def crossing(xs: Sequence[float], ys: Sequence[float], level: float) -> float:
    """Where the line through the points, xs ascending, first comes to `level` from either side;
    the last x if it never does."""
    for (x0, y0), (x1, y1) in zip(zip(xs, ys), zip(xs[1:], ys[1:])):
        if min(y0, y1) <= level <= max(y0, y1) and y0 != y1:
            return x0 + (level - y0) / (y1 - y0) * (x1 - x0)
    return xs[-1]
