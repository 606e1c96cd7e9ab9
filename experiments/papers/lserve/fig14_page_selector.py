"""One selection of pages beside the attention over what it gives (LServe §5.4, Fig. 14).

python -m experiments.papers.lserve.fig14_page_selector

Of the dense half of the heads, as ops alone; a selection is reused by 4 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from experiments.lib.typed_flags import flag
from experiments.papers.lserve import layer_times
from experiments.papers.lserve.layer import (
    LAYER,
    LSERVE,
    PAGE_SIZE,
)
from experiments.papers.lserve.layer_times import (
    DIFFERS,
    LAYER_SETTING,
    LayerFlags,
    Row,
    Times,
    ms_of,
    ratio,
    thousands,
)
from experiments.study import Setting, Study, Values
from models.config import ModelConfig
from pallas_kernels.page_selection import select_pages
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.specs import Cost


@dataclass(frozen=True)
class SelectorFlags(LayerFlags):
    contexts: tuple[int, ...] = flag((8192, 16384, 32768, 65536, 131072), "tokens", least=PAGE_SIZE)


def measure(flags: SelectorFlags, _) -> list[Row]:
    return selector(flags.ascending, Times.of(flags), LAYER, flags.seed)


def selector(contexts: Sequence[int], times: Times, model: ModelConfig, seed: int) -> list[Row]:
    """One selection, and the attention over what it gives, of the dense half of the heads, as ops
    alone (Fig. 14)."""
    heads, D, P = model.num_kv_heads // 2, model.head_dim, PAGE_SIZE
    G, logical = model.num_heads // model.num_kv_heads, LSERVE["logical_page"]
    count, C = LSERVE["budget"] // P, P // logical
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (heads, G, D))
    # More than caches hold, as where a whole context lies there.
    k_pages, v_pages = jax.random.normal(keys[1], (2, 8 * heads * count, P, D))
    chosen = jax.random.permutation(keys[2], len(k_pages))[: heads * count].reshape(heads, 1, count)
    lengths = jnp.full((heads, 1), count * P)
    select = jax.jit(partial(select_pages, count=count - 1))
    attend = jax.jit(paged_attention)
    rows = []
    for context in contexts:
        pages = context // P
        ends = jax.random.normal(keys[3], (2, heads * pages, C, D))
        statistics = jnp.concatenate([ends.max(0), ends.min(0)], axis=-1)
        tables = jnp.arange(heads * pages, dtype=jnp.int32).reshape(heads, pages)
        num_pages = jnp.full(heads, pages)
        ms = times.medians_ms(f"selector {context}", {
            "selector": partial(select, q, statistics, tables, num_pages),
            "attention": partial(attend, q, k_pages, v_pages, chosen, lengths),
        })  # fmt: skip
        read = 4 * heads * 2 * D * C * pages
        costs = {
            "selector": Cost(read, 2 * G * read // 4),
            "attention": Cost(4 * heads * 2 * D * count * P, 4 * heads * G * D * count * P),
        }
        rows += [times.row(name, context, ms[name], cost) for name, cost in costs.items()]
    return rows


def values(_: SelectorFlags, rows: Sequence[Row]) -> Values:
    """A selection's time over the attention's, before reuse."""
    return {
        f"selection_over_attention_{thousands(c)}": ratio(
            ms_of(rows, "selector", c), ms_of(rows, "attention", c)
        )
        for c in dict.fromkeys(row.context for row in rows)
    }


STUDY = Study(
    __file__,
    title="A selection of pages beside the attention over it (LServe Fig. 14)",
    kind="measured",
    claim="at 128k a selection takes twice the attention over 4,096 tokens, and with reuse half",
    rule="at 128k, over the 4 tokens that share it, at most the attention's time",
    holds=lambda v: v["selection_over_attention_128k"] <= LSERVE["reuse"],
    setting=Setting(LAYER_SETTING, DIFFERS, "reduced"),
    flags=SelectorFlags,
    row=Row,
    measure=measure,
    values=values,
    paper={"selection_over_attention_128k": 2.0},
    draw=layer_times.draw,
    quick={"contexts": (8192, 16384), "rounds": 2},
    minutes=(1, 4),
    size=(6, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
