"""Tokens whose keys and values fit beside the weights (vLLM Table 1), counted.

    python -m experiments.papers.vllm.table1_kv_slots

The table rounds its sizes, and does not define its GB. Slots are counted for GB of 10^9 and of 2^30
bytes. Sizes of weights follow from the models' shapes, in 16 bits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib.typed_flags import Flags
from experiments.papers.drawing import grouped_bars
from experiments.papers.vllm.opt import SERVERS, Server
from experiments.study import Setting, Study, Values
from models.families import family
from models.params import flatten
from paged.simulator.machines import GB, GIB, machine

MODELS = ("13b", "66b", "175b")
WEIGHTS_GB = {"13b": 26, "66b": 132, "175b": 346}
TOLERANCE = 0.02


@dataclass(frozen=True)
class Row:
    """A model's column of the table.

    slots: KV slots if the table's KV memory is in units of 2^30 bytes.
    slots_of_gb: KV slots if it is in units of 10^9 bytes.
    """

    model: str
    gpus: str
    memory_gib: float
    weights_gb: float
    kv_gib: float
    slots: int
    slots_of_gb: int


def row_of(name: str, server: Server) -> Row:
    config = server.config
    parameters = flatten(family(config).declare(config)).values()
    memory = server.gpus * machine(server.gpu).memory_bytes
    return Row(
        name, f"{server.gpus} × {server.gpu}", memory / GIB,
        2 * sum(math.prod(parameter.shape) for parameter in parameters) / GB, server.kv_gib,
        server.kv_slots, server.kv_slots * GB // GIB,
    )  # fmt: skip


def measure(flags: Flags, _) -> Iterator[Row]:
    for name in MODELS:
        yield row_of(name, SERVERS[name])


def values(_: Flags, rows: Sequence[Row]) -> Values:
    found: dict[str, float | None] = {}
    for row in rows:
        found |= {f"slots_{row.model}": row.slots, f"slots_of_gb_{row.model}": row.slots_of_gb}
        found[f"weights_gb_{row.model}"] = row.weights_gb
    return found


PAPER = {f"slots_{name}": SERVERS[name].paper_slots for name in MODELS}
SLOTS = tuple(PAPER)


def holds(found: Mapping[str, float]) -> bool:
    return all(abs(found[name] / PAPER[name] - 1) <= TOLERANCE for name in SLOTS)


def draw(_: Flags, figure: Figure, rows: Sequence[Row]) -> None:
    groups = {
        "counted": [row.slots for row in rows],
        "vLLM Table 1": [SERVERS[row.model].paper_slots for row in rows],
    }
    names = [row.model for row in rows]
    grouped_bars(figure.subplots(), names, groups, "tokens", "{:,.0f}")


STUDY = Study(
    __file__,
    title="KV slots of the servers (vLLM Table 1)",
    kind="counted",
    claim="12, 21 and 264 GB beside the weights hold 15.7, 9.7 and 60.1 thousand tokens",
    rule=f"with GiB, each within {TOLERANCE:.0%}",
    holds=holds,
    setting=Setting("OPT-13B, 66B and 175B, keys and values in 16 bits", "", "paper"),
    flags=Flags,
    measure=measure,
    values=values,
    paper=PAPER | {f"weights_gb_{name}": float(size) for name, size in WEIGHTS_GB.items()},
    draw=draw,
    tolerance=TOLERANCE,
    size=(6, 3.4),
)

if __name__ == "__main__":
    STUDY.run()
