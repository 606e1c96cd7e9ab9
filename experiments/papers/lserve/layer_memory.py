"""KV bytes of a decoding sequence in a layer, by what is sparse (LServe §3.2).

python -m experiments.papers.lserve.layer_memory

What the pools of each system hold, statistics included, and beside it the bytes by formula. Nothing
is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib.typed_flags import flag
from experiments.papers.lserve.layer import (
    LAYER,
    PAGE_SIZE,
    config_of,
    decode_bytes,
    systems,
)
from experiments.papers.lserve.layer_times import (
    LayerFlags,
    thousands,
)
from experiments.study import Setting, Study, Values
from models.config import ModelConfig


@dataclass(frozen=True)
class MemoryFlags(LayerFlags):
    contexts: tuple[int, ...] = flag((4096, 16384, 65536), "tokens", least=PAGE_SIZE)


def measure(flags: MemoryFlags, _) -> "list[MemoryRow]":
    return memory(flags.ascending)


@dataclass(frozen=True)
class MemoryRow:
    """KV bytes, statistics included, of one decoding sequence in one layer. of_formula: of the
    tokens that heads keep, in whole pages."""

    system: str
    context: int
    bytes: int
    of_formula: int


def memory(contexts: Sequence[int], model: ModelConfig = LAYER) -> list[MemoryRow]:
    """What the pools of each system hold."""
    rows = []
    for context in contexts:
        for name, system in systems(model).items():
            config = config_of(system, context + 1)
            held = sum(decode_bytes(config, model, context).values())
            rows.append(MemoryRow(name, context, held, _formula(name, config, model, context)))
    return rows


def _formula(name: str, config, model: ModelConfig, context: int) -> int:
    P, K, D = config.page_size, model.num_kv_heads, model.head_dim
    page, pages = 2 * P * D * 4, -(-(context + 1) // P)
    if name == "dense":
        return K * pages * page
    options = config.policy_options
    streams = K // 2 if options.gates else 0
    selects = options.budget < config.max_model_len
    statistics = P // options.logical_page * 2 * D * 4 if selects else 0
    window = min(pages, (options.sink + options.local) // P + 1)
    return (K - streams) * pages * (page + statistics) + streams * window * page


def values(_: MemoryFlags, rows: Sequence[MemoryRow]) -> Values:
    """Bytes over the dense policy's. equal_formula: rows whose bytes are those of the formula."""
    dense = {row.context: row.bytes for row in rows if row.system == "dense"}
    numbers: dict[str, float | None] = {
        f"bytes_over_dense_{row.system}_{thousands(row.context)}": row.bytes / dense[row.context]
        for row in rows
    }
    return numbers | {"equal_formula": sum(r.bytes == r.of_formula for r in rows) / len(rows)}


def draw(_: MemoryFlags, figure: Figure, rows: Sequence[MemoryRow]) -> None:
    axes = figure.subplots()
    for name in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == name]
        axes.plot([r.context for r in mine], [r.bytes for r in mine], "o-", label=name)
    axes.set(xlabel="context", ylabel="bytes of a layer", xscale="log", yscale="log")
    axes.legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="KV bytes of a decoding sequence in a layer (LServe §3.2)",
    kind="counted",
    claim="half of the heads streaming takes half of the dense heads' memory at long contexts",
    rule="at 64k at most 0.55 of the dense policy's bytes, and all bytes as by formula",
    holds=lambda v: v["bytes_over_dense_lserve_64k"] <= 0.55 and v["equal_formula"] == 1,
    setting=Setting("a layer of Llama-3-8B's shape in float32, 4k to 64k tokens", "", "paper"),
    flags=MemoryFlags,
    row=MemoryRow,
    measure=measure,
    values=values,
    draw=draw,
    quick={},
    minutes=(1, 1),
    size=(6, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
