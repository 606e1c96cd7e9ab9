"""The prefill's speedup beside 1/(1 - r), of sparsity r on a CPU (LServe §5.3).

python -m experiments.papers.lserve.prefill_kernel_on_cpu

The attention of one prompt, by streaming heads, and by MInference's tables in all heads, whose
making is timed too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from experiments.lib.typed_flags import flag
from experiments.papers.lserve.layer import (
    LAYER,
    PAGE_SIZE,
    lserve,
    streaming,
    systems,
)
from experiments.papers.lserve.layer_times import (
    DIFFERS,
    LAYER_SETTING,
    ChunkFlags,
    Row,
    Times,
    prefill_rows,
)
from experiments.study import Setting, Study, Values
from models.config import ModelConfig

MINFERENCE_BUDGETS = (1024, 2048, 4096)
STREAMING_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class KernelFlags(ChunkFlags):
    contexts: tuple[int, ...] = flag((8192,), "tokens; the longest counts", least=PAGE_SIZE)


def measure(flags: KernelFlags, _) -> list[Row]:
    return kernel(max(flags.contexts), flags.chunk, Times.of(flags), LAYER, flags.seed)


def kernel(
    context: int, chunk: int, times: Times, model: ModelConfig, seed: int,
    shares: Sequence[float] = STREAMING_SHARES, budgets: Sequence[int] = MINFERENCE_BUDGETS,
) -> list[Row]:  # fmt: skip
    """The attention of one prompt at several sparsities: by streaming heads, and by MInference's
    tables in all heads, whose making is timed too (Fig. 12)."""
    listed: dict[str, Mapping[str, Any]] = {"dense": systems(model)["dense"]}
    for share in shares:
        listed[f"streaming {share:.0%}"] = lserve(**streaming(model, share))
    for budget in budgets:
        if budget < context:
            listed[f"minference {budget}"] = lserve(
                minference_from=1, minference_budget=budget, minference_tile=chunk
            )
    return prefill_rows(listed, [context], chunk, times, model, seed, {})


def values(_: KernelFlags, rows: Sequence[Row]) -> Values:
    """Speedup over dense, as a share of 1/(1 − r), by system."""
    dense = next(row.ms for row in rows if row.system == "dense")
    others = [row for row in rows if row.system != "dense"]
    return {f"over_oracle_{r.system.replace(' ', '_')}": dense / r.ms * r.kept for r in others}


def draw(_: KernelFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes, dense = figure.subplots(), next(row.ms for row in rows if row.system == "dense")
    for row in rows:
        axes.plot(1 / row.kept, dense / row.ms, "o")
        axes.annotate(row.system, (1 / row.kept, dense / row.ms), fontsize="small")
    ends = [1, max(1 / row.kept for row in rows)]
    axes.plot(ends, ends, ":", c="#888888", label="oracle, 1/(1 − r)")
    axes.set(xlabel="1/(1 − r)", ylabel="× dense")
    axes.legend(frameon=False)


STUDY = Study(
    __file__,
    title="Prefill attention beside 1/(1 - r), on a CPU (LServe §5.3)",
    kind="measured",
    claim="1.3 times MInference's kernel at the same sparsity; near the oracle, 1/(1 - r)",
    rule="streaming heads at least 0.80 of 1/(1 - r) at every share",
    holds=lambda v: all(x >= 0.8 for name, x in v.items() if "streaming" in name),
    setting=Setting(LAYER_SETTING, DIFFERS, "wrong"),
    flags=KernelFlags,
    row=Row,
    measure=measure,
    values=values,
    draw=draw,
    quick={"contexts": (2048,), "rounds": 2},
    minutes=(1, 6),
    size=(6, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
