"""TOVA (Oren et al. 2024): a KV head holds `budget` tokens of a sequence. A new token takes the
place of the token that its query attends to least.

A policy as a user writes one outside of the tree:
`--policy=tova:TOVA --policy_options={"budget":64}`.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from models.config import ModelConfig
from paged.blocks.block_table import BlockTables
from paged.kv_cache import vllm
from paged.kv_cache.host import Sizes
from paged.kv_cache.policy import CacheConfig, Parts, Policy, ShardedModel
from paged.kv_cache.shared_heads import SharedHeads
from paged.kv_cache.vllm.layout import VLLMLayout

from .device import TovaDevice

__all__ = ["TOVA", "Options"]

# A new token overwrites the place of another token, so sequences never share blocks.
PARTS = Parts("blocks", keeps="prompt")


@dataclass(frozen=True)
class Options:
    budget: int = field(default=1024, metadata={"help": "tokens that a KV head keeps"})

    def __post_init__(self):
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1, not {self.budget}")


def sizes(config: CacheConfig, model: ShardedModel) -> Sizes:
    same = vllm.sizes(config, model)
    budget = min(config.policy_options.budget, config.max_model_len)
    width = -(-budget // config.page_size)
    return replace(same, table_width=width, fits=lambda n, count: same.fits(min(n, budget), count))


class TovaHost(vllm.VLLMHost):
    """The vllm policy's host half, in which no sequence has more blocks than the budget fills."""

    def __init__(self, pool, config: CacheConfig):
        super().__init__(pool, config)
        self._budget = min(config.policy_options.budget, config.max_model_len)
        self.block_tables = BlockTables(
            self.pool, config.max_num_seqs, self._budget, config.page_size
        )

    def fits(self, num_tokens, num_sequences):
        return super().fits(min(num_tokens, self._budget), num_sequences)

    def can_admit(self, sequences, keep_watermark):
        needed = self.watermark_blocks if keep_watermark else 0
        for sequence in sequences:
            needed += self.block_tables.blocks_for(min(len(sequence.tokens), self._budget))
        return self.pool.can_allocate(needed)

    def can_append(self, slots, num_tokens):
        return super().can_append(slots, np.minimum(num_tokens, self._budget))

    def append(self, slots, num_tokens):
        super().append(slots, np.minimum(num_tokens, self._budget))

    def advance(self, number, slots, starts, ends):
        super().advance(number, slots, starts, np.minimum(ends, self._budget))

    def swap_in(self, swapped, sequences):
        super().swap_in(swapped, sequences)
        slots = [sequence.slot for sequence in sequences]
        self._computed[slots] = np.minimum(self._computed[slots], self._budget)


def check(config: CacheConfig, model: ModelConfig | None) -> None:
    vllm.VLLM.check(config, model)
    if model and not model.plain_attention:
        raise ValueError("TOVA serves no models with windows, soft caps or a scale of their own")


def device(config: CacheConfig, model: ShardedModel, implementation: str | None = None):
    same = vllm.device(config, model, implementation)
    budget, shared = config.policy_options.budget, SharedHeads.of(model)
    return TovaDevice(**vars(same), budget=budget, shared=shared)


@dataclass(frozen=True)
class TovaLayout(VLLMLayout):
    """What a sequence holds and reads: at most `budget` tokens in each KV head."""

    budget: int
    page_size: int

    def work(self, contexts, new_tokens, kept=None):
        held = np.where(new_tokens == 1, np.minimum(contexts, self.budget), contexts)
        return super().work(held, new_tokens)

    def stored(self, report, slots, tokens):
        held, heads = np.minimum(tokens, self.budget), self.heads
        places = -(-held // self.page_size) * self.page_size * len(self.windows) * heads.K
        kept = held / tokens
        return places * 2 * heads.D * self.kv_itemsize, np.stack([kept, np.zeros_like(kept)], -1)


def layout(config: CacheConfig, model: ShardedModel) -> TovaLayout:
    same, budget = vllm.layout_of(config, model), config.policy_options.budget
    return TovaLayout(same.heads, same.kv_itemsize, same.windows, budget, config.page_size)


TOVA = Policy(lambda config: PARTS, sizes, TovaHost.declare, device, check, Options, layout=layout)
