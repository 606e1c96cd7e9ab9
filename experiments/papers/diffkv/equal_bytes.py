"""Accuracy over bytes held and bytes read: policies and their compositions on the same prompts.

    python -m experiments.papers.diffkv.equal_bytes --model=judge

Systems are defined by flags and flag files of configs/ (SYSTEMS). Bytes held are the KV bytes of
running sequences. Bytes read are the bytes that attention and page selection read for a generated
token, computed from each policy's layout. Both are shares of the bytes of dense 16-bit pages. Page
selection over mixed precision is compared with the two policies that it combines, DiffKV and
LServe.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import accuracy
from experiments.accuracy import AccuracyFlags, Row
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import systems
from experiments.study import Values
from paged.config import EngineConfig

TASKS = ("needle", "multikey", "values", "chain", "cot", "cot_32")
SELECTED, PARENTS = "diffkv_selected", ("diffkv", "lserve")
SLACK = 2.0  # points that the combination may lose to DiffKV or LServe
VLLM = "vllm"
NO_COLOURS: Mapping[str, str] = MappingProxyType({})
# Flag files and flags of each system. Gate files are read from the folder of --model.
SYSTEMS: dict[str, tuple[str, ...]] = {
    VLLM: ("--kv_dtype=float16", "--page_size=16"),
    "lserve": ("lserve", "--lserve_gates=duo_gates.json", "--kv_dtype=float16"),
    "quest": ("quest", "--lserve_budget=1024", "--kv_dtype=float16"),
    "duo_attention": ("duo_attention", "--lserve_gates=duo_gates.json", "--kv_dtype=float16"),
    "diffkv": ("diffkv",),
    "diffkv_streaming": ("diffkv", "diffkv_streaming"),
    # Key extremes have 16 bits.
    "diffkv_selected": ("diffkv", "diffkv_selected", "--kv_dtype=float16"),
    "diffkv_streaming_selected": (
        "diffkv", "diffkv_streaming", "diffkv_selected", "--kv_dtype=float16",
    ),
}  # fmt: skip
SYSTEMS |= {n: ("diffkv", n) for n in ("kv_int8", "kv_int4", "h2o", "snapkv", "kivi", "qaq")}
ELSEWHERE = ("kivi", "qaq")  # asked by Table 1, at full the same questions; see joint_frontier.py


@dataclass(frozen=True)
class BytesFlags(AccuracyFlags):
    tasks: tuple[str, ...] = flag(TASKS, "tasks of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((1024, 2048, 4096), "prompt and answer, in tokens")
    num_prompts: int = flag(100, "of each task and context", least=1)
    systems: tuple[str, ...] = flag(
        tuple(name for name in SYSTEMS if name not in ELSEWHERE),
        "names in SYSTEMS of equal_bytes.py; vllm always runs first",
    )
    others: tuple[str, ...] = flag((), "flag files (*.flags) of further systems", none=True)


def config_of(flags: AccuracyFlags, name: str) -> EngineConfig:
    """The configuration of a system of SYSTEMS. Raises ValueError for an unknown name, and for
    gates that the model lacks."""
    if name not in SYSTEMS:
        raise ValueError(f"--systems must be among {', '.join(SYSTEMS)}, not {name!r}")
    return systems.of_flags(flags, SYSTEMS[name])


def make_systems(flags: BytesFlags) -> accuracy.Systems:
    found = {name: config_of(flags, name) for name in dict.fromkeys((VLLM, *flags.systems))}
    return systems.with_others(found, flags, flags.others)


def compare(flags: BytesFlags, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    found = accuracy.pooled(rows)
    return ((SELECTED, parent) for parent in PARENTS if {SELECTED, parent} <= found.keys())


def bytes_of(row: Row) -> tuple[float, float]:
    """Bytes held and bytes read, as shares of 16-bit pages; 1.0 if the policy does not report
    them."""
    held, read = row.kv_memory_fraction, row.kv_read_fraction
    return 1.0 if held is None else held, 1.0 if read is None else read


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names on the Pareto front, by ascending bytes. points: (bytes, score) by name."""
    best, names = float("-inf"), list[str]()
    for name, (_, score) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if score > best:
            best = score
            names.append(name)
    return names


