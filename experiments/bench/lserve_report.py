"""What the benchmark of LServe writes: tables, CSVs and plots, the paper's values beside ours."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bench.lserve_engine import Run
from experiments.bench.lserve_layer import LSERVE
from experiments.bench.lserve_sections import POOLING, PRODUCTS, MemoryRow, PageRow, Row
from experiments.lib import run_record

# By the names of summary.json: what must be at least, or for growth at most, so much.
GOALS: dict[str, float | None] = {
    "decode_attention_speedup_16k": 5.0,
    "decode_attention_speedup_64k": 15.0,
    "decode_growth_16k_64k": 1.3,
    "prefill_attention_speedup_16k": None,
    "prefill_over_oracle": 0.80,
    "end_to_end_decode_speedup_16k": None,
}
PAPER = {
    "decode": (
        "Fig. 15, one layer of Llama-2-7B on an A100: static 1.3–1.7×; with dynamic sparsity 30× "
        "at 256k.\nFig. 2, Llama-3-8B: attention takes at least 50 % of the time from 64k on, 75 % "
        "at 128k."
    ),
    "prefill": "§5.3: pooling takes less than 1 ms of a prefill of 17 s at 128k.",
    "kernel": "Fig. 12: 1.3× MInference's kernel at the same sparsity; near the oracle, 1/(1 − r).",
    "selector": "Fig. 14, 128k: a selection 0.24 ms, attention over 4,096 tokens 0.12 ms.",
    "page_size": "Table 1, slowest over fastest: pages of 16 1.52×, 32 1.25×, 64 1.01×, 128 1.00×.",
    "memory": "Half of the heads streaming: half of the dense heads' memory at long contexts.",
    "engine": (
        "Figs. 10, 11: decode 1.5× vLLM on average on Llama-3-8B, prefill up to 2.9×. Fig. 16: "
        "static up to 1.7×, both 7.7× at 256k.\nTable 5, Quest's time over LServe's at 4k, 8k, "
        "16k, 32k: prefill 2.1, 1.7, 1.5, 1.6; decode 1.3, 1.3, 1.4, 1.5."
    ),
}
FILES = tuple(f"{name}.{kind}" for name in PAPER for kind in ("csv", "png"))


def _ms(rows: Sequence[Row], system: str, context: int) -> float | None:
    return next((r.ms for r in rows if (r.system, r.context) == (system, context)), None)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _over_oracle(rows: Sequence[Row], system: str, context: int) -> float | None:
    """Speedup over the dense op, as a share of 1/(1 − r)."""
    kept = next((r.kept for r in rows if (r.system, r.context) == (system, context)), None)
    speedup = _ratio(_ms(rows, "dense", context), _ms(rows, system, context))
    return None if speedup is None or kept is None else speedup * kept


def summary(found: Mapping[str, Sequence[Any]]) -> dict[str, float | None]:
    """The numbers of `GOALS`; None for what was not measured."""
    decode, prefill, engine = (found.get(name, ()) for name in ("decode", "prefill", "engine"))
    speedups = {
        context: _ratio(_ms(decode, "dense", context), _ms(decode, "lserve", context))
        for context in (16384, 65536)
    }
    token_ms = {run.system: run.token_ms for run in engine if run.context == 16384}
    return {
        "decode_attention_speedup_16k": speedups[16384],
        "decode_attention_speedup_64k": speedups[65536],
        "decode_growth_16k_64k": _ratio(_ms(decode, "lserve", 65536), _ms(decode, "lserve", 16384)),
        "prefill_attention_speedup_16k": _ratio(
            _ms(prefill, "dense", 16384), _ms(prefill, "lserve", 16384)
        ),
        "prefill_over_oracle": _over_oracle(prefill, "lserve", 8192),
        "end_to_end_decode_speedup_16k": _ratio(token_ms.get("dense"), token_ms.get("lserve")),
    }


def _goals(numbers: Mapping[str, float | None]) -> str:
    lines = []
    for name, value in numbers.items():
        told, goal = "not measured" if value is None else f"{value:.2f}", GOALS[name]
        sign = "≤" if name == "decode_growth_16k_64k" else "≥"
        lines.append(f"{name:34}{told:>13}" + (f"   (goal {sign} {goal:.2f})" if goal else ""))
    return "\n".join(lines)


def _table(name: str, rows: Sequence[Any]) -> str:
    if name == "page_size":
        return _pages_table(rows)
    if name == "memory":
        return _memory_table(rows)
    if name == "engine":
        return _engine_table(rows)
    has_dense, prefills = any(r.system == "dense" for r in rows), name in ("prefill", "kernel")
    lines = [f"{'context':>8}  {'':16}{'ms':>11}{'floor':>11}{'MB':>10}{'GFLOP':>10}"]
    lines[0] += f"{'× dense':>9}" * has_dense + f"{'1/(1−r)':>9}{'share':>7}" * prefills
    for r in rows:
        line = f"{r.context:8,}  {r.system:16}{r.ms:11,.3f}{r.floor_ms:11,.3f}"
        line += f"{r.bytes / 1e6:10,.1f}{r.flops / 1e9:10,.2f}"
        if has_dense and r.system not in (PRODUCTS, POOLING):
            line += f"{_ratio(_ms(rows, 'dense', r.context), r.ms):9.2f}"
            if prefills:
                line += f"{1 / r.kept:9.2f}{_over_oracle(rows, r.system, r.context):7.2f}"
        lines.append(line)
    shares = {r.context: _attention_share(rows, r.context) for r in rows}
    told = [f"{context:,} {share:.0%}" for context, share in shares.items() if share is not None]
    if told:
        lines.append(f"attention's share of the dense layer: {', '.join(told)}")
    if name == "selector":
        lines.append(_selection_over_attention(rows))
    return "\n".join(lines)


def _selection_over_attention(rows: Sequence[Row]) -> str:
    reuse, told = LSERVE["reuse"], []
    for context in dict.fromkeys(r.context for r in rows):
        over = _ratio(*(_ms(rows, system, context) for system in ("selector", "attention")))
        if over is not None:
            told.append(f"{context:,} {over:.2f} ({over / reuse:.2f})")
    return f"selection over attention (reused by {reuse} tokens): {', '.join(told)}"


def _attention_share(rows: Sequence[Row], context: int) -> float | None:
    """Beside the matrix products, the rest of a layer left out (Fig. 2)."""
    attention, products = (_ms(rows, system, context) for system in ("dense", PRODUCTS))
    if attention is None or products is None:
        return None
    return attention / (attention + products)


def _pages_table(rows: Sequence[PageRow]) -> str:
    sizes, contexts = (sorted({getattr(r, key) for r in rows}) for key in ("page_size", "context"))
    ms = {(r.page_size, r.context): r.ms for r in rows}
    floors = {r.context: r.floor_ms for r in rows}
    fastest = {c: min(ms[size, c] for size in sizes) for c in contexts}
    lines = [f"{'ms at page size':16}" + "".join(f"{size:>9}" for size in sizes) + f"{'floor':>9}"]
    for c in contexts:
        cells = "".join(f"{ms[size, c]:9.2f}" for size in sizes)
        lines.append(f"{c:16,}{cells}{floors[c]:9.2f}")
    slowdowns = [max(ms[size, c] / fastest[c] for c in contexts) for size in sizes]
    lines.append(f"{'max slowdown':16}" + "".join(f"{x:8.2f}×" for x in slowdowns))
    return "\n".join(lines)


def _memory_table(rows: Sequence[MemoryRow]) -> str:
    dense = {r.context: r.bytes for r in rows if r.system == "dense"}
    lines = [f"{'context':>8}  {'':16}{'KV MB a layer':>14}{'of dense':>9}{'by formula':>11}"]
    for r in rows:
        share = r.bytes / dense[r.context]
        lines.append(
            f"{r.context:8,}  {r.system:16}{r.bytes / 1e6:14,.2f}{share:9.3f}"
            f"{r.of_formula / 1e6:11,.2f}"
        )
    return "\n".join(lines)


def _engine_table(rows: Sequence[Run]) -> str:
    dense = {r.context: r for r in rows if r.system == "dense"}
    lines = [
        f"{'context':>8}  {'':10}{'prefill s':>10}{'× dense':>9}{'token ms':>10}{'floor':>9}"
        f"{'× dense':>9}{'KV MB':>9}"
    ]
    for r in rows:
        cells = ["–", "–"]
        if base := dense.get(r.context):
            speedups = base.prefill_s / r.prefill_s, base.token_ms / r.token_ms
            cells = [f"{x:.2f}" for x in speedups]
        lines.append(
            f"{r.context:8,}  {r.system:10}{r.prefill_s:10.2f}{cells[0]:>9}{r.token_ms:10.2f}"
            f"{r.floor_ms:9.2f}{cells[1]:>9}{r.kv_bytes / 1e6:9.1f}"
        )
    return "\n".join(lines)


def _draw(name: str, rows: Sequence[Any], axes: Axes) -> None:
    x, y, label = "context", "ms", "system"
    if name == "page_size":
        x, label = "page_size", "context"
    elif name == "memory":
        y = "bytes"
    elif name == "engine":
        y = "token_ms"
    elif name == "kernel":
        for r in rows:
            speedup = _ratio(_ms(rows, "dense", r.context), r.ms) or 0.0
            axes.plot(1 / r.kept, speedup, "o")
            axes.annotate(r.system, (1 / r.kept, speedup), fontsize="small")
        ends = [1, max(1 / r.kept for r in rows)]
        axes.plot(ends, ends, ":", c="#888888", label="oracle, 1/(1 − r)")
        axes.set(xlabel="1/(1 − r)", ylabel="× dense")
        return
    for value in dict.fromkeys(getattr(r, label) for r in rows):
        mine = [r for r in rows if getattr(r, label) == value]
        (line,) = axes.plot(
            [getattr(r, x) for r in mine], [getattr(r, y) for r in mine], "o-", label=str(value)
        )
        if hasattr(mine[0], "floor_ms"):
            floors = [r.floor_ms for r in mine]
            axes.plot([getattr(r, x) for r in mine], floors, ":", c=line.get_color())
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "), xscale="log", yscale="log")


def _plot(name: str, rows: Sequence[Any], path: Path, footer: str) -> None:
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    _draw(name, rows, axes)
    has_floors = hasattr(rows[0], "floor_ms") and name != "kernel"
    title = name.replace("_", " ") + " (dotted: floor)" * has_floors
    axes.set_title(title, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    run_record.save_figure(figure, path, dpi=130)


def write(folder: Path, name: str, rows: Sequence[Any], footer: str) -> str:
    """A section's CSV and plot; its table, with the paper's values."""
    run_record.write_csv(folder, f"{name}.csv", rows)
    _plot(name, rows, folder / f"{name}.png", footer)
    return f"{name}\n{_table(name, rows)}\npaper: {PAPER[name]}"


def printed(sections: Sequence[str], numbers: Mapping[str, float | None], footer: str) -> str:
    return "\n\n".join([*sections, f"{_goals(numbers)}\n({footer})"])
