"""The systems of LServe's evaluation on simulated GPUs (§4.1): KV formats, reads, products and step
times of each.

    dense       16 bits
    w8a8, w4a8  8-bit products, with weights of 8 or 4 bits; keys and values of 16 bits
    vllm        vLLM 0.6.3: W8A8, keys and values of 8 bits. In Table 7 its step takes 57 ns longer
                for each token, too little for an A100 to read 16 bits
    qserve      W4A8KV4 in pages of 64 tokens: LServe without sparsity
    minference  16 bits; sparse prefill, dense decode
    duo         DuoAttention: 16 bits, half of the heads stream
    static      qserve with half of the heads streaming
    dynamic     qserve with page selection: 4,096 tokens are read
    lserve      qserve with streaming heads and page selection
    lserve_minference
                lserve, but dense heads prefill all prompts as in MInference; fig11_prefill_speed
                uses it from 128k on (§4.3)
    quest       16 bits; flat pages of 16 tokens, selected by each query head at each token. The
                first two layers are dense
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lib import plots, shipped
from experiments.lib.knobs import FACTORS
from experiments.lib.typed_flags import Flags, flag
from experiments.papers.drawing import panels
from experiments.study import Values
from models import checkpoint
from models.config import ModelConfig
from paged.config import EngineConfig
from paged.kv_cache.lserve.layout import LServeLayout
from paged.simulator.machines import MACHINES
from paged.simulator.step_cost import Host, StepCost
from pallas_kernels.specs import Cost

DECODE, PREFILL = "decode", "prefill"
LONGEST = 2**19  # most tokens of a context
LSERVE = {"budget": 4096, "sink": 128, "local": 256, "logical_page": 16, "reuse": 4}
EVERYTHING = 2**30  # a budget that no context exceeds
A_STEP_OF_QSERVE = 10.5e-3, 32, 512  # Table 1, on an A100: seconds, sequences, tokens of a sequence


@dataclass(frozen=True)
class System:
    """A system.

    options: options of the policy lserve that differ from LSERVE.
    streams: whether half of the KV heads stream.
    by_heads: see `Clock`.
    bits: bits of the products' operands.
    weight_bits: bits of a weight in memory, if fewer than `bits`.
    """

    options: Mapping[str, Any]
    streams: bool = False
    by_heads: bool = False
    bits: int = 16
    weight_bits: int = 16
    page_size: int = 64


_W4A8: Mapping[str, Any] = {"bits": 8, "weight_bits": 4}
_QSERVE: Mapping[str, Any] = {"by_heads": True, **_W4A8}
SYSTEMS = {
    "dense": System({"budget": EVERYTHING}),
    "w8a8": System({"budget": EVERYTHING}, bits=8),
    "w4a8": System({"budget": EVERYTHING}, **_W4A8),
    "vllm": System({"budget": EVERYTHING, "kv_bits": 8}, bits=8),
    "qserve": System({"budget": EVERYTHING, "kv_bits": 4}, **_QSERVE),
    "minference": System({"budget": EVERYTHING, "minference_from": 1}),
    "duo": System({"budget": EVERYTHING}, streams=True),
    "static": System({"budget": EVERYTHING, "kv_bits": 4}, streams=True, **_QSERVE),
    "dynamic": System({"kv_bits": 4}, **_QSERVE),
    "lserve": System({"kv_bits": 4}, streams=True, **_QSERVE),
    # No kv_bits, because prompts attend to unquantised keys, whatever format the cache has.
    "lserve_minference": System({"minference_from": 1}, streams=True, **_QSERVE),
    "quest": System({"select_per": "query_head", "reuse": 1, "dense_layers": 2}, page_size=16),
}


@dataclass(frozen=True)
class SimulatedFlags(Flags):
    """Flags of a study. Each study sets its own default of `contexts`."""

    contexts: tuple[int, ...] = flag((2**16,), "tokens", least=64, most=LONGEST)
    gpu: str = flag("a100-80", "that is simulated", choices=tuple(MACHINES))
    attention_knob: float = flag(1.0, "factor on the time of attention and selection", above=0)
    host_knob: float = flag(1.0, "factor on the time of the host", least=0)

    @property
    def ascending(self) -> list[int]:
        return sorted(set(self.contexts))


@dataclass(frozen=True)
class Clock:
    """Seconds of the steps of one system on one GPU.

    by_heads: whether decode attention and selection are parallel over heads and sequences alone
        ('the computation along the KV token dimension remains sequential', §2.2, §3.1). If so, one
        multiprocessor reads the longest head at its share of the bandwidth, even if there are fewer
        heads than multiprocessors. Otherwise a head's tokens are split over all multiprocessors.
    """

    cost: StepCost
    by_heads: bool

    @classmethod
    def of(
        cls, system: str, model: ModelConfig, gpu: str = "a100-80", attention_knob: float = 1.0,
        host_s: float = 0.0, split: bool = False,
    ) -> "Clock":  # fmt: skip
        """host_s: host time added to each step, seconds.
        split: whether heads are split over multiprocessors even if the system sets `by_heads`.
        """
        cost = _declared(system, model, gpu)
        costs = dataclasses.replace(cost.costs, attention_knob=attention_knob)
        cost = dataclasses.replace(cost, costs=costs, host=Host(added_s=host_s))
        return cls(cost, SYSTEMS[system].by_heads and not split)

    def parts_s(self, context: int, new_tokens: int = 1, sequences: int = 1) -> dict[str, float]:
        """Seconds of attention's parts in a layer, mean over the tokens that share a selection."""
        layout: LServeLayout = self.cost.layout  # type: ignore[assignment]
        ends = np.repeat(context + np.arange(layout.reuse)[:, None], sequences, axis=1)
        new = np.full_like(ends, new_tokens)
        work, part_s = layout.work(ends, new), self.cost.costs.part_s
        seconds = {name: np.where(part.bytes, part_s(part), 0.0) for name, part in work.items()}
        if self.by_heads and new_tokens == 1:
            K, on = layout.heads, self.cost.costs.machine.multiprocessors
            all_dense = ((K,) * len(layout.num_dense[0]),)
            longest = dataclasses.replace(layout, num_dense=all_dense).work(ends, new)
            for name in {"decode", "selection"} & set(seconds):
                # One of `on` multiprocessors takes as long for one head as all take for `on` heads.
                as_many = Cost(longest[name].bytes * on // (K * sequences))
                of_longest = np.where(as_many.bytes, part_s(as_many), 0.0)
                seconds[name] = np.maximum(seconds[name], of_longest)
        return {name: float(np.mean(each)) for name, each in seconds.items()}

    def step_s(self, context: int, new_tokens: int = 1, sequences: int = 1) -> float:
        """Seconds of a step of `sequences` sequences with `context` tokens each, of which the step
        computes the last `new_tokens`."""
        layers = self.cost.model.shard.num_layers
        device_s = self.cost.dense_s(sequences * new_tokens, sequences)
        device_s += layers * sum(self.parts_s(context, new_tokens, sequences).values())
        return float(self.cost.host.step_s(device_s, sequences, 1))


@functools.cache
def _declared(name: str, model: ModelConfig, gpu: str) -> StepCost:
    system, options = SYSTEMS[name], {**LSERVE, **SYSTEMS[name].options}
    if system.streams:
        dense = round(model.num_kv_heads / 2)  # the other half of each layer's KV heads streams
        row = tuple(float(head < dense) for head in range(model.num_kv_heads))
        options |= {"gates": (row,) * model.num_layers, "streaming_share": 0.5}
    longest, P = LONGEST + 64, system.page_size
    # A tenth more memory than the vllm policy needs, for the statistics of dense heads.
    slots = (-(-longest // P) + 2) * P * 11 // 10
    config = EngineConfig(
        policy="lserve", policy_options=options, max_num_seqs=1, max_num_batched_tokens=1024,
        max_prefills_per_step=1, max_model_len=longest, page_size=P, watermark=0.0,
        kv_cache_tokens=slots + 1024, quantization="w8a8" if system.bits == 8 else "none",
    )  # fmt: skip
    cost = StepCost.declare(model, config, gpu)
    return dataclasses.replace(cost, weight_bits=system.weight_bits)


@functools.cache
def model_of(name: str) -> ModelConfig:
    """A model of configs/models with a longer context, as in the paper."""
    return checkpoint.load_config(shipped.MODELS / name).replace(
        max_position_embeddings=2 * LONGEST
    )


@functools.cache
def host_s() -> float:
    """Host seconds added to each step: Table 1's step of QServe less the cost model's time for this
    step. LServe, QServe and the baselines all run from PyTorch and get the same host time. No
    predicted figure contains Table 1's step."""
    measured_s, sequences, tokens = A_STEP_OF_QSERVE
    clock = Clock.of("qserve", model_of("llama-3-8b"))
    return measured_s - clock.step_s(tokens, sequences=sequences)


def thousands(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)


@dataclass(frozen=True)
class Row:
    """A step of one sequence.

    stage: DECODE for the next token, PREFILL for the whole prompt.
    knob: the changed constant, a name of `knobs.FACTORS`.
    ms: time of the step.
    attention_ms: time of attention in all layers, selection and statistics included.
    selection_ms: time of page selection in all layers.
    """

    model: str
    stage: str
    system: str
    context: int
    knob: str
    ms: float
    attention_ms: float
    selection_ms: float


def rows(
    flags: SimulatedFlags, model: str, stage: str, systems: Iterable[str],
    contexts: Iterable[int], split: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """Rows for each of FACTORS. split: see `Clock.of`; split systems are named 'NAME split'."""
    for knob, (attention, host) in FACTORS.items():
        for system, context in itertools.product(systems, contexts):
            clock = Clock.of(
                system, model_of(model), flags.gpu, attention * flags.attention_knob,
                host * flags.host_knob * host_s(), split,
            )  # fmt: skip
            new = context if stage == PREFILL else 1
            parts, layers = clock.parts_s(context, new), clock.cost.model.shard.num_layers
            yield Row(
                model, stage, f"{system} split" if split else system, context, knob,
                1e3 * clock.step_s(context, new), 1e3 * layers * sum(parts.values()),
                1e3 * layers * parts.get("selection", 0.0),
            )  # fmt: skip


Found = Callable[[Sequence[Row]], Values]


def with_knobs(*beside: str) -> Callable[[Found], Callable[..., Values]]:
    """Turns a function of the rows with unchanged constants into the `values` of a study. The study
    also has the values named in `beside` for each changed constant of FACTORS."""

    def decorated(found: Found) -> Callable[..., Values]:
        @functools.wraps(found)
        def values(_: SimulatedFlags, rows: Sequence[Row]) -> Values:
            numbers = dict(found([row for row in rows if not row.knob]))
            for knob in filter(None, FACTORS):
                changed = found([row for row in rows if row.knob == knob])
                numbers |= {f"{name}_{knob}": changed.get(name) for name in beside}
            return numbers

        return values

    return decorated


def draw(_: SimulatedFlags, figure: Figure, rows: Sequence[Row]) -> None:
    """Milliseconds over the context, a panel for each model and stage."""
    plain = [row for row in rows if not row.knob]
    for axes, mine in panels(figure, plain, "model", "stage"):
        plots.lines(axes, mine, "context", "ms", "system", "context", "ms")
        axes.set(xscale="log", yscale="log")


SETTING = (
    "GPUs by data sheet (experiments.fit_cost_model); attention and selection read at 0.775 of the "
    "bandwidth, of LServe and QServe each head by one multiprocessor (§2.2), and prompts attend at "
    "half of the peak, which no A100 has confirmed here; a step's host time is what the cost model "
    "leaves of Table 1's 10.5 ms (32 sequences of QServe)"
)
DIFFERS = "all 32 layers alike: half of the KV heads of each layer stream"
