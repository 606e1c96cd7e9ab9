"""The longest context whose keys and values fit beside a model's weights.

python docs/examples/longest_context.py --model=configs/models/llama-3-8b
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib.typed_flags import Flags, flag
from experiments.study import Setting, Study, Values
from models import checkpoint
from models.families import family
from models.params import flatten
from paged.simulator.machines import machine


@dataclass(frozen=True)
class ContextFlags(Flags):
    model: str = flag(
        "configs/models/llama-3-8b", "model with this shape; no weights are read", path=True
    )
    gpus: tuple[str, ...] = flag(("a100-40", "a100-80"), "by data sheet")


@dataclass(frozen=True)
class Row:
    """tokens: length of the longest sequence whose 16-bit keys and values fit on the GPU."""

    gpu: str
    tokens: int


def measure(flags: ContextFlags, _) -> Iterator[Row]:
    config = checkpoint.load_config(flags.model)
    weights = 2 * sum(math.prod(p.shape) for p in flatten(family(config).declare(config)).values())
    token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    for gpu in flags.gpus:
        yield Row(gpu, int((machine(gpu).memory_bytes - weights) // token))


def values(_: ContextFlags, rows: Sequence[Row]) -> Values:
    return {f"tokens_{row.gpu}": row.tokens for row in rows}


def draw(_: ContextFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    axes.barh([row.gpu for row in rows], [row.tokens for row in rows])
    axes.set_xlabel("tokens")


STUDY = Study(
    __file__,
    title="Longest context by GPU",
    kind="counted",
    claim="twice the memory holds more than twice the context, as weights stay",
    rule="tokens on 80 GB over tokens on 40 GB above 2",
    holds=lambda v: v["tokens_a100-80"] > 2 * v["tokens_a100-40"],
    setting=Setting("Llama-3-8B, one sequence", "no paper has this figure", "paper"),
    flags=ContextFlags,
    measure=measure,
    values=values,
    draw=draw,
)

if __name__ == "__main__":
    STUDY.run()
