"""DiffKV and its baselines on simulated GPUs (§7.3): formats, KV memory, and a clock.

    vllm    pages of 16 bits
    diffkv  K8V4 and K4V2 by the paper's thresholds for the model. A head keeps as many tokens as a
            recorded head of the bundled model (`record_compression`), of the layer at the same
            relative depth; the layer's recorded heads are used in turn
    quest   all pages, in 16 bits; a query reads half of a sequence of mean length
    snapkv  half of the tokens, in 16 bits (Table 1: SnapKV with 50 % of the memory)
    atom    all tokens in K4V4
    kivi    all tokens in K2V2

KV memory is computed as in vLLM: 0.9 of the device, less weights and the activations of the largest
step. The largest step has as many tokens as the model's context, because the authors' commands
(DiffKV's benchmarks/benchmark_throughput.sh) limit the tokens of an output, but not of a sequence
or of a step. The commands limit DiffKV's batch to 16 sequences for QwQ-32B (the paper reports
15.9), 32 for Qwen2.5-32B, 64 for Llama3-70B and 128 for the small models. Prompts are as long as
MATH's, and all outputs reach the limit (the commands ignore end tokens).
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from experiments import serve
from experiments.lib import shipped
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.diffkv.systems import PAGE_SIZE, uniform_options
from experiments.workloads.workloads import Request
from models import checkpoint
from models.config import ModelConfig
from models.families import family
from models.params import flatten
from paged.config import EngineConfig
from paged.engine import Engine
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.simulator.executor import SimulatedExecutor
from paged.simulator.machines import machine
from paged.simulator.step_cost import HOSTS, StepCost

VLLM, DIFFKV = "vllm", "diffkv"
BASELINES = ("quest", "snapkv", "atom", "kivi")
SYSTEMS = (VLLM, *BASELINES, DIFFKV)
RECORDED = "models/bundled/diffkv_compression.json"
UTILISATION = 0.9  # vLLM's share of a device's memory
PROMPTS = (64, 256)  # least and most tokens of a MATH problem, instructions included


@dataclass(frozen=True)
class Server:
    """A model and its GPUs.

    gpus: number of GPUs.
    alphas: alpha_h and alpha_l (Fig. 10).
    limit: output tokens of a request.
    most: largest batch of DiffKV, in sequences.
    """

    model: str
    gpus: int
    alphas: tuple[float, float]
    limit: int
    most: int

    @property
    def config(self) -> ModelConfig:
        return model_of(self.model)

    @property
    def longest(self) -> int:
        return self.limit + PROMPTS[1]

    def kv_tokens(self, gpu: str) -> int:
        """Tokens whose 16-bit keys and values fit beside weights and activations."""
        model = self.config
        of_device = UTILISATION * machine(gpu).memory_bytes
        parameters = sum(
            math.prod(each.shape) for each in flatten(family(model).declare(model)).values()
        )
        # Activations of the MLP, the residual stream and its norms.
        widths = 3 * model.intermediate_size / self.gpus + 4 * model.hidden_size
        activations = 2 * model.max_position_embeddings * widths
        room = self.gpus * (of_device - activations) - 2 * parameters
        return int(room // ShardedModel.split(model, dtype="float16").kv_token_bytes())


SERVERS = {
    each.model: each
    for each in (
        Server("llama-3-8b", 1, (1.0, 0.02), 4096, 128),
        Server("qwen2.5-7b", 1, (0.04, 0.04), 4096, 128),
        Server("qwen2.5-32b", 2, (3.0, 0.0), 8192, 32),
        Server("qwq-32b", 2, (3.0, 0.0), 16384, 16),
        Server("llama-3-70b", 4, (1.0, 0.0), 4096, 64),
    )
}


@dataclass(frozen=True)
class SimulatedFlags(Flags):
    gpu: str = flag("l40", "that is simulated", choices=("l40", "l40s", "a100-80"))
    host: str = flag("vllm", "system whose host time a step includes", choices=tuple(HOSTS))
    attention_knob: float = flag(1.0, "times the time of attention and compression", above=0)
    host_knob: float = flag(1.0, "times the time of the host", least=0)
    recorded: str = flag(RECORDED, "file of what heads keep", path=True)
    seed: int = flag(0, "of all that is drawn", least=0)

    def changed(self, attention: float, host: float) -> "SimulatedFlags":
        """A copy of the flags with further factors on the time of attention and of the host."""
        return replace(
            self, attention_knob=attention * self.attention_knob, host_knob=host * self.host_knob
        )


@functools.cache
def model_of(name: str) -> ModelConfig:
    return checkpoint.load_config(shipped.MODELS / name)


def options_of(system: str, server: Server) -> dict[str, Any]:
    if system == VLLM:
        return {"policy": "vllm"}
    if system == "quest":
        chosen: dict[str, Any] = {
            "select_per": "query_head", "reuse": 1, "dense_layers": 2, "logical_page": PAGE_SIZE,
            "budget": max(48, server.limit // 4),
        }  # fmt: skip
        return {"policy": "lserve", "policy_options": chosen}
    if system == DIFFKV:
        chosen = dict(zip(("alpha_h", "alpha_l"), server.alphas))
    elif system == "snapkv":
        chosen = uniform_options("K16V16") | {
            "prompt_rule": "snapkv", "generation_rule": "h2o", "budget": 0.5,
        }  # fmt: skip
    else:
        chosen = uniform_options({"atom": "K4V4", "kivi": "K2V2"}.get(system, system))
    return {"policy": "diffkv", "policy_options": chosen}


def config_of(
    system: str, server: Server, gpu: str = "l40", most: int = 256, longest: int = 0
) -> EngineConfig:
    """A system's configuration.

    most: largest batch, in sequences.
    longest: most tokens of a sequence; 0 for `server.longest`.
    """
    longest = longest or server.longest
    return EngineConfig(
        max_model_len=longest, page_size=PAGE_SIZE, max_num_batched_tokens=max(longest, most),
        chunked_prefill=False, max_num_seqs=most, max_prefills_per_step=8,
        kv_cache_tokens=server.kv_tokens(gpu), tensor_parallel=server.gpus,
        **options_of(system, server),
    )  # fmt: skip


def clock_of(flags: SimulatedFlags, server: Server, config: EngineConfig) -> StepCost:
    return StepCost.declare(
        server.config, config, flags.gpu, host=flags.host, attention_knob=flags.attention_knob,
        host_knob=flags.host_knob,
    )  # fmt: skip


def engine_of(flags: SimulatedFlags, server: Server, config: EngineConfig) -> Engine:
    executor = SimulatedExecutor(
        clock_of(flags, server, config), vocab_size=server.config.vocab_size, dtype="float16",
        compression=shipped.found(flags.recorded),
    )  # fmt: skip
    return Engine(server.config, config, executor)


def check(
    flags: SimulatedFlags, models: Sequence[str], systems: Sequence[str], output: int
) -> None:
    """Raises ValueError if the flags allow no engine of some system. output: see `server_of`."""
    for model, system in itertools.product(models, systems):
        server = server_of(model, output)
        engine_of(flags, server, config_of(system, server, flags.gpu, server.most))


def requests_of(server: Server, count: int, seed: int, rate: float = float("inf")) -> list[Request]:
    """`count` problems that arrive as a Poisson process at `rate` requests/s."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(PROMPTS[0], PROMPTS[1] + 1, count)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Request(float(at), [5] * int(prompt), server.limit, ignore_eos=True)
        for at, prompt in zip(arrivals, prompts)
    ]


