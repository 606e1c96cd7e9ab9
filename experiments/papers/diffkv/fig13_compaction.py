"""Page management on the device (DiffKV §5.3, Fig. 13).

    python -m experiments.papers.diffkv.fig13_compaction

Each sequence has Llama-3-8B's 256 heads and 1,024 tokens. The predicted time on an L40 follows from
the kernels of the page manager's compiled program and the bytes that they move. The program is
compiled for this machine: for 32 sequences it has 18 and 6 kernels on a GPU, and 45 and 21 on a
CPU. On a GPU the measured times of the program and of threaded host code decide the claim.
`host_managers` checks that the pages are exact.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from experiments.lib.typed_flags import Flags, flag
from experiments.papers import kernels
from experiments.papers.diffkv import host_managers as managers
from experiments.papers.diffkv.host_managers import HEADS_8B, Case
from experiments.study import Setting, Study, Values
from experiments.timing import Case as Timed
from experiments.timing import medians_ms
from paged.simulator.machines import machine
from pallas_kernels.tools import hlo
from pallas_kernels.tools.predict import CAUTIOUS, LAUNCH_S

GPU = "l40"
PROMPTS, GENERATION = "prompts", "generation"


@dataclass(frozen=True)
class CompactionFlags(Flags):
    sequences: tuple[int, ...] = flag((1, 2, 4, 8, 16, 32), "of 256 heads each", least=1)
    rounds: int = flag(9, "timed runs, on a GPU", least=1)
    seed: int = flag(0, "of all that is drawn", least=0)


@dataclass(frozen=True)
class Row:
    """A phase at one number of sequences.

    kernels, bytes: kernels of the phase's program, and bytes that they move.
    predicted_ms: predicted time on an L40.
    device_ms, host_ms: measured times; None without a GPU.
    exact: whether device and host code hold the same pages.
    """

    phase: str
    sequences: int
    heads: int
    kernels: int
    bytes: int
    predicted_ms: float
    device_ms: float | None
    host_ms: float | None
    exact: bool


def counted(function: Any, *arguments) -> tuple[int, int]:
    """The number of kernels of a jitted function, and the bytes that they read and write."""
    program = hlo.Program(function.lower(*arguments).compile().as_text())
    found = program.kernels()
    moved = [program.traffic(kernel, 2**62) for kernel in found]
    return len(found), sum(each.read + each.written for each in moved)


def times(case: Case, flags: CompactionFlags) -> dict[str, float]:
    """Milliseconds of device and host in each phase; empty without a GPU."""
    if not kernels.has_gpu():
        return {}
    threads, sizes = os.cpu_count() or 1, case.sizes
    tokens, to_high = jnp.asarray(case.tokens), jnp.asarray(case.to_high)
    pages = managers.prompts_on_device(case.device(), case.allocated, tokens, sizes)

    def with_prompts():
        host = case.host(threads)
        managers.prompts_on_host(host, case.allocated, tokens, sizes)
        return host

    cases = {
        f"device {PROMPTS}": Timed(
            lambda p: managers.prompts_on_device(p, case.allocated, tokens, sizes), case.device
        ),
        f"host {PROMPTS}": Timed(
            lambda h: managers.prompts_on_host(h, case.allocated, tokens, sizes),
            partial(case.host, threads),
        ),
        f"device {GENERATION}": Timed(
            lambda p: managers.step_on_device(p, tokens, to_high, sizes),
            lambda: jax.tree.map(jnp.copy, pages),
        ),
        f"host {GENERATION}": Timed(
            lambda h: managers.step_on_host(h, tokens, to_high, sizes), with_prompts
        ),
    }
    return medians_ms(cases, flags.rounds, f"{case.sequences} sequences")


def measure(flags: CompactionFlags, _) -> Iterator[Row]:
    rate = CAUTIOUS.read_share * machine(GPU).bandwidth
    for sequences in sorted(set(flags.sequences)):
        case = Case(sequences, flags.seed)
        tokens, to_high = jnp.asarray(case.tokens), jnp.asarray(case.to_high)
        programs = {
            PROMPTS: counted(
                managers.prompts_on_device, case.device(), case.allocated, tokens, case.sizes
            ),
            GENERATION: counted(
                managers.step_on_device, case.device(), tokens, to_high, case.sizes
            ),
        }
        ms, exact = times(case, flags), managers.is_exact(case, os.cpu_count() or 1)
        for phase, (launches, moved) in programs.items():
            yield Row(
                phase, sequences, sequences * HEADS_8B, launches, moved,
                1e3 * (launches * LAUNCH_S + moved / rate), ms.get(f"device {phase}"),
                ms.get(f"host {phase}"), exact,
            )  # fmt: skip


def values(_: CompactionFlags, rows: Sequence[Row]) -> Values:
    """Numbers at the largest number of sequences.

    exact_heads: the largest number of heads if all rows are exact, otherwise 0.
    """
    numbers: dict[str, float | None] = {}
    for phase in (PROMPTS, GENERATION):
        last = [row for row in rows if row.phase == phase][-1]
        numbers |= {
            f"kernels_{phase}": last.kernels, f"megabytes_{phase}": last.bytes / 1e6,
            f"predicted_ms_{phase}": last.predicted_ms,
            f"over_host_{phase}": (
                last.host_ms / last.device_ms if last.host_ms and last.device_ms else None
            ),
        }  # fmt: skip
    most = max(row.heads for row in rows)
    return numbers | {"exact_heads": most * all(row.exact for row in rows)}


def draw(_: CompactionFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, phase in zip(figure.subplots(1, 2, sharey=True), (PROMPTS, GENERATION)):
        mine = [row for row in rows if row.phase == phase]
        x = [row.sequences for row in mine]
        axes.plot(x, [row.predicted_ms for row in mine], "o:", label="device, L40, predicted")
        for name in ("device_ms", "host_ms"):
            timed = [getattr(row, name) for row in mine]
            if None not in timed:
                axes.plot(x, timed, "o-", label=f"{name[:-3]}, measured")
        axes.set(xscale="log", yscale="log", xlabel="sequences, of 256 heads each")
        axes.set_xticks(x, [str(each) for each in x])
        axes.set_xticks([], minor=True)
        axes.set_title(f"{phase}: {mine[-1].kernels} kernels", loc="left", fontsize="medium")
        axes.legend(frameon=False, fontsize="small")
    figure.axes[0].set(ylabel="ms")


STUDY = Study(
    __file__,
    title="Page management on the device (DiffKV Fig. 13)",
    kind="not run",
    claim="up to three orders of magnitude faster than multi-threaded host code; and exact",
    rule="measured: at least 100 times as fast as host code in generation, and exact",
    holds=lambda v: v["over_host_generation"] >= 100 and v["exact_heads"] > 0,
    setting=Setting(
        "Llama-3-8B's 256 heads a sequence, 1,024 tokens, 1 to 32 sequences; kernels and bytes "
        "counted, time predicted for an L40; exactness checked",
        "kernels are those that XLA makes for the machine that ran it; the paper times an L40 and "
        "its host",
        "paper",
    ),
    flags=CompactionFlags,
    measure=measure,
    values=values,
    draw=draw,
    needs="a GPU",
    command="python -m experiments.papers.diffkv.fig13_compaction",
    quick={"sequences": (1, 8)},
    size=(9, 3.8),
)

if __name__ == "__main__":
    STUDY.run()
