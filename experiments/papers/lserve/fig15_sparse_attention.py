"""A layer's decode attention by kind of sparsity (LServe §5.4, Fig. 15), in simulated time.

python -m experiments.papers.lserve.fig15_sparse_attention

A token attends in one layer of Llama-2-7B with keys and values of 4 bits. Times include page
selection. The systems have dense heads alone, static sparsity (half of the heads stream), dynamic
sparsity (selected pages of 4,096 tokens), and both. LServe's kernels are parallel over heads only
(§2.2). On 108 multiprocessors half of the 32 heads then take as long as all 32. 'split' rows assume
that a head's tokens are split over multiprocessors. With split heads static sparsity gains more
than in the paper from 32k on.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from experiments.lib.typed_flags import flag
from experiments.papers.lserve import gpu
from experiments.papers.lserve.gpu import DECODE, Row, SimulatedFlags, thousands
from experiments.study import Setting, Study, Values

MODEL = "llama-2-7b"
SYSTEMS = ("qserve", "static", "dynamic", "lserve")
CONTEXTS = tuple(1024 * n for n in (4, 8, 16, 32, 64, 128, 256))


@dataclass(frozen=True)
class LayerFlags(SimulatedFlags):
    contexts: tuple[int, ...] = flag(CONTEXTS, "tokens", least=64, most=gpu.LONGEST)


def measure(flags: LayerFlags, _) -> Iterator[Row]:
    """Times of one layer's attention, without the matrix products, which all systems share."""
    layers = gpu.model_of(MODEL).num_layers
    for split in (False, True):
        for row in gpu.rows(flags, MODEL, DECODE, SYSTEMS, flags.ascending, split):
            ms, selection_ms = row.attention_ms / layers, row.selection_ms / layers
            yield replace(row, ms=ms, attention_ms=ms, selection_ms=selection_ms)


@gpu.with_knobs(
    *(f"{of}{kind}_speedup_256k" for of in ("static", "lserve") for kind in ("", "_split"))
)
def values(rows: Sequence[Row]) -> Values:
    """SYSTEM_speedup_LENGTH, SYSTEM_split_speedup_LENGTH: speedup over dense heads."""
    ms = {(row.system, row.context): row.ms for row in rows}
    numbers: dict[str, float | None] = {}
    for kind in ("", " split"):
        for system, context in itertools.product(SYSTEMS[1:], dict.fromkeys(n for _, n in ms)):
            name = f"{system}{kind.replace(' ', '_')}_speedup_{thousands(context)}"
            numbers[name] = ms["qserve" + kind, context] / ms[system + kind, context]
    return numbers


STUDY = Study(
    __file__,
    title="A layer's decode attention by what is sparse (LServe Fig. 15)",
    kind="simulated",
    claim="static sparsity is 1.3 to 1.7 times as fast; with dynamic sparsity 30 times at 256k",
    rule="static sparsity at least 1.3 times at every length from 16k on; both at least 25 times "
    "at 256k",
    holds=lambda v: (
        v["lserve_speedup_256k"] >= 25
        and all(v[f"static_speedup_{thousands(n)}"] >= 1.3 for n in CONTEXTS[2:])
    ),
    setting=Setting(
        "a layer of Llama-2-7B, one sequence, KV of 4 bits, an A100-80; " + gpu.SETTING,
        "lengths below 16k, where a kernel's start hides what it reads, decide nothing",
        "paper",
    ),
    flags=LayerFlags,
    measure=measure,
    values=values,
    paper={
        f"static{kind}_speedup_{thousands(n)}": (1.3, 1.7)
        for n in CONTEXTS
        for kind in ("", "_split")
    }
    | {"lserve_speedup_256k": 30.0, "lserve_split_speedup_256k": 30.0},
    draw=gpu.draw,
    tolerance=0.15,
    size=(6, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
