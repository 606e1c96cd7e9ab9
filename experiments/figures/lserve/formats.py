"""What quantisation costs in accuracy, alone and with sparsity (LServe §3.1, §4.2).

python -m experiments.figures.lserve.formats

The bundled model answers the same prompts with keys and values of 16, 8 and 4 bits, where all heads
are dense and read all pages; with products of 8-bit weights and activations (W8A8); and with all of
it at once: 8-bit products, keys and values of --with_bits, half of the KV heads streaming, and a
budget of pages.

Claim (§3.1): quantisation of keys and values is orthogonal to sparsity, so the losses of both add
up and do not multiply. Writes to --output_dir: accuracy.csv, accuracy.png, report.json and
summary.json.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from matplotlib.figure import Figure

from experiments.figures import accuracy
from experiments.figures.accuracy import Row
from experiments.lib.flags import define_float
from experiments.lib.program import Options, Program
from models.hub import BUNDLED

TASKS = ("needle", "multikey", "values", "cot", "cot_32")
SPARSE, QUANTISED, BOTH = "sparse", "quantised", "sparse and quantised"


def systems(options: Options) -> accuracy.Systems:
    longest = accuracy.longest_context(options)
    gates = accuracy.gates_of(options)
    bits = int(options.with_bits)

    def lserve(kv_bits: int, sparse: bool, **fields: Any):
        chosen: dict[str, Any] = {"kv_bits": kv_bits, "budget": longest + 64}
        if sparse:
            chosen |= {
                "gates": gates, "streaming_share": options.share, "budget": options.budget,
            }  # fmt: skip
        return accuracy.config_of(options, policy="lserve", policy_options=chosen, **fields)

    return {
        "dense": accuracy.config_of(options),
        "W8A8": accuracy.config_of(options, quantization="w8a8"),
        "KV8": lserve(8, False),
        "KV4": lserve(4, False),
        SPARSE: lserve(16, True),
        QUANTISED: lserve(bits, False, quantization="w8a8"),
        BOTH: lserve(bits, True, quantization="w8a8"),
    }


def conclude(options: Options, rows: Sequence[Row]) -> tuple[str, dict[str, float]]:
    whole = accuracy.pooled(rows)
    numbers = {
        f"difference_{name.replace(' ', '_')}": row.difference for name, row in whole.items()
    }
    added = whole[SPARSE].difference + whole[QUANTISED].difference
    return (
        f"W8A8 and KV{options.with_bits}: {whole[QUANTISED].difference:+.1f} points; sparsity: "
        f"{whole[SPARSE].difference:+.1f}; their sum {added:+.1f}, and both at once "
        f"{whole[BOTH].difference:+.1f}"
    ), numbers | {"difference_sum": added}


def draw(figure: Figure, whole: Mapping[str, Row]) -> None:
    """A bar for each system."""
    panels = figure.subplots(1, len(accuracy.MEASURES), sharey=True)
    for axes, (name, (low, high, label)) in zip(panels, accuracy.MEASURES.items()):
        for place, row in enumerate(whole.values()):
            middle = getattr(row, name)
            errors = [[middle - getattr(row, low)], [getattr(row, high) - middle]]
            axes.barh(place, middle, xerr=errors, color="#4477aa", capsize=3)
        axes.set_yticks(range(len(whole)), list(whole))
        axes.set(xlabel=label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()


def main(options: Options) -> int:
    return accuracy.study(
        options, "lserve_formats", systems,
        lambda figure, whole, _: draw(figure, whole),
        lambda rows, _: conclude(options, rows),
    )  # fmt: skip


def define_flags() -> None:
    accuracy.define_flags(TASKS, ("1024", "2048"), 50)
    flags.DEFINE_string("gates", str(BUNDLED / "duo_gates.json"), "as --lserve_gates")
    define_float("share", 0.25, "of the KV heads that stream, in the sparse systems", 0.0, 1.0)
    flags.DEFINE_integer("budget", 1024, "tokens that a query reads there", lower_bound=1)
    flags.DEFINE_enum("with_bits", "4", ["4", "8"], "of keys and values, beside W8A8")


PROGRAM = Program(main, define_flags, "results/lserve_formats", accuracy.FILES)

if __name__ == "__main__":
    PROGRAM.run()
