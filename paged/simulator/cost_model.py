"""Seconds of an op on a `Machine`, from data-sheet rates and a few fitted constants.

A product of [m, k] and [k, n] is cut into tiles. Each multiprocessor computes one tile at a time,
so a last wave that is not full leaves multiprocessors idle. Arithmetic and memory traffic overlap,
but not entirely:

    start + (arithmetic^p + traffic^p)^(1/p)
    arithmetic = flops / (compute · peak) · (tiles' flops / (flops · x^small_tiles))^waves
    traffic = bytes / (memory · bandwidth)

where the tiles' FLOPs include padding and idle multiprocessors, and a tile has a share x of the
largest tile's area. p is `overlap`; the other names are fields of `Fitted`.

`python -m experiments.fit_cost_model` fits `FITTED`, and reports its error.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged.simulator.machines import Machine
from pallas_kernels.specs import Cost

# Rows and columns of a product's tiles. A product takes the time of the fastest shape.
TILES = ((128, 256), (128, 128), (64, 128), (64, 64))
LEAST_ROWS = 16  # Tensor cores compute at least 16 rows.


@dataclass(frozen=True)
class Fitted:
    """The constants that are fitted to measured layers.

    Constants of products:
    compute, memory: reached shares of peak FLOPs and bandwidth, with the largest tile.
    start_s: seconds before a product starts.
    waves: exponent of the ratio of computed to useful work. 1: padding, and idle multiprocessors in
        the last wave, cost as much as useful work. 0: they cost nothing.
    overlap: infinite if arithmetic and traffic overlap entirely.
    small_tiles: exponent of a tile's relative size; 0 if small tiles compute as fast as large ones.

    Constants of pointwise ops:
    rows: share of the bandwidth that ops with a thread block per row reach (norms, rotations,
        activations).
    elements: share of the bandwidth that elementwise sums reach; it may exceed 1, because operands
        are partly in the cache.
    pointwise_start_s: seconds before a pointwise op starts.
    """

    compute: float
    memory: float
    start_s: float
    waves: float
    overlap: float
    small_tiles: float
    rows: float
    elements: float
    pointwise_start_s: float


# Fitted to Vidur's profiles (MIT) of Llama-2 7B and 70B on an A100-80GB, tensor parallel 1 to 8,
# 1 to 4,096 tokens, by `python -m experiments.fit_cost_model --gpu=a100-80`.
FITTED = Fitted(
    compute=0.7661, memory=0.8383, start_s=4.496e-6, waves=0.5533, overlap=2.103,
    small_tiles=0.1226, rows=0.5118, elements=1.106, pointwise_start_s=1.913e-6,
)  # fmt: skip


@dataclass(frozen=True)
class Assumed:
    """Constants that are assumed, not measured here. If a change of a constant by ±20 % reverses a
    result, the report of the result must state this.

    attention: share of the bandwidth that all parts of `Layout.work` reach: attention, writes,
        selection, compression (published decode kernels reach .75 to .8).
    attention_compute: share of the peak that prefill attention reaches (published kernels: .45 to
        .55).
    attention_start_s: seconds before each such kernel starts.
    pcie: share of PCIe's bandwidth that copies reach.
    copy_start_s: seconds before each copy starts.
    """

    attention: float = 0.775
    attention_compute: float = 0.5
    attention_start_s: float = 5e-6
    pcie: float = 0.8
    copy_start_s: float = 4e-6


# All-reduces among the A100s of one box (NVLink, 300 GB/s one way), fitted to Vidur's profiles:
# number of GPUs → (seconds beside the transfer, share of the link's bandwidth).
ALL_REDUCE = {2: (46e-6, 172 / 300), 4: (68e-6, 190 / 300), 8: (106e-6, 199 / 300)}


@dataclass(frozen=True)
class Product:
    """The product of [m, k] and [k, n].

    m, k, n: ints or arrays.
    bits: bits of the operands, 16 or 8; outputs have 16.
    weight_bits: bits of [k, n] in memory, if fewer.
    """

    m: Any
    k: Any
    n: Any
    bits: int = 16
    weight_bits: int = 16

    def seconds(self, on: Machine, by: Fitted):
        m, k, n = self.m, self.k, self.n
        peak = on.flops if self.bits == 16 else on.int8_ops
        full = 2.0 * np.maximum(m, LEAST_ROWS) * k * n / (peak * by.compute)
        of_weights = min(self.bits, self.weight_bits)
        moved = (self.bits * 1.0 * m * k + of_weights * 1.0 * k * n) / 8 + 2.0 * m * n
        memory = moved / (on.bandwidth * by.memory)
        largest, times = TILES[0][0] * TILES[0][1], []
        for rows, columns in TILES:
            waves = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) / on.multiprocessors)
            computed = 2.0 * waves * on.multiprocessors * rows * columns * k
            computed /= peak * by.compute * (rows * columns / largest) ** by.small_tiles
            times.append(full * (computed / full) ** by.waves)
        compute, p = np.minimum.reduce(times), by.overlap
        return by.start_s + (compute**p + memory**p) ** (1 / p)


@dataclass(frozen=True)
class Rows:
    """An op with a thread block for each of `rows` rows.

    bytes: bytes that each block reads and writes.
    """

    rows: Any
    bytes: Any

    def seconds(self, on: Machine, by: Fitted):
        at_once = np.maximum(self.rows, on.multiprocessors)
        return by.pointwise_start_s + at_once * self.bytes / (on.bandwidth * by.rows)


@dataclass(frozen=True)
class Elements:
    """An elementwise op. bytes: all bytes that it reads and writes."""

    bytes: Any

    def seconds(self, on: Machine, by: Fitted):
        return by.pointwise_start_s + self.bytes / (on.bandwidth * by.elements)


Op = Product | Rows | Elements


@dataclass(frozen=True)
class CostModel:
    """Seconds of all ops of a step on `machine`, or on several such GPUs of one box.

    attention_knob: factor on the time of all parts of `Layout.work`; 0.8 and 1.2 show how much a
        result depends on their assumed rate.
    """

    machine: Machine
    fitted: Fitted = FITTED
    assumed: Assumed = field(default_factory=Assumed)
    attention_knob: float = 1.0

    def op_s(self, op: Op):
        return op.seconds(self.machine, self.fitted)

    def part_s(self, cost: Cost):
        """Seconds of a part of a layer's attention (`Layout.work`); an array if `cost` has
        arrays."""
        assumed, on = self.assumed, self.machine
        memory = cost.bytes / (on.bandwidth * assumed.attention)
        compute = cost.flops / (on.flops * assumed.attention_compute)
        start = (cost.bytes > 0) * assumed.attention_start_s
        return self.attention_knob * (start + np.maximum(memory, compute))

    def all_reduce_s(self, bytes_: float, gpus: int) -> float:
        """Seconds of an all-reduce of `bytes_` on each of `gpus` GPUs. Raises ValueError for a
        number of GPUs that ALL_REDUCE lacks."""
        if gpus == 1:
            return 0.0
        if gpus not in ALL_REDUCE:
            raise ValueError(f"times of all-reduces are known for 1, 2, 4 and 8 GPUs, not {gpus}")
        least_s, share = ALL_REDUCE[gpus]
        moved = 2 * (gpus - 1) / gpus * bytes_
        return least_s + moved / (share * self.machine.link)

    def copies_s(self, copies: int, bytes_: float) -> float:
        """Seconds of `copies` copies between host and device over PCIe, `bytes_` in all."""
        rate = self.assumed.pcie * self.machine.pcie
        return copies * self.assumed.copy_start_s + bytes_ / rate

    def launch_s(self, bytes_: float) -> float:
        """Seconds of one launch that reads and writes `bytes_` in all, at the products' share of
        the bandwidth: copies within the device's memory, and SGMV over adapters' pages (Punica
        §4)."""
        return self.fitted.start_s + bytes_ / (self.fitted.memory * self.machine.bandwidth)
