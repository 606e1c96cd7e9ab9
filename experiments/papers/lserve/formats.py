"""Accuracy lost by quantisation, alone and with sparsity (LServe §3.1, §4.2).

python -m experiments.papers.lserve.formats

The first systems read all pages: with KV elements of --dtype, 8 or 4 bits, or with products of
8-bit weights and activations (W8A8). Three more systems are

    sparse                --share of the KV heads streaming, and a --budget of tokens
    quantised             W8A8, and KV elements of --with_bits
    sparse and quantised  both
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.lserve.gates import BUNDLED_GATES, DIFFERS, gates_of
from experiments.study import Values

TASKS = ("needle", "multikey", "values", "cot", "cot_32")
SPARSE, QUANTISED, BOTH = "sparse", "quantised", "sparse and quantised"


@dataclass(frozen=True)
class FormatFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((1024, 2048), "prompt and answer, in tokens")
    gates: str = flag(BUNDLED_GATES, "as --lserve_gates", path=True)
    share: float = flag(0.25, "share of KV heads that stream in sparse systems", least=0, most=1)
    budget: int = flag(1024, "tokens that a query reads in the sparse systems", least=1)
    with_bits: int = flag(4, "bits of KV elements beside W8A8", choices=(4, 8))


def systems(flags: FormatFlags) -> accuracy.Systems:
    gates = gates_of(flags.model, flags.gates)

    def lserve(kv_bits: int, sparse: bool, **fields: Any):
        chosen: dict[str, Any] = {"kv_bits": kv_bits, "budget": flags.longest + 64}
        if sparse:
            chosen |= {"gates": gates, "streaming_share": flags.share, "budget": flags.budget}
        return accuracy.config_of(flags, policy="lserve", policy_options=chosen, **fields)

    return {
        "dense": accuracy.config_of(flags),
        "W8A8": accuracy.config_of(flags, quantization="w8a8"),
        "KV8": lserve(8, False),
        "KV4": lserve(4, False),
        SPARSE: lserve(16, True),
        QUANTISED: lserve(flags.with_bits, False, quantization="w8a8"),
        BOTH: lserve(flags.with_bits, True, quantization="w8a8"),
    }


def values(_: FormatFlags, rows: Sequence[Row]) -> Values:
    """difference_SYSTEM: points over dense.
    difference_sum: the difference of sparsity plus the difference of quantisation.
    """
    whole = accuracy.pooled(rows)
    numbers = {
        f"difference_{name.replace(' ', '_')}": row.difference for name, row in whole.items()
    }
    return numbers | {"difference_sum": whole[SPARSE].difference + whole[QUANTISED].difference}


def draw(_: FormatFlags, figure: Figure, rows: Sequence[Row]) -> None:
    whole = accuracy.pooled(rows)
    panels = figure.subplots(1, len(accuracy.MEASURES), sharey=True)
    for axes, (name, (low, high, label)) in zip(panels, accuracy.MEASURES.items()):
        for place, row in enumerate(whole.values()):
            middle = getattr(row, name)
            errors = [[middle - getattr(row, low)], [getattr(row, high) - middle]]
            axes.barh(place, middle, xerr=errors, color="#4477aa", capsize=3)
        axes.set_yticks(range(len(whole)), list(whole))
        axes.set(xlabel=label)
    panels[0].invert_yaxis()


STUDY = accuracy.study(
    __file__,
    systems,
    title="Quantisation, alone and with sparsity (LServe §3.1, §4.2)",
    claim="quantisation is orthogonal to sparsity: losses add up",
    rule="both at once lose at most 2 points more than the sum of both",
    holds=lambda v: v["difference_sparse_and_quantised"] >= v["difference_sum"] - 2,
    here="the bundled model, five tasks at 1,024 and 2,048 tokens",
    differs=DIFFERS + "; here nearly all of 16 KV heads need all tokens",
    flags=FormatFlags,
    values=values,
    draw=draw,
    quick=accuracy.QUICK | {"tasks": ("multikey", "values", "cot"), "share": 0.5, "budget": 256},
    minutes=(1.8, 30),
)

if __name__ == "__main__":
    STUDY.run()
