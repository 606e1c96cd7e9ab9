"""Latency with recomputation and with swapping, by block size (vLLM §7.3, Fig. 19b), simulated.

    python -m experiments.papers.vllm.fig19b_recovery

OPT-13B serves ShareGPT's lengths near its sustained rate, so that requests are preempted. Preempted
requests resume by recomputation or by swapping in. A swap takes the start of each copy and the
transfer over PCIe, as in fig19a_swap_or_recompute. Of the two effects of the block size in
fig18b_block_size, only partly empty blocks are simulated.

While requests are swapped out no new requests are admitted. In the published code of vLLM's authors
admission resumes when all swapped requests run again. In §4.5 admission resumes when all swapped
requests have ended ('completed'), which leaves much memory idle. Runs that follow the code decide
the claim.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from matplotlib.figure import Figure

from experiments.lib import plots
from experiments.lib.typed_flags import flag
from experiments.papers.vllm import opt
from experiments.papers.vllm.opt import Case, Row
from experiments.papers.vllm.rates import TraceFlags
from experiments.study import Run, Setting, Study, Values

MODES: tuple[Literal["recompute", "swap"], ...] = ("recompute", "swap")
COMPLETED = "completed"
SMALL, MIDDLE, LARGE = (1, 2, 4, 8), (16, 32, 64), (64, 128, 256)
NEAR = 1.2  # largest ratio of the two modes' latencies, either way round, with MIDDLE blocks


@dataclass(frozen=True)
class RecoveryFlags(TraceFlags):
    sizes: tuple[int, ...] = flag(
        tuple(2**i for i in range(9)), "tokens of a block", least=1, most=opt.CONTEXT
    )
    completed: tuple[int, ...] = flag(
        (1, 16, 256), "block sizes run again, with new requests waiting for swapped ones", least=1,
        most=opt.CONTEXT, none=True,
    )  # fmt: skip
    rate: float = flag(2.0, "requests/s", above=0)
    duration_s: float = flag(300.0, "of the arrivals", least=1)


def measure(flags: RecoveryFlags, run: Run) -> Iterator[Row]:
    case = Case(
        "13b", "sharegpt", "vllm", flags.rate, flags.sigma_of("sharegpt"), flags.duration_s,
        flags.seed, flags.host, admit_after_swap="resumed",
    )  # fmt: skip
    for size in sorted(set(flags.sizes)):
        for mode in MODES:
            yield run.once(opt.run, replace(case, block_size=size, preemption_mode=mode))
    for size in sorted({*flags.completed} & {*flags.sizes}):
        words = replace(case, preemption_mode="swap", admit_after_swap="completed")
        yield run.once(opt.run, replace(words, block_size=size))


def by_mode(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Rows by mode (of MODES, or COMPLETED), then by block size."""
    found: dict[str, dict[int, Row]] = {mode: {} for mode in (*MODES, COMPLETED)}
    for row in rows:
        words = row.admit_after_swap == COMPLETED
        found[COMPLETED if words else row.preemption_mode][row.block_size] = row
    return found


def values(_: RecoveryFlags, rows: Sequence[Row]) -> Values:
    """MODE_SIZE_s: normalised latency.
    MODE_over_recompute_SIZE: latency of swap or completed over latency of recompute.
    preemptions_least: least number of preemptions of a run.
    """
    found, numbers = by_mode(rows), dict[str, float | None]()
    for mode, runs in found.items():
        numbers |= {f"{mode}_{size}_s": row.latency_s for size, row in runs.items()}
    for mode in ("swap", COMPLETED):
        for size in sorted(found[mode].keys() & found["recompute"].keys()):
            ratio = found[mode][size].latency_s / found["recompute"][size].latency_s
            numbers[f"{mode}_over_recompute_{size}"] = ratio
    return numbers | {"preemptions_least": min(row.preemptions for row in rows)}


def holds(found: Mapping[str, float]) -> bool:
    def ratios(sizes: Sequence[int]) -> list[float]:
        return [found[f"swap_over_recompute_{size}"] for size in sizes]

    alike = all(1 / NEAR <= ratio <= NEAR for ratio in ratios(MIDDLE))
    return (
        found["preemptions_least"] > 0 and alike and max(ratios(SMALL)) > 1 > min(ratios(LARGE))
        and min(ratios(SMALL)) >= 1
    )  # fmt: skip


def draw(_: RecoveryFlags, figure: Figure, rows: Sequence[Row]) -> None:
    found, (latency, preempted) = by_mode(rows), figure.subplots(1, 2)
    sizes = list(found["swap"])
    for axes, name, label in (
        (latency, "latency_s", "normalised latency (s/token)"),
        (preempted, "preemptions", "preemptions of the run"),
    ):
        curves: dict[str, list[float]] = {
            mode: [getattr(row, name) for row in found[mode].values()] for mode in MODES
        }
        plots.over_block_sizes(axes, sizes, curves, label)


STUDY = Study(
    __file__,
    title="Latency with recomputation and with swapping, by block size (vLLM Fig. 19b)",
    kind="simulated",
    claim="recomputation is better with small blocks, swapping with large ones, and from 16 to 64 "
    "they are alike",
    rule=f"requests are preempted; swapping's latency is no lower with blocks up to 8, lower with "
    f"some of 64 or more, and within {NEAR:g} times with 16 to 64",
    holds=holds,
    setting=Setting(
        f"{opt.setting('13b', 'vllm')}; 2 requests/s for five minutes; new requests wait "
        "until swapped ones run again",
        "the paper says neither its rate nor for how long; lengths are log-normal, with a sigma "
        "calibrated on Fig. 13's Orca (Oracle); §4.5 says that new requests wait until swapped "
        "ones have ended, and by that swapping is slower with every block: 'completed'",
        "reduced",
    ),
    flags=RecoveryFlags,
    measure=measure,
    values=values,
    draw=draw,
    quick={"sizes": (1, 16, 256), "duration_s": 120.0},
    minutes=(0.5, 2),
    size=(10, 3.8),
)

if __name__ == "__main__":
    STUDY.run()
