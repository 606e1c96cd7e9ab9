"""The clock of simulated devices: seconds of a step on GPUs of a data sheet."""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.device.step_inputs import StepInputs
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.work import Layout
from paged.simulator.cost_model import CostModel
from paged.simulator.layer import ITEMSIZE, adapter_page_bytes, adapters_s, head_ops, layer_ops
from paged.simulator.machines import machine


@dataclass(frozen=True)
class Host:
    """The host's part of a step.

    added_s: seconds of each step in which the device waits for the host.
    least_s: seconds of the shortest step that the host allows.
    """

    added_s: float = 0.0
    least_s: float = 0.0


HOSTS = {
    # The host's work is done while the device computes the step before; it takes 0.14 ms for 256
    # sequences (experiments/bench/host.py on two CPU cores), less than any step here.
    "none": Host(),
    # A decode step takes about 30 ms (Punica §5.2), for a 7B model as well.
    "punica": Host(least_s=30e-3),
}


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of `model`, of which each GPU has one shard.

    layout: the KV policy's.
    bits: of the operands of products, 8 for W8A8.
    adapter_pages: pages of each adapter.
    Sampling, and gathering logits from several GPUs, take no time.
    """

    costs: CostModel
    model: ShardedModel
    layout: Layout
    bits: int = 16
    host: Host = HOSTS["none"]
    adapter_pages: int = 1
    # Results by (tokens, sampled): steps of the same size recur.
    _dense: dict[tuple[int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def declare(
        cls, model: ModelConfig, config: EngineConfig, gpu: str, dtype: str = "float16",
        host: str = "none", attention_knob: float = 1.0, adapter_pages: int = 1,
    ) -> "StepCost":  # fmt: skip
        """The cost of serving `model` under `config`, with one GPU for each shard.

        Raises ValueError for a GPU or a host's name that is unknown, for a policy without a layout,
        for a dtype that has not 16 bits, and for a number of GPUs whose all-reduces are not known.
        """
        if jnp.dtype(dtype).itemsize != ITEMSIZE:
            raise ValueError(f"simulated GPUs compute in 16 bits: dtype float16, not {dtype}")
        sharded = ShardedModel.split(model, config.tensor_parallel, dtype)
        make = policy_of(config.policy).layout
        if make is None:
            raise ValueError(f"policy {config.policy!r} has no layout: it cannot be simulated")
        if host not in HOSTS:
            raise ValueError(f"host {host!r} is none of {', '.join(HOSTS)}")
        costs = CostModel(machine(gpu), attention_knob=attention_knob)
        costs.all_reduce_s(0, config.tensor_parallel)
        bits = 8 if config.quantization == "w8a8" else 16
        return cls(costs, sharded, make(config, sharded), bits, HOSTS[host], adapter_pages)

    @property
    def adapter_page_s(self) -> float:
        """Seconds to copy a page of an adapter's ranks over PCIe: an array of A and one of B for
        each projection (Punica §5.2)."""
        copies = 2 * (6 + (not self.model.shard.learned_positions))
        return self.costs.copies_s(copies, adapter_page_bytes(self.model))

    def __call__(self, inputs: StepInputs) -> float:
        S = inputs.lengths.shape[0]
        new = np.bincount(np.minimum(inputs.token_rows, S), minlength=S)[:S]
        rows = np.flatnonzero((new > 0) & (inputs.lengths > 0))
        new = new[rows]
        seconds = self.dense_s(int(new.sum()), int((np.asarray(inputs.samples) != 0).sum()))
        seconds += float(self.attention_s(np.asarray(inputs.lengths)[rows], new))
        if inputs.num_segments.size and (count := int(inputs.num_segments[0])):
            adapters = len(np.unique(inputs.segment_slots[:count]))
            tokens = int((inputs.segment_ends - inputs.segment_starts)[:count].sum())
            seconds += self.adapters_s(adapters, tokens)
        return max(seconds + self.host.added_s, self.host.least_s)

    def decodes_s(self, contexts: np.ndarray, adapters: np.ndarray) -> np.ndarray:
        """Seconds [k] of k steps that each compute one token of every row.

        contexts: [k, n] tokens of each row after the step.
        adapters: [n] adapter slots, -1 for none.
        """
        rows = contexts.shape[1]
        seconds = self.dense_s(rows, rows) + self.attention_s(contexts, np.ones_like(contexts))
        if tokens := int((adapters >= 0).sum()):
            seconds = seconds + self.adapters_s(len(np.unique(adapters[adapters >= 0])), tokens)
        return np.maximum(seconds + self.host.added_s, self.host.least_s)

    def attention_s(self, contexts: np.ndarray, new_tokens: np.ndarray, held=None):
        """Seconds of attention in all layers. Arguments are those of `Layout.work`; the result has
        their leading axes."""
        parts = self.layout.work(contexts, new_tokens, held).values()
        layer = sum(self.costs.part_s(part) for part in parts if np.any(part.bytes))
        return self.model.shard.num_layers * layer

    def dense_s(self, tokens: int, sampled: int) -> float:
        """Seconds of what does not depend on the cache: products, pointwise ops, all-reduces."""
        if (tokens, sampled) not in self._dense:
            self._dense[tokens, sampled] = self._dense_s(tokens, sampled) if tokens else 0.0
        return self._dense[tokens, sampled]

    def _dense_s(self, tokens: int, sampled: int) -> float:
        ops, num_gpus = layer_ops(self.model, tokens, self.bits).values(), self.model.num_shards
        layer = sum(self.costs.op_s(op) for op in ops)
        hidden = tokens * self.model.shard.hidden_size * ITEMSIZE
        layer += 2 * self.costs.all_reduce_s(hidden, num_gpus)
        head = sum(self.costs.op_s(op) for op in head_ops(self.model, tokens, sampled).values())
        return float(self.model.shard.num_layers * layer + head)

    def adapters_s(self, adapters: int, tokens: int) -> float:
        """Seconds of SGMV in all layers: `adapters` different adapters, on `tokens` tokens."""
        pages = adapters * self.adapter_pages
        layer = adapters_s(self.costs, self.model, pages, tokens)
        return self.model.shard.num_layers * layer
