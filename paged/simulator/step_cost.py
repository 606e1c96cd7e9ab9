"""The clock of simulated devices: seconds of a step on GPUs with the rates of data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.moves import Moves, Pool
from paged.kv_cache.policy import ShardedModel
from paged.kv_cache.work import NOTHING, Layout
from paged.simulator.cost_model import CostModel
from paged.simulator.layer import ITEMSIZE, adapter_page_bytes, adapters_s, head_ops, layer_ops
from paged.simulator.machines import machine
from paged.step_inputs import StepInputs


@dataclass(frozen=True)
class Host:
    """The host's part of a step.

    added_s: seconds of each step in which the device waits for the host.
    each_sequence_s: seconds that each sequence of the step adds to `added_s`.
    each_gpu: every GPU after the first adds this share of both times.
    """

    added_s: float = 0.0
    each_sequence_s: float = 0.0
    each_gpu: float = 0.0

    def step_s(self, device_s, sequences: int, gpus: int):
        """Seconds of a step that takes `device_s` on the device, or of several steps [k]."""
        added_s = self.added_s + self.each_sequence_s * sequences
        return device_s + added_s * (1 + (gpus - 1) * self.each_gpu)

    def times(self, knob: float) -> "Host":
        """The same host with both times multiplied by `knob`."""
        each_s = knob * self.each_sequence_s
        return replace(self, added_s=knob * self.added_s, each_sequence_s=each_s)


HOSTS = {
    # The host's work is done while the device computes the step before; it takes 0.2 ms for 256
    # sequences (experiments/bench/host.py on two CPU cores), less than any step here.
    "none": Host(),
    # A decode step takes about 30 ms (Punica §5.2); assumed: the 7B model in batches of 32 on an
    # A100-80, which the paper's text generation measures (§7.2).
    # This cost model explains 14.7 ms (all rows with one adapter) to 16.2 ms (an adapter for each
    # row). each_gpu is vLLM's, because Punica uses vLLM's parallel scheme (§7.2).
    "punica": Host(added_s=14.5e-3, each_gpu=0.157),
    # vLLM of 2023, and the baselines that the vLLM paper built on it. The times are of vLLM's
    # backbone in Punica's Figs. 11 and 12. No figure of the vLLM paper is used. Batches have 32
    # rows, with 210 cached tokens a row and a prompt of 161 tokens in a third of the steps:
    #   7B, A100-80:     1,140 tokens/s = 28.1 ms a step; cost model 14.6 ms, left 13.4 ms
    #   13B, A100-80:      789 tokens/s = 40.6 ms a step; cost model 26.5 ms, left 14.0 ms
    #   70B, 8 A100-40:    457 tokens/s = 70.0 ms a step; cost model 41.3 ms, left 28.7 ms
    # In batches of one the 70B model's 21 tokens/s leave 12.2 ms. So 57 % of the 28.7 ms grow with
    # the batch. With one GPU, too, 57 % are assumed to grow with the batch.
    "vllm": Host(added_s=5.7e-3, each_sequence_s=0.25e-3, each_gpu=0.157),
}


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of `model`, with one shard on each GPU.

    layout: the KV policy's layout.
    pools: the KV policy's pools, by name.
    bits: bits of the operands of products, 8 for W8A8 and W4A8.
    weight_bits: bits of weights in memory, if fewer: 4 for W4A8.
    adapter_pages: adapter slot → rank pages of its adapter; 1 for slots without an entry.

    Sampling, and gathering logits from several GPUs, take no time.
    """

    costs: CostModel
    model: ShardedModel
    layout: Layout
    pools: Mapping[str, Pool]
    bits: int = 16
    weight_bits: int = 16
    host: Host = HOSTS["none"]
    adapter_pages: Mapping[int, int] = field(default_factory=dict)
    # Results of `dense_s` and `adapters_s`: steps of the same size recur.
    _dense: dict[tuple[int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _adapters: dict[tuple[int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def declare(
        cls, model: ModelConfig, config: EngineConfig, gpu: str, dtype: str = "float16",
        host: str = "none", attention_knob: float = 1.0, host_knob: float = 1.0,
    ) -> "StepCost":  # fmt: skip
        """The cost of serving `model` under `config`, with one GPU for each shard.

        attention_knob, host_knob: factors on the time of attention and of the host.
        Raises ValueError for an unknown GPU or host, for a policy without a layout, for a dtype
        without 16 bits, and for a number of GPUs that `cost_model.ALL_REDUCE` lacks.
        """
        if jnp.dtype(dtype).itemsize != ITEMSIZE:
            raise ValueError(f"simulated GPUs compute in 16 bits: dtype float16, not {dtype}")
        sharded = ShardedModel.split(model, config.tensor_parallel, dtype)
        policy = policy_of(config.policy)
        if policy.layout is None:
            raise ValueError(f"policy {config.policy!r} has no layout: it cannot be simulated")
        if host not in HOSTS:
            raise ValueError(
                f"unknown host {host!r}: it must be one of {', '.join(map(repr, HOSTS))}"
            )
        costs = CostModel(machine(gpu), attention_knob=attention_knob)
        costs.all_reduce_s(0, config.tensor_parallel)
        bits = 16 if config.quantization == "none" else 8
        pools = {pool.name: pool for pool in policy.sizes(config, sharded).pools}
        layout = policy.layout(config, sharded)
        weight_bits = 4 if config.quantization == "w4a8" else bits
        return cls(costs, sharded, layout, pools, bits, weight_bits, HOSTS[host].times(host_knob))

    def with_adapters(self, pages: Mapping[int, int]) -> "StepCost":
        """The same cost with other `adapter_pages`."""
        return replace(self, adapter_pages=pages)

    @property
    def without_host(self) -> "StepCost":
        """The same cost without host time."""
        return replace(self, host=HOSTS["none"])

    @property
    def adapter_page_s(self) -> float:
        """Seconds to copy a rank page of an adapter over PCIe (Punica §5.2): for each projection a
        copy of A and one of B."""
        copies = 2 * (6 + (not self.model.shard.learned_positions))
        return self.costs.copies_s(copies, adapter_page_bytes(self.model))

    def __call__(self, inputs: StepInputs) -> float:
        return self.holding_s(inputs, None)

    def holding_s(self, inputs: StepInputs, held: np.ndarray | None) -> float:
        """Seconds of a step. held: [n, I] tokens that each of the n computed rows keeps in each
        precision (`kept` of `Layout.work`)."""
        S = inputs.lengths.shape[0]
        new = np.bincount(np.minimum(inputs.token_rows, S), minlength=S)[:S]
        rows = ((new > 0) & (inputs.lengths > 0)).nonzero()[0]
        new = new[rows]
        sampled = int(np.count_nonzero(np.asarray(inputs.samples)))
        seconds = self.dense_s(int(new.sum()), sampled)
        seconds += float(self.attention_s(np.asarray(inputs.lengths)[rows], new, held))
        if inputs.num_segments.size and (count := int(inputs.num_segments[0])):
            tokens = int((inputs.segment_ends - inputs.segment_starts)[:count].sum())
            seconds += self.adapters_s(np.asarray(inputs.segment_slots[:count]), tokens)
        return float(self.host.step_s(seconds, len(rows), self.model.num_shards))

    def decodes_s(
        self, contexts: np.ndarray, adapters: np.ndarray, held: np.ndarray | None = None
    ) -> np.ndarray:
        """Seconds [k] of k steps that each compute one token of every row.

        contexts: [k, n] tokens of each row after the step.
        adapters: [n] adapter slots, -1 for none.
        held: [k, n, I] tokens that each row keeps in each precision (`kept` of `Layout.work`).
        """
        rows = contexts.shape[1]
        attention_s = self.attention_s(contexts, np.ones(contexts.shape, np.int64), held)
        seconds = self.dense_s(rows, rows) + attention_s
        if tokens := int((adapters >= 0).sum()):
            seconds = seconds + self.adapters_s(adapters[adapters >= 0], tokens)
        return self.host.step_s(seconds, rows, self.model.num_shards)

    def moves_s(self, moves: Moves) -> float:
        """Seconds of the moves before a step. Each shard swaps its share over its own PCIe link.
        All block copies are one launch. Moves of slots' state take no time here. If a fork copies
        units (`SimulatedDevice.copied`), the executor adds the time of the copies."""
        swapped = [*moves.exports.items(), *moves.imports.items()]
        seconds = sum(self._swap_s(self.pools[pool], len(pairs)) for pool, pairs in swapped)
        return seconds + self.copies_s({pool: len(pairs) for pool, pairs in moves.copies.items()})

    def copies_s(self, units: Mapping[str, int]) -> float:
        """Seconds of one launch that copies this many units of each pool (vLLM §5.1), which reads
        and writes device memory."""
        if not any(units.values()):
            return 0.0
        bytes_ = sum(self.pools[pool].unit_bytes * count for pool, count in units.items())
        return self.costs.launch_s(2 * bytes_ / self.model.num_shards)

    def _swap_s(self, pool: Pool, units: int) -> float:
        """Seconds to swap `units` units. If `Layout.swap_copies` is 0, units move in padded calls
        of `units_per_call` units. For each call, a launch gathers or scatters the units in one
        array, and one copy moves the array over PCIe."""
        unit_bytes = pool.unit_bytes / self.model.num_shards
        if of_unit := self.layout.swap_copies:
            return self.costs.copies_s(of_unit * units, units * unit_bytes)
        calls, moved = -(-units // pool.units_per_call), pool.units_per_call * unit_bytes
        return calls * (self.costs.launch_s(2 * moved) + self.costs.copies_s(1, moved))

    def attention_s(self, contexts: np.ndarray, new_tokens: np.ndarray, held=None):
        """Seconds of attention in all layers. The arguments, and the result's leading axes, are as
        in `Layout.work`."""
        parts = self.layout.work(contexts, new_tokens, held).values()
        layer = sum(self.costs.part_s(part) for part in parts if part is not NOTHING)
        return self.model.shard.num_layers * layer

    def dense_s(self, tokens: int, sampled: int) -> float:
        """Seconds of all work outside attention: products, pointwise ops, all-reduces."""
        if (tokens, sampled) not in self._dense:
            self._dense[tokens, sampled] = self._dense_s(tokens, sampled) if tokens else 0.0
        return self._dense[tokens, sampled]

    def _dense_s(self, tokens: int, sampled: int) -> float:
        num_gpus = self.model.num_shards
        ops = layer_ops(self.model, tokens, self.bits, self.weight_bits).values()
        layer = sum(self.costs.op_s(op) for op in ops)
        hidden = tokens * self.model.shard.hidden_size * ITEMSIZE
        layer += 2 * self.costs.all_reduce_s(hidden, num_gpus)
        head = sum(self.costs.op_s(op) for op in head_ops(self.model, tokens, sampled).values())
        return float(self.model.shard.num_layers * layer + head)

    def adapters_s(self, slots: np.ndarray, tokens: int) -> float:
        """Seconds of SGMV in all layers on `tokens` tokens; an adapter in `slots` is read once."""
        pages = sum(self.adapter_pages.get(slot, 1) for slot in set(slots.tolist()))
        if (pages, tokens) not in self._adapters:
            layer = adapters_s(self.costs, self.model, pages, tokens)
            self._adapters[pages, tokens] = self.model.shard.num_layers * layer
        return self._adapters[pages, tokens]
