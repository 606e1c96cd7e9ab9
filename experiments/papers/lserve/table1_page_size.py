"""Decode attention by page size (LServe §3.5.1, Table 1).

    python -m experiments.papers.lserve.table1_page_size

The paper's table times QServe's kernel, which reads block tables while it multiplies. The kernels
here copy pages asynchronously, so that small pages cost issue slots only. Times are predicted from
the kernels compiled for an A100 and an H200, for 64 sequences of 4,096 tokens of Llama-3-8B with 16
bits. On a GPU times are also measured, with 4 bits and batch 32, as in the table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib.typed_flags import Flags, flag
from experiments.papers import kernels
from experiments.papers.drawing import grouped_bars
from experiments.study import Setting, Study, Values
from pallas_kernels.paged_attention import specs
from pallas_kernels.specs import HEADS, Attention

OP, KERNEL = "paged_attention", "paged_decode"
SPECS = {16: "llama-3-8b", 32: "llama-3-8b-page32", 64: "llama-3-8b-page64",
         128: "llama-3-8b-page128"}  # fmt: skip
PAPER = {
    16: 1.52,
    32: 1.25,
    64: 1.01,
    128: 1.0,
}  # time over the largest page's, maximum over lengths
TARGETS = ("a100", "h200")
BATCH, BITS = 32, 4


@dataclass(frozen=True)
class PageFlags(Flags):
    contexts: tuple[int, ...] = flag((512, 1024, 2048, 4096, 8192), "tokens", least=128)


@dataclass(frozen=True)
class Row:
    """A call of decode attention.

    gpu: GPU of the prediction; empty for a measurement on this machine's GPU.
    least_us, most_us: bounds of the predicted time.
    us: measured time; None in a prediction.
    """

    gpu: str
    page_size: int
    context: int
    least_us: float | None
    most_us: float | None
    us: float | None


def measure(flags: PageFlags, _) -> Iterator[Row]:
    for target in TARGETS:
        for page, spec in SPECS.items():
            us = kernels.compiled(target, OP, spec, KERNEL).us
            yield Row(target, page, 4096, *us, None)
    if not kernels.has_gpu():
        return
    for context in sorted(set(flags.contexts)):
        for page in SPECS:
            shapes = Attention(HEADS["llama-3-8b"], BATCH, context, page_size=page, kv_bits=BITS)
            name, call = f"{context}, {page}", specs.decode(shapes)
            measured = kernels.measured_us("quantised_paged_attention", name, call)
            yield Row("", page, context, None, None, measured)


def slowdown(rows: Sequence[Row], gpu: str, page: int) -> float | None:
    """Time with this page size over time with the largest page size; maximum over the contexts.

    gpu: GPU of the prediction; empty for measured times.
    """
    times = {(row.page_size, row.context): row.most_us if gpu else row.us
             for row in rows if row.gpu == gpu}  # fmt: skip
    found = []
    for (size, context), us in times.items():
        largest = times.get((max(SPECS), context))
        if size == page and us and largest:
            found.append(us / largest)
    return max(found, default=None)


def values(_: PageFlags, rows: Sequence[Row]) -> Values:
    numbers = {f"slowdown_{page}": slowdown(rows, "", page) for page in SPECS}
    for gpu in TARGETS:
        numbers |= {f"predicted_slowdown_{page}_{gpu}": slowdown(rows, gpu, page) for page in SPECS}
    return numbers


def draw(_: PageFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes, sizes = figure.subplots(), list(SPECS)
    series: dict[str, list[float | None]] = {"QServe, A100, the paper": [PAPER[s] for s in sizes]}
    for gpu in TARGETS:
        name = f"predicted, {gpu.upper()}, 16 bits"
        series[name] = [slowdown(rows, gpu, size) for size in sizes]
    series["measured here, 4 bits"] = [slowdown(rows, "", size) for size in sizes]
    drawn = {name: [y for y in ys if y] for name, ys in series.items() if all(ys)}
    grouped_bars(axes, list(map(str, sizes)), drawn, "time over that of pages of 128", "{:.2f}")
    axes.set(xlabel="page size (tokens)", ylim=(0, 1.8))


STUDY = Study(
    __file__,
    title="Decode attention by page size (LServe Table 1)",
    kind="not run",
    claim="pages of 16 take up to 1.52 times as long as pages of 128, and pages of 64 as long",
    rule="measured: pages of 16 at least 1.3 times as slow as of 128, of 64 at most 1.1 times",
    holds=lambda v: v["slowdown_16"] >= 1.3 and v["slowdown_64"] <= 1.1,
    setting=Setting(
        "Llama-3-8B's attention; predicted for an A100 and an H200 from compiled kernels, 16 bits, "
        "64 sequences of 4,096 tokens; measured with 4 bits and batch 32",
        "the paper times QServe's whole step; kernels here hide the look-up of pages",
        "paper",
    ),
    flags=PageFlags,
    measure=measure,
    values=values,
    paper={f"slowdown_{page}": slow for page, slow in PAPER.items()}
    | {f"predicted_slowdown_{page}_{gpu}": slow for page, slow in PAPER.items() for gpu in TARGETS},
    draw=draw,
    needs=kernels.NEEDS,
    command="python -m experiments.papers.lserve.table1_page_size",
    size=(6.4, 4.2),
)

if __name__ == "__main__":
    STUDY.run()
