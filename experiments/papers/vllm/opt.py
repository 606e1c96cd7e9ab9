"""OPT models and LLaMA-13B on A100s, as vLLM §6 serves them, in simulated time."""

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiments import serve
from experiments.lib import shipped
from experiments.papers.vllm.genealogies import parents_of
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
from paged.simulator.recorded import RecordedAncestry
from paged.simulator.step_cost import StepCost

CONTEXT = 2048
BLOCK_SIZE = 16
SIGMAS = shipped.ROOT / "experiments/results/vllm/fig13_batched_requests/summary.json"
GENEALOGIES = shipped.ROOT / "experiments/results/vllm/fig15_sharing_savings/genealogies.jsonl"
POLICIES = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "vllm")


@dataclass(frozen=True)
class Server:
    """A model and its GPUs; all but llama-13b are columns of Table 1.

    kv_gib: memory for the KV cache in all GPUs together, GiB.
    paper_slots: the table's number of KV slots.
    """

    model: str
    gpu: str
    gpus: int
    kv_gib: int
    paper_slots: int

    @property
    def config(self) -> ModelConfig:
        return checkpoint.load_config(shipped.MODELS / self.model)

    @property
    def kv_slots(self) -> int:
        """Tokens whose keys and values fit in `kv_gib`."""
        config = self.config
        return self.kv_gib * GIB // (config.num_layers * kv_bytes_of_token(config, "float16"))


SERVERS = {
    "13b": Server("opt-13b", "a100-40", 1, 12, 15_700),
    "66b": Server("opt-66b", "a100-40", 4, 21, 9_700),
    "175b": Server("opt-175b", "a100-80", 8, 264, 60_100),
    "llama-13b": Server("llama-13b", "a100-40", 1, 12, 15_700),
}


@dataclass(frozen=True)
class Case:
    """A system that serves a trace.

    rate: request rate, requests/s.
    sigma: sigma of the log-normal lengths.
    duration_s: duration of the arrivals, seconds.
    host: the system whose host time a step includes (`step_cost.HOSTS`).
    attention_knob, host_knob: factors on the time of attention and of the host.
    best_of, beam_width: sequences of each request, 1 for basic sampling.
    prefix_tokens: tokens of the prefix that all prompts share; vLLM computes the prefix once.
    block_size: tokens of a block.
    preemption_mode, admit_after_swap: see `EngineConfig`.
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
    prefix_tokens: int = 0
    block_size: int = BLOCK_SIZE
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    admit_after_swap: Literal["completed", "resumed"] = "completed"


@dataclass(frozen=True)
class Row(Case):
    """The results of a case.

    batch: running requests, mean over the steps.
    latency_s: normalised latency: a request's latency divided by the mean number of output tokens
        of its sequences, mean over the requests.
    step_s: mean duration of a step that only decodes.
    tokens_per_s: output tokens a second over the whole run; a request counts with the mean of its
        sequences.
    kv_used: share of the KV memory that is in use, mean over the steps.
    saving: share of blocks that sharing saves, mean over the steps (§6.3).
    """

    batch: float = 0.0
    latency_s: float = 0.0
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    kv_used: float = 0.0
    saving: float = 0.0
    preemptions: int = 0
    steps: int = 0
    requests: int = 0
    simulated_s: float = 0.0


def calibrated(dataset: str) -> float:
    """The dataset's sigma in the committed result of fig13_batched_requests. Raises KeyError for a
    dataset without a calibrated sigma."""
    return float(json.loads(SIGMAS.read_text())[f"sigma_{dataset}"])


def setting(server: str, host: str) -> str:
    which = SERVERS[server]
    return (
        f"{which.model.upper()}, {which.gpus} × {which.gpu} by data sheet "
        f"(experiments.fit_cost_model), {which.kv_slots:,} KV slots, whole lengths, Poisson "
        f"arrivals, host {host}; lengths are log-normal with the published means"
    )


def requests_of(
    dataset: str, rate: float, duration_s: float, sigma: float, seed: int, prefix_tokens: int = 0
) -> list[Request]:
    """Requests with Poisson arrivals at `rate` requests/s for about `duration_s` seconds. Prompts
    share their first `prefix_tokens` tokens and differ from the next token on. The same seed gives
    the same lengths at all rates."""
    count = max(1, round(rate * duration_s))
    if dataset == "chatbot":
        lengths, _ = synthetic_lengths.draw_chats(count, sigma, CONTEXT, CONTEXT // 2, seed, 1)
    else:
        longest = CONTEXT - prefix_tokens
        lengths, _ = synthetic_lengths.draw(count, dataset, sigma, longest, seed)
    gaps = np.random.default_rng([seed, 0]).exponential(1 / rate, count)
    return [
        Request(
            float(arrival), [5] * prefix_tokens + [6 + i % 10_000] * prompt, output, ignore_eos=True
        )
        for i, (arrival, (prompt, output)) in enumerate(zip(np.cumsum(gaps), lengths, strict=True))
    ]


@functools.cache
def ancestry(width: int) -> RecordedAncestry:
    """The parents of beams in the searches of this width that `fig15_sharing_savings` recorded with
    Alpaca's lengths."""
    trees = map(json.loads, GENEALOGIES.read_text().splitlines())
    mine = [tree for tree in trees if (tree["dataset"], tree["width"]) == ("alpaca", width)]
    searches = [parents_of(tree["parents"]) for tree in mine]
    return RecordedAncestry([search for search in searches if len(search) > 1])