def held(
    flags: SimulatedFlags, config: EngineConfig, model: ShardedModel, prompts: np.ndarray,
    contexts: np.ndarray,
) -> np.ndarray | None:  # fmt: skip
    """Numbers of tokens that heads keep, for `Layout.work`; None if the policy keeps all tokens.

    prompts: prompt tokens of each sequence, [n].
    contexts: tokens of each sequence so far, [..., n].
    """
    simulated = policy_of(config.policy).simulated
    if simulated is None:
        return None
    pages, slots = simulated(config, model, shipped.found(flags.recorded)), np.arange(len(prompts))
    pages.compute(slots, prompts, np.ones(len(prompts), bool))
    return pages.kept(slots, contexts)


def run(engine: Engine, requests: Sequence[Request]) -> None:
    serve.run(engine, requests, progress=False, skip=True)


def server_of(model: str, output: int) -> Server:
    """The server of a model. output: limit of output tokens; 0 for the limit in SERVERS."""
    server = SERVERS[model]
    return replace(server, limit=output or server.limit)


@dataclass(frozen=True)
class Case:
    """A simulated run, with the fields of SimulatedFlags. output: see `server_of`."""

    model: str
    system: str
    gpu: str
    host: str
    attention_knob: float
    host_knob: float
    recorded: str
    seed: int
    output: int

    @property
    def server(self) -> Server:
        return server_of(self.model, self.output)

    @property
    def flags(self) -> SimulatedFlags:
        names = [field.name for field in fields(SimulatedFlags)]
        return SimulatedFlags(**{name: getattr(self, name) for name in names})


def ratio(found: Mapping[Any, float], above: Any, below: Any) -> float | None:
    return found[above] / found[below] if {above, below} <= set(found) else None


SETTING = (
    "NVIDIA L40 by data sheet (experiments.fit_cost_model); attention and compression move bytes "
    "at 0.775 of the bandwidth, which no L40 has confirmed here; the host time of vLLM of 2023; "
    "vLLM recomputes preempted sequences, other policies swap them; heads keep what the bundled "
    "model's kept"
)
