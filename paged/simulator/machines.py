"""Simulated GPUs, with the rates of their makers' data sheets."""

from dataclasses import dataclass

GB, TERA, GIB = 10**9, 10**12, 2**30


@dataclass(frozen=True)
class Machine:
    """One GPU. Rates are peaks for dense operands (without sparsity).

    memory_bytes: device memory without its ECC's share.
    bandwidth: bandwidth of device memory, bytes/s.
    flops, int8_ops: operations of tensor cores a second, with 16-bit and 8-bit operands.
    multiprocessors: each runs one tile of a product at a time.
    link: bytes/s one way to the other GPUs of its box: NVLink, or PCIe without NVLink.
    pcie: bytes/s one way to the host.
    """

    memory_bytes: int
    bandwidth: float
    flops: float
    int8_ops: float
    multiprocessors: int
    link: float
    pcie: float


# GDDR6 stores its ECC in a sixteenth of the memory: an L40S of 48 GiB reports 45 GiB, and programs
# see 44.5 GiB. HBM stores ECC beside the data.
GDDR6_48 = 45 * GIB
PCIE_4, PCIE_5 = 32 * GB, 64 * GB  # x16, one way
# NVIDIA's data sheets: A40 (2020), A100 (2021), L40 (2022), L40S (2023), H100 SXM (2023), H200 SXM
# (2024).
MACHINES = {
    "a40": Machine(GDDR6_48, 696 * GB, 149.7 * TERA, 299.3 * TERA, 84, 56.25 * GB, PCIE_4),
    "a100-40": Machine(40 * GIB, 1555 * GB, 312 * TERA, 624 * TERA, 108, 300 * GB, PCIE_4),
    "a100-80": Machine(80 * GIB, 2039 * GB, 312 * TERA, 624 * TERA, 108, 300 * GB, PCIE_4),
    "l40": Machine(GDDR6_48, 864 * GB, 181.05 * TERA, 362 * TERA, 142, PCIE_4, PCIE_4),
    "l40s": Machine(GDDR6_48, 864 * GB, 362.05 * TERA, 733 * TERA, 142, PCIE_4, PCIE_4),
    "h100": Machine(80 * GIB, 3350 * GB, 989.4 * TERA, 1979 * TERA, 132, 450 * GB, PCIE_5),
    "h200": Machine(141 * GB, 4800 * GB, 989.4 * TERA, 1979 * TERA, 132, 450 * GB, PCIE_5),
}


def machine(name: str) -> Machine:
    """The GPU of this name. Raises ValueError for a name that MACHINES lacks."""
    if name not in MACHINES:
        raise ValueError(f"GPU {name!r} is none of {', '.join(MACHINES)}")
    return MACHINES[name]