def sampling_of(case: Case) -> SamplingParams:
    """The sampling of a case. Orca cannot fork sequences (§4.4); its beams are parallel samples."""
    if case.beam_width > 1 and case.policy == "vllm":
        return SamplingParams(beam_width=case.beam_width, n=1)
    if (count := max(case.beam_width, case.best_of)) > 1:
        return SamplingParams(temperature=1.0, n=count)
    return SamplingParams()


def engine_of(case: Case, declare: Callable[..., StepCost] = StepCost.declare) -> Engine:
    """The engine of a case. declare: returns its clock, like `StepCost.declare`."""
    server = SERVERS[case.server]
    model, beams = server.config, case.beam_width if case.policy == "vllm" else 1
    # A static batch has only requests that begin in one step.
    budget = 64 * CONTEXT if case.policy == "fastertransformer" else 2560
    config = EngineConfig(
        policy=case.policy, kv_cache_tokens=server.kv_slots, max_model_len=CONTEXT,
        max_num_seqs=256, max_num_batched_tokens=budget, max_prefills_per_step=64,
        tensor_parallel=server.gpus, page_size=case.block_size,
        preemption_mode=case.preemption_mode, admit_after_swap=case.admit_after_swap,
        prefix_caching=case.policy == "vllm" and case.prefix_tokens > 0,
    )  # fmt: skip
    clock = declare(
        model, config, server.gpu, host=case.host, attention_knob=case.attention_knob,
        host_knob=case.host_knob,
    )  # fmt: skip
    executor = SimulatedExecutor(
        clock, vocab_size=model.vocab_size, ancestry=ancestry(beams) if beams > 1 else None
    )
    engine = Engine(model, config, executor)
    if config.prefix_caching:
        engine.pin_prefix([5] * case.prefix_tokens)
        engine.metrics.clear()
    return engine


def run(case: Case, declare: Callable[..., StepCost] = StepCost.declare) -> Row:
    """Serve a trace to its end. declare: see `engine_of`."""
    engine = engine_of(case, declare)
    requests = requests_of(
        case.dataset, case.rate, case.duration_s, case.sigma, case.seed, case.prefix_tokens
    )
    began = engine.executor.clock.now()
    serve.run(engine, requests, sampling_of(case), progress=False, skip=True)
    steps, records = engine.metrics.steps, engine.metrics.requests
    seconds = steps[-1].time_s - began
    outputs = [each.output_tokens / each.sequences for each in records]
    latencies = [(r.finish_s - r.arrival_s) / tokens for r, tokens in zip(records, outputs)]
    decodes = [step.device_s for step in steps if not step.prefill_tokens]
    held, shared = np.array([
        (engine.config.kv_cache_tokens - step.kv_free, step.kv_shared) for step in steps
    ]).T  # fmt: skip
    return Row(
        **vars(case),
        batch=float(np.mean([step.num_running for step in steps])),
        latency_s=float(np.mean(latencies)),
        step_s=float(np.mean(decodes)),
        tokens_per_s=sum(outputs) / seconds,
        kv_used=float((held / engine.config.kv_cache_tokens).mean()),
        saving=float((shared / np.maximum(1, shared + held)).mean()),
        preemptions=sum(step.preemptions for step in steps),
        steps=len(steps),
        requests=len(records),
        simulated_s=seconds,
    )


def hour_s() -> float:
    """Processor seconds to simulate vLLM's hour of Fig. 12a at 2 requests/s."""
    case = Case("13b", "sharegpt", "vllm", 2.0, calibrated("sharegpt"), 3600.0)
    began = time.process_time()
    run(case)
    return time.process_time() - began


def crossing(xs: Sequence[float], ys: Sequence[float], level: float) -> float:
    """The x at which the line through the points first crosses `level`; the last x if the line does
    not cross it. xs: ascending."""
    for (x0, y0), (x1, y1) in zip(zip(xs, ys), zip(xs[1:], ys[1:])):
        if min(y0, y1) <= level <= max(y0, y1) and y0 != y1:
            return x0 + (level - y0) / (y1 - y0) * (x1 - x0)
    return xs[-1]
