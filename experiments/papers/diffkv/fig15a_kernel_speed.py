"""Decode attention by format and length (DiffKV Fig. 15a), in simulated time.

python -m experiments.papers.diffkv.fig15a_kernel_speed

One layer of Llama3-8B on an L40 attends for --batch sequences with all tokens in one format; the
baseline has pages of 16 bits. `Layout.work` gives the bytes of attention: keys, values, scales,
zero points, queries, outputs and scores. The simulated time is a start time and the time of these
bytes at an assumed rate; dequantisation takes no time. --attention_knob is a factor on the whole
time, so it changes no speedup.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from experiments.lib import plots
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import gpu
from experiments.papers.diffkv.gpu import SERVERS, VLLM, SimulatedFlags
from experiments.study import Setting, Study, Values

MODEL = "llama-3-8b"
FORMATS = ("K8V8", "K8V4", "K4V4", "K4V2")
BITS = {"K8V8": 16, "K8V4": 12, "K4V4": 8, "K4V2": 6}  # one element of a key plus one of a value
TOKENS = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class KernelFlags(SimulatedFlags):
    tokens: tuple[int, ...] = flag(TOKENS, "of each sequence", least=1, most=2**16)
    batch: int = flag(8, "sequences", least=1, most=256)


@dataclass(frozen=True)
class Row:
    """us: microseconds of attention and its scores in a layer.
    bytes: bytes read and written.
    """

    format: str
    tokens: int
    us: float
    bytes: int
    speedup: float


def measure(flags: KernelFlags, _) -> Iterator[Row]:
    server, longest = SERVERS[MODEL], max(flags.tokens)
    for tokens in sorted(set(flags.tokens)):
        dense_us = 0.0
        for name in (VLLM, *FORMATS):
            config = gpu.config_of(name, server, flags.gpu, flags.batch, longest)
            cost = gpu.clock_of(flags, server, config)
            contexts = np.full(flags.batch, tokens)
            parts = cost.layout.work(contexts, np.ones_like(contexts))
            read = parts["decode"].bytes + (parts["statistics"].bytes if name != VLLM else 0)
            us = 1e6 * float(cost.costs.part_s(type(parts["decode"])(read)))
            dense_us = dense_us or us
            yield Row(name, tokens, us, int(read), dense_us / us)


def values(_: KernelFlags, rows: Sequence[Row]) -> Values:
    """speedup_FORMAT_TOKENS: speedup over 16 bits.
    of_ideal_FORMAT_TOKENS: the speedup over the ratio of bits.
    """
    numbers: dict[str, float | None] = {}
    for row in rows:
        if row.format != VLLM:
            numbers[f"speedup_{row.format}_{row.tokens}"] = row.speedup
            numbers[f"of_ideal_{row.format}_{row.tokens}"] = row.speedup * BITS[row.format] / 32
    return numbers


def draw(_: KernelFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    plots.lines(axes, rows, "tokens", "speedup", "format", "tokens of a sequence", "× 16 bits")


STUDY = Study(
    __file__,
    title="Decode attention by format and length (DiffKV Fig. 15a)",
    kind="simulated",
    claim="attention becomes nearly as many times faster as pages become smaller, with K8V8 1.7 of "
    "2 times, and more at greater lengths",
    rule="speedup at 4,096 tokens: of K8V8 at least 1.7; of each format above the one at 512, and "
    "at least 0.6 of the bits' ratio",
    holds=lambda v: (
        v["speedup_K8V8_4096"] >= 1.7
        and all(v[f"of_ideal_{name}_4096"] >= 0.6 for name in FORMATS)
        and all(v[f"speedup_{name}_4096"] > v[f"speedup_{name}_512"] for name in FORMATS)
    ),
    setting=Setting(
        "a layer of Llama-3-8B, 8 sequences; " + gpu.SETTING,
        "dequantisation takes no time",
        "paper",
    ),
    flags=KernelFlags,
    measure=measure,
    values=values,
    paper={"speedup_K8V8_4096": 1.7},
    draw=draw,
    size=(6, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