def values(_: BytesFlags, rows: Sequence[Row]) -> Values:
    """Numbers by system.

    right_*: percent of right answers.
    held_*, read_*: bytes held and read, as shares of 16-bit pages.
    behind_*: points below the best system that holds no more bytes.
    points_to_*, points_low_to_*: points of the combination minus those of DiffKV or LServe, and
        the lower bound of the 95 % interval.
    """
    found = accuracy.pooled(rows)
    numbers: dict[str, float | None] = {}
    for name, row in found.items():
        held, read = bytes_of(row)
        best = max(other.score for other in found.values() if bytes_of(other)[0] <= held)
        numbers |= {f"right_{name}": row.score, f"held_{name}": held, f"read_{name}": read}
        numbers[f"behind_{name}"] = best - row.score
    for pair in accuracy.pairs(rows):
        numbers |= {
            f"points_to_{pair.reference}": pair.difference,
            f"points_low_to_{pair.reference}": pair.difference_low,
        }
    return numbers


def draw(_: BytesFlags, figure: Figure, rows: Sequence[Row]) -> None:
    found, panels = accuracy.pooled(rows), figure.subplots(1, 2, sharey=True)
    for i, (axes, word) in enumerate(zip(panels, ("held", "read"), strict=True)):
        points = {name: (bytes_of(row)[i], row.score) for name, row in found.items()}
        draw_panel(axes, points)
        axes.set(xlabel=f"bytes {word}, of 16-bit dense pages", ylabel="wrong answers (%)")
    figure.axes[-1].legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))


def draw_panel(
    axes: Axes, points: Mapping[str, tuple[float, float]], colours: Mapping[str, str] = NO_COLOURS
) -> None:
    """Draws wrong answers on a logarithmic axis, because most systems have few.

    points, colours: (bytes, percent of right answers), and the colour, by system.
    """

    def wrong(name: str) -> tuple[float, float]:
        size, score = points[name]
        return size, max(100 - score, 0.1)

    axes.step(*zip(*map(wrong, front(points))), where="post", color="#999999", linewidth=0.8)
    for number, name in enumerate(points, 1):
        size, missed = wrong(name)
        label, colour = f"{number} {name}", colours.get(name)
        axes.plot(size, missed, "o", markersize=4, label=label, color=colour)
        axes.annotate(str(number), (size, missed), (3, 3), textcoords="offset points", fontsize=7)
    axes.set(yscale="log")
    if not axes.yaxis_inverted():  # panels may share the axis
        axes.invert_yaxis()


STUDY = accuracy.study(
    __file__,
    make_systems,
    title="Accuracy over bytes held and read: policies and compositions",
    claim="selection over mixed precision answers as its parents, DiffKV and LServe, do",
    rule=f"at most {SLACK:g} points fewer right answers than each, over all prompts",
    holds=lambda v: min(v[f"points_to_{parent}"] for parent in PARENTS) >= -SLACK,
    here="the judge model, four tasks at 2,048 tokens; systems by their flag files",
    differs="none of the four papers composes these policies; the papers' models are larger",
    flags=BytesFlags,
    compare=compare,
    values=values,
    draw=draw,
    quick=accuracy.QUICK
    | {
        "tasks": ("multikey", "chain", "values", "cot"),
        "systems": ("lserve", "diffkv", "diffkv_selected", "kv_int4", "h2o", "snapkv"),
    },
    full=accuracy.JUDGE,
    minutes=(2, 130),
    size=(11, 4.5),
)

if __name__ == "__main__":
    STUDY.run()
