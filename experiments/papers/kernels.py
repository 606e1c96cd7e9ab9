"""Times of GPU kernels: predicted from the compiled code, and measured if there is a GPU.

A prediction is the least and the most time of a call on an H200 or A100. The time is the start of
each launch, plus the transfer of the bytes at the compiled loop's share of the bandwidth. The
committed tables of `pallas_kernels.tools.compile` have the shares, launches and assumptions.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.gpu import check
from experiments.lib.shipped import ROOT
from pallas_kernels import backend
from pallas_kernels.specs import Cost, Rates, Spec
from pallas_kernels.tools.predict import LAUNCH_S
from pallas_kernels.tools.targets import TARGETS

FOLDER = ROOT / "experiments/results/compile"
NEEDS = "an H100 or H200"
SETS = 8  # copies of a call's inputs, used in turn, so that few bytes are still in the L2 cache


@dataclass(frozen=True)
class Compiled:
    """A compiled call of a kernel.

    reaches: least and most share of a hardware limit at which the loop over tiles runs.
    of: the hardware limit, such as "bandwidth".
    us: microseconds of the whole call, least and most.
    """

    target: str
    launches: int
    reaches: tuple[float, float]
    of: str
    us: tuple[float, float]

    def call_us(self, cost: Cost) -> tuple[float, float]:
        """Least and most microseconds of a call of this kernel that moves `cost.bytes` bytes."""
        assert self.of == "bandwidth"
        rate, starts = TARGETS[self.target].memory_bandwidth, self.launches * LAUNCH_S
        least, most = (1e6 * (cost.bytes / (s * rate) + starts) for s in reversed(self.reaches))
        return least, most


def newest(target: str) -> Path:
    """The committed table of the newest JAX."""
    return sorted(FOLDER.glob(f"kernels_{target}_jax_*.txt"))[-1]


def _tables(target: str) -> list[list[dict[str, str]]]:
    """The rows of each table, by column name. Two spaces or more separate the columns."""
    found: list[list[dict[str, str]]] = []
    header: list[str] = []
    for line in newest(target).read_text().splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if cells[:1] == ["target"]:
            header = cells
            found.append([])
        elif cells[:1] == [target] and len(cells) == len(header):
            found[-1].append(dict(zip(header, cells)))
    return found


def _range(text: str, scale: float = 1.0) -> tuple[float, float]:
    least, most = text.removesuffix("%").split("-")
    return float(least) * scale, float(most) * scale


def compiled(target: str, op: str, spec: str, kernel: str) -> Compiled:
    """A call's entry in the committed tables. Raises KeyError for a call that the tables lack.

    kernel: the call's kernel whose loop over tiles gives the share.
    """
    calls, loops = _tables(target)[:2]
    call = [row for row in calls if (row["op"], row["spec"]) == (op, spec)]
    loop = [r for r in loops if (r["spec"], r["kernel"]) == (spec, kernel) and r["us"] != "-"]
    if not call or not loop:
        raise KeyError(f"{newest(target).name} has no {op} {spec} {kernel}")
    launches, (reaches, of) = int(call[0]["launches"]), loop[0]["reaches"].split(" of ")
    return Compiled(target, launches, _range(reaches, 0.01), of, _range(loop[0]["us"]))


def has_gpu() -> bool:
    return backend.current_gpu() is not None


def measured_us(op: str, name: str, spec: Spec) -> float | None:
    """Median microseconds of a call of the kernel on this machine's GPU; None without a GPU, or
    without a kernel for it."""
    kernel = check.kernel_of(op) if has_gpu() else None
    if kernel is None:
        return None
    return 1e6 * check.time_spec(op, name, spec, kernel, Rates(1.0, 1.0), SETS).seconds


def cost_of(spec: Spec) -> Cost:
    """The cost of a spec, without drawing its KV pools."""
    return spec.cost(spec.drawn_indices())


def peer_us(function, *sets: tuple) -> float | None:
    """Median microseconds of `function` on this machine's GPU; None without a GPU.

    sets: arguments of the function, used in turn.
    """
    if not has_gpu():
        return None
    seconds = check.device_seconds(lambda sets: [function(*each) for each in sets], sets)
    return 1e6 * seconds / len(sets)


def number_of_sets(cost: Cost) -> int:
    """The sets of inputs of `measured_us`, with which a peer is timed on equal terms."""
    return check.number_of_sets(cost, SETS)
