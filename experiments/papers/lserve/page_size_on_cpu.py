"""The dense policy's decode attention by page size, on a CPU (LServe §3.5.1).

python -m experiments.papers.lserve.page_size_on_cpu

A decode step's attention of --batch sequences, over pages of 16 to 128 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from experiments.lib.typed_flags import flag
from experiments.papers.lserve import layer_times
from experiments.papers.lserve.layer import (
    LAYER,
    PAGE_SIZE,
    Layer,
    config_of,
    systems,
)
from experiments.papers.lserve.layer_times import (
    LAYER_SETTING,
    LayerFlags,
    Times,
)
from experiments.study import Setting, Study, Values
from models.config import ModelConfig
from pallas_kernels.specs import Cost

PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class PageFlags(LayerFlags):
    contexts: tuple[int, ...] = flag((512, 2048, 8192), "tokens", least=PAGE_SIZE)
    batch: int = flag(8, "sequences of a step", least=1)


def measure(flags: PageFlags, _) -> "list[PageRow]":
    times = Times.of(flags)
    return page_size(flags.ascending, PAGE_SIZES, flags.batch, times, LAYER, flags.seed)


@dataclass(frozen=True)
class PageRow:
    """A decode step's attention of a batch, by the dense policy, with pages of a size."""

    system: str
    page_size: int
    context: int
    ms: float
    floor_ms: float


def page_size(
    contexts: Sequence[int], sizes: Sequence[int], batch: int, times: Times, model: ModelConfig,
    seed: int,
) -> list[PageRow]:  # fmt: skip
    """Table 1, of one layer's attention."""
    dense, longest = systems(model)["dense"], max(contexts) + 1
    layers = {
        size: Layer(config_of(dense, longest, batch=batch, page_size=size), model, seed)
        for size in sizes
    }
    rows = []
    for context in contexts:
        ms = times.medians_ms(f"pages {context}", {
            str(size): partial(layer.run, layer.decodes(context, 1))
            for size, layer in layers.items()
        })  # fmt: skip
        for size, layer in layers.items():
            cost = layer.reads.decode(context + 1)
            floor_ms = times.floor_ms(Cost(batch * cost.bytes, batch * cost.flops))
            rows.append(PageRow(f"pages of {size}", size, context, ms[str(size)], floor_ms))
    return rows


def values(_: PageFlags, rows: Sequence[PageRow]) -> Values:
    """The largest slowdown of a page size over the fastest one at the same context."""
    fastest: dict[int, float] = {}
    for row in rows:
        fastest[row.context] = min(row.ms, fastest.get(row.context, row.ms))
    sizes = dict.fromkeys(row.page_size for row in rows)
    return {
        f"slowdown_{s}": max(r.ms / fastest[r.context] for r in rows if r.page_size == s)
        for s in sizes
    }


STUDY = Study(
    __file__,
    title="Decode attention by page size, on a CPU (LServe §3.5.1)",
    kind="measured",
    claim="small pages are slow: pages of 16 take 1.52 times the time of 128, 64 as long",
    rule="pages of 16 at least 1.3 times as slow as the fastest, of 64 at most 1.1 times",
    holds=lambda v: v["slowdown_16"] >= 1.3 and v["slowdown_64"] <= 1.1,
    setting=Setting(
        LAYER_SETTING,
        "the paper times QServe, KV4, batch 32, end to end, on an A100",
        "wrong",
    ),
    flags=PageFlags,
    row=PageRow,
    measure=measure,
    values=values,
    paper={"slowdown_16": 1.52, "slowdown_32": 1.25, "slowdown_64": 1.01, "slowdown_128": 1.0},
    draw=layer_times.draw,
    quick={"contexts": (512,), "rounds": 2},
    minutes=(1, 4),
    size=(6, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
