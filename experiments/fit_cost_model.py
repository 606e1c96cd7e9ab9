"""Fit the simulator's cost model to measured times of layers, and report its error.

    python -m experiments.fit_cost_model --data=FOLDER --gpu=a100-80
    python -m experiments.fit_cost_model --data=FOLDER --gpu=h100 --fixed

--data: a folder of MODEL-GPU-layer-times.csv, see experiments/lib/layer_times.py. --fixed keeps the
constants of paged/simulator/cost_model.py and computes their error, to test the constants on a GPU
to which they were not fitted. Without --fixed the constants are fitted anew, and printed as lines
NAME=VALUE.

A batch's error is |predicted / measured - 1|. Reported errors are means over all measured batches,
but the fit uses one batch per quarter octave of tokens. A layer's time is the sum of its measured
ops. The report also has the error of a roofline without launch times and waves. The roofline's time
is the longer of reading a layer's weights at 61 % of the bandwidth, and computing its FLOPs at 70 %
of the peak.

Writes to --output_dir: errors.csv (by model, GPUs, op and batch), cost_model.png, report.json,
summary.json (layer_error, product_error: means over all batches; roofline_layer_error).
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy import optimize

from experiments.lib import layer_times, run_record
from experiments.lib.layer_times import LayerTimes
from experiments.lib.program import Program, refusals
from experiments.lib.typed_flags import Flags, Output, flag
from paged.simulator.cost_model import FITTED, Fitted, Op, Product
from paged.simulator.machines import MACHINES, Machine, machine

LAYER = "layer"
RESTARTS, STEPS = 5, 3000  # simplex search, because waves rule out methods with derivatives
ROOFLINE = (0.61, 0.70)
BATCHES = (1, 16, 128, 1024, 2**31)  # bounds of the groups of batches in the report, in tokens


@dataclass(frozen=True)
class FitFlags(Flags):
    data: str = flag("", "a folder of MODEL-GPU-layer-times.csv")
    gpu: str = flag("a100-80", f"GPU of the measured times: {', '.join(MACHINES)}")
    fixed: bool = flag(False, "keep the committed constants, and only compute their error")


@dataclass(frozen=True)
class Error:
    """The error of an op, or of the layer, over a group of batches.

    batch: least tokens of a batch in the group.
    count: number of batches in the group.
    error: mean |predicted / measured - 1|.
    roofline_error: mean |roofline / measured - 1| of the layer; None for an op.
    ratio: median of predicted over measured.
    """

    model: str
    tensor_parallel: int
    op: str
    batch: int
    count: int
    error: float
    roofline_error: float | None
    ratio: float


def fit(measured: Sequence[LayerTimes], on: Machine) -> Fitted:
    """The constants with the least mean |log(predicted / measured)|. Matrix products and pointwise
    ops share no constant and are fitted separately."""
    start = asdict(FITTED)
    thinned = [times.thinned() for times in measured]
    for is_product in (True, False):
        names = [name for name in start if (name in _OF_PRODUCTS) == is_product]
        ops = [
            (op, np.log(times.seconds[name]))
            for times in thinned
            for name, op in times.ops.items()
            if isinstance(op, Product) == is_product
        ]

        loss = functools.partial(_loss, ops, names, start, on)

        logs = np.log([start[name] for name in names])
        for _ in range(RESTARTS):
            tight = {"maxiter": STEPS, "xatol": 1e-4, "fatol": 1e-7}
            logs = optimize.minimize(loss, logs, method="Nelder-Mead", options=tight).x
        start |= zip(names, np.exp(logs).tolist(), strict=True)
    return Fitted(**start)


def _loss(
    ops: Sequence[tuple[Op, np.ndarray]], names: Sequence[str], others: dict[str, float],
    on: Machine, logs: np.ndarray,
) -> float:  # fmt: skip
    """Mean |log(predicted / measured)| of (op, measured log-seconds), for constants `names` with
    the logarithms `logs`."""
    by = Fitted(**{**others, **dict(zip(names, np.exp(logs).tolist(), strict=True))})
    found = [np.abs(np.log(op.seconds(on, by)) - seconds) for op, seconds in ops]
    return float(np.concatenate(found).mean())


_OF_PRODUCTS = ("compute", "memory", "start_s", "waves", "overlap", "small_tiles")


def ratios(times: LayerTimes, on: Machine, by: Fitted) -> dict[str, np.ndarray]:
    """Predicted over measured time, [n], of each op and of the layer."""
    predicted = {name: op.seconds(on, by) for name, op in times.ops.items()}
    found = {name: predicted[name] / times.seconds[name] for name in predicted}
    return found | {LAYER: _sum(predicted.values()) / _sum(times.seconds.values())}


def roofline_ratio(times: LayerTimes, on: Machine) -> np.ndarray:
    """The roofline's time over the measured time of the layer, [n]."""
    products = [op for op in times.ops.values() if isinstance(op, Product)]
    flops = sum(2 * op.m * op.k * op.n for op in products)
    weights = sum(op.bits // 8 * op.k * op.n for op in products)
    of_bandwidth, of_peak = ROOFLINE
    floor = np.maximum(weights / (of_bandwidth * on.bandwidth), flops / (of_peak * on.flops))
    return floor / _sum(times.seconds.values())


def _sum(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.sum(list(arrays), axis=0)


def errors(measured: Sequence[LayerTimes], on: Machine, by: Fitted) -> list[Error]:
    rows = []
    for times in measured:
        floor = roofline_ratio(times, on)
        for op, ratio in ratios(times, on, by).items():
            for least, end in itertools.pairwise(BATCHES):
                at = (times.tokens >= least) & (times.tokens < end)
                if not at.any():
                    continue
                rows.append(
                    Error(
                        times.model, times.shards, op, least, int(at.sum()), _mean(ratio[at]),
                        _mean(floor[at]) if op == LAYER else None, float(np.median(ratio[at])),
                    )
                )  # fmt: skip
    return rows


def _mean(ratio: np.ndarray) -> float:
    return float(np.abs(ratio - 1).mean())


def summary(measured: Sequence[LayerTimes], on: Machine, by: Fitted) -> dict[str, float]:
    found = [(times, ratios(times, on, by)) for times in measured]
    layers = np.concatenate([ratio[LAYER] for _, ratio in found])
    products = np.concatenate([r[name] for times, r in found for name in times.products])
    others = [r[name] for t, r in found for name in t.ops if name not in t.products]
    floors = np.concatenate([roofline_ratio(times, on) for times in measured])
    return {
        "layer_error": _mean(layers),
        "product_error": _mean(products),
        "pointwise_error": _mean(np.concatenate(others)),
        "layer_error_p90": float(np.quantile(np.abs(layers - 1), 0.9)),
        "roofline_layer_error": _mean(floors),
        "roofline_over_measured": float(np.median(floors)),
        "batches": len(layers),
    }


def table(rows: Sequence[Error], numbers: dict[str, float]) -> str:
    """Errors by op and batch, by model and GPUs, and the means."""
    kinds: list[tuple[str, Callable[[Error], str]]] = [
        ("op", lambda row: row.op),
        ("model, GPUs", lambda row: f"{row.model} on {row.tensor_parallel}"),
    ]
    lines = []
    for title, key in kinds:
        cells = f"{'mean error of ' + title:28}"
        lines.append(cells + "".join(f"{f'{b:,} tokens on':>16}" for b in BATCHES[:-1]))
        chosen = [row for row in rows if title == "op" or row.op == LAYER]
        for name in dict.fromkeys(map(key, chosen)):
            line = f"{name:28}"
            for batch in BATCHES[:-1]:
                mine = [row for row in chosen if (key(row), row.batch) == (name, batch)]
                errors, counts = [row.error for row in mine], [row.count for row in mine]
                line += f"{np.average(errors, weights=counts):16.1%}" if mine else f"{'-':>16}"
            lines.append(line)
    return "\n".join([
        *lines,
        f"layer {numbers['layer_error']:.1%} (90th percentile {numbers['layer_error_p90']:.1%}), "
        f"products {numbers['product_error']:.1%}, pointwise {numbers['pointwise_error']:.1%}; "
        f"roofline's layer {numbers['roofline_layer_error']:.1%}, at "
        f"{numbers['roofline_over_measured']:.2f} of the measured time",
    ])  # fmt: skip


def plot(measured: Sequence[LayerTimes], on: Machine, by: Fitted, path: Path, title: str) -> None:
    """A layer's predicted and roofline time over its measured time, for each number of GPUs."""
    models = list(dict.fromkeys(times.model for times in measured))
    figure = run_record.new_figure(5 * len(models), 3.6)
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for i, times in enumerate(times for times in measured if times.model == model):
            order, colour = np.argsort(times.tokens), f"C{i}"
            tokens = times.tokens[order]
            ours = ratios(times, on, by)[LAYER][order]
            axes.plot(tokens, ours, color=colour, label=f"{times.shards} GPUs", lw=1)
            axes.plot(tokens, roofline_ratio(times, on)[order], color=colour, ls=":", lw=1)
        axes.axhline(1, color="#999999", lw=0.6)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens in the batch")
        axes.set_ylabel("predicted / measured (dotted: roofline)")
        axes.set_title(f"{model}, a layer", loc="left", fontsize="medium")
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    run_record.save_figure(figure, path, dpi=120)


def main(flags: FitFlags, output: Output) -> None:
    with refusals():
        on = machine(flags.gpu)
        measured, left_out = layer_times.read(flags.data, flags.gpu)
    by = FITTED if flags.fixed else fit(measured, on)
    rows, numbers = errors(measured, on, by), summary(measured, on, by)
    constants = asdict(by)
    text, files = table(rows, numbers), sorted({times.file for times in measured})
    print(f"{text}\nmeasured in {', '.join(files)}")
    if left_out:
        print(f"left out, as no configuration is known: {', '.join(left_out)}")
    print(f"constants{' (committed)' * flags.fixed}:")
    print("\n".join(f"    {name}={value:.4g}" for name, value in constants.items()))
    content = {
        "experiment": "fit_cost_model",
        "flags": flags,
        "machine": on,
        "constants": constants,
        "fitted": not flags.fixed,
        "files": files,
        "left_out": left_out,
        "measured": numbers,
        "claims": text.splitlines(),
        **run_record.describe_environment(),
    }
    folder = output.folder
    run_record.write_csv(folder, "errors.csv", rows)
    run_record.write_json(folder, "report.json", content)
    run_record.write_summary(folder, numbers | {f"constant_{n}": v for n, v in constants.items()})
    plot(measured, on, by, folder / "cost_model.png", f"cost model on {flags.gpu}")
    print(f"errors.csv, cost_model.png, report.json and summary.json are in {folder}/")


PROGRAM = Program(
    main, FitFlags, Output("results/fit_cost_model"), ("errors.csv", "cost_model.png")
)

if __name__ == "__main__":
    PROGRAM.run()
