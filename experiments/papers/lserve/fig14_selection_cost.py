"""One selection of pages beside attention over the selected pages (LServe §5.3, Fig. 14), in
simulated time.

python -m experiments.papers.lserve.fig14_selection_cost

One layer of Llama-3-8B has keys and values of 4 bits and reads 4,096 tokens. Three times are
compared: one selection, a quarter of a selection (the share of each of the 4 tokens that use it),
and a token's attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from experiments.lib.typed_flags import flag
from experiments.papers.lserve import gpu
from experiments.papers.lserve.gpu import DECODE, LSERVE, Row, SimulatedFlags, thousands
from experiments.study import Setting, Study, Values

MODEL = "llama-3-8b"
SYSTEMS = ("dynamic", "lserve")
CONTEXTS = tuple(1024 * n for n in (8, 16, 32, 64, 128, 256))
SHOWN = (65536, 131072)


@dataclass(frozen=True)
class SelectionFlags(SimulatedFlags):
    contexts: tuple[int, ...] = flag(CONTEXTS, "tokens", least=64, most=gpu.LONGEST)


def measure(flags: SelectionFlags, _) -> Iterator[Row]:
    """Rows of one layer, in milliseconds.

    attention_ms: a token's attention without selection.
    ms: a token's attention plus the token's share of a selection.
    selection_ms: a whole selection.
    """
    layers = gpu.model_of(MODEL).num_layers
    for split in (False, True):
        for row in gpu.rows(flags, MODEL, DECODE, SYSTEMS, flags.ascending, split):
            share = row.selection_ms / layers
            attention_ms = row.attention_ms / layers - share
            yield replace(
                row, ms=row.attention_ms / layers, attention_ms=attention_ms,
                selection_ms=LSERVE["reuse"] * share,
            )  # fmt: skip


@gpu.with_knobs("selection_over_attention_lserve_128k", "reused_over_attention_lserve_128k")
def values(rows: Sequence[Row]) -> Values:
    """Numbers by system and length, at the lengths of SHOWN. In a system named `…_split`, kernels
    split a head's tokens over multiprocessors.

    selection_ms_*, attention_ms_*: milliseconds of a selection, and of a token's attention.
    selection_over_attention_*: a selection over a token's attention.
    reused_over_attention_*: a token's share of a selection over the token's attention.
    """
    numbers: dict[str, float | None] = {}
    for row in rows:
        if row.context not in SHOWN:
            continue
        at = f"{row.system.replace(' ', '_')}_{thousands(row.context)}"
        numbers[f"selection_ms_{at}"] = row.selection_ms
        numbers[f"attention_ms_{at}"] = row.attention_ms
        numbers[f"selection_over_attention_{at}"] = row.selection_ms / row.attention_ms
        reused = row.selection_ms / LSERVE["reuse"]
        numbers[f"reused_over_attention_{at}"] = reused / row.attention_ms
    return numbers


STUDY = Study(
    __file__,
    title="A selection of pages beside the attention over it (LServe Fig. 14)",
    kind="simulated",
    claim="at 128k a selection (0.24 ms) takes twice as long as attention over 4,096 tokens "
    "(0.12 ms); reused by 4 tokens, it costs each token half as much as attention",
    rule="at 128k a selection takes at least as long as attention, a quarter of it at most as long",
    holds=lambda v: v["selection_over_attention_lserve_128k"] >= 1
    and v["reused_over_attention_lserve_128k"] <= 1,
    setting=Setting(
        "a layer of Llama-3-8B, one sequence, KV of 4 bits, an A100-80; " + gpu.SETTING,
        "the choice of the best pages by their scores takes no time",
        "paper",
    ),
    flags=SelectionFlags,
    measure=measure,
    values=values,
    paper={
        "selection_ms_lserve_128k": 0.24, "attention_ms_lserve_128k": 0.12,
        "selection_ms_dynamic_128k": 0.24, "attention_ms_dynamic_128k": 0.12,
        "selection_over_attention_lserve_128k": 2.0, "reused_over_attention_lserve_128k": 0.5,
    },
    draw=gpu.draw,
    tolerance=0.25,
    size=(6, 4.2),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
