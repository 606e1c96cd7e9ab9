"""The time of a step on simulated GPUs that share a model, with LoRA adapters (Punica §7.2)."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from paged.device.step_inputs import StepInputs
from paged.simulator.executor import RooflineCost
from paged.simulator.roofline import lora_cost
from pallas_kernels.specs import Rates

# Fitted to measured all-reduces among the A100s of one machine: seconds that any takes, and bytes a
# second, by the number of GPUs.
ALL_REDUCE = {2: (46e-6, 172e9), 4: (68e-6, 190e9), 8: (106e-6, 199e9)}
SHORTEST_ALL_REDUCE_S = 40e-6


@dataclass(frozen=True)
class SharedCost:
    """Seconds of a step; weights, heads and adapters are split evenly (Megatron).

    rates: of one GPU, what kernels achieve there. rank: of the adapters. more_s: of each step,
    beside its roofline; lora_more_s: of each step with adapters, beside reading and multiplying
    with them.

    Raises ValueError for a number of GPUs whose all-reduce is not known.
    """

    model: ModelConfig
    rates: Rates
    gpus: int = 1
    dtype: str = "float16"
    rank: int = 16
    more_s: float = 0.0
    lora_more_s: float = 0.0

    def __post_init__(self):
        if self.gpus != 1 and self.gpus not in ALL_REDUCE:
            raise ValueError(f"simulated are 1, 2, 4 or 8 GPUs, not {self.gpus}")

    def __call__(self, inputs: StepInputs) -> float:
        together = Rates(self.gpus * self.rates.bytes_per_s, self.gpus * self.rates.flops_per_s)
        tokens = int((np.asarray(inputs.token_rows) < inputs.lengths.shape[0]).sum())
        seconds = RooflineCost(self.model, together, self.dtype, self.more_s)(inputs)
        seconds += 2 * self.model.num_layers * self._all_reduce_s(tokens)
        if inputs.num_segments.size and (count := int(inputs.num_segments[0])):
            adapters = len(set(inputs.segment_slots[:count].tolist()))
            with_adapter = int((inputs.segment_ends - inputs.segment_starts)[:count].sum())
            cost = lora_cost(self.model, self.rank, adapters, with_adapter, self.dtype)
            seconds += together.floor_s(cost) + self.lora_more_s
        return seconds

    def _all_reduce_s(self, tokens: int) -> float:
        """Of the hidden states of so many tokens."""
        if self.gpus == 1:
            return 0.0
        least_s, bytes_per_s = ALL_REDUCE[self.gpus]
        moved = tokens * self.model.hidden_size * jnp.dtype(self.dtype).itemsize
        share = 2 * (self.gpus - 1) / self.gpus
        return max(SHORTEST_ALL_REDUCE_S, least_s + share * moved / bytes_per_s)
