"""Memory management's share of a step (DiffKV §5.3, Fig. 14), in simulated time.

python -m experiments.papers.diffkv.fig14_memory_management

The page manager's own programs are traced for the heads of all layers, with sequences of --tokens
tokens. Each gather, scatter, scan, sort and reduction of the trace is one launch that reads and
writes its operands once; elementwise operations are fused with these launches. A step has these
parts:

    model        products, norms, activations, and attention with its scores
    compression  compression of prompts and of the token that leaves the window; writes of new
                 tokens
    management   allocation and release of heads' pages
    host         host time of the system --host
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from matplotlib.figure import Figure

from experiments.lib.knobs import FACTORS
from experiments.lib.typed_flags import flag
from experiments.papers.diffkv import gpu
from experiments.papers.diffkv.gpu import DIFFKV, SERVERS, SimulatedFlags
from experiments.papers.drawing import panels
from experiments.study import Setting, Study, Values
from paged.kv_cache.diffkv import page_manager
from paged.kv_cache.diffkv.layout import DiffKVLayout
from paged.simulator.cost_model import Elements

MODELS = ("llama-3-8b", "qwen2.5-32b")
PROMPTS, GENERATION = "prompts", "generation"
PARTS = ("model", "compression", "management", "host")
COMPRESSION = ("compression", "writes")


@dataclass(frozen=True)
class ManagementFlags(SimulatedFlags):
    models: tuple[str, ...] = flag(MODELS, "that serve", choices=tuple(SERVERS))
    batches: tuple[int, ...] = flag((1, 8, 32), "sequences of a step", least=1, most=256)
    tokens: int = flag(1024, "of each sequence", least=65, most=4096)


@dataclass(frozen=True)
class Row:
    """A step.

    knob: the changed constant, a name of `knobs.FACTORS`.
    launches, management_bytes, management_us: launches, bytes and time of page management in all
        layers.
    model_share to host_share: the parts' shares of the step.
    """

    model: str
    phase: str
    batch: int
    knob: str
    step_ms: float
    launches: int
    management_bytes: int
    management_us: float
    model_share: float
    compression_share: float
    management_share: float
    host_share: float


def _size(value: Any) -> int:
    return value.aval.size * value.aval.dtype.itemsize


def moved(equation: Any) -> int | None:
    """Bytes that the launch of a jaxpr's equation reads and writes; None if the equation is fused
    with others. Indexed arrays are read and written only at the indices."""
    name, (first, *others), (out, *_) = equation.primitive.name, equation.invars, equation.outvars
    if name == "gather":
        return _size(others[0]) + 2 * _size(out)
    if name.startswith("scatter"):
        indices, updates = others
        return _size(indices) + 3 * _size(updates)
    if name.startswith(("cum", "reduce_", "sort")):
        return _size(first) + _size(out)
    return None


def traffic(program: Callable[..., Any], *arguments: Any) -> list[int]:
    """Bytes of each launch of a program with these arguments."""

    def of(jaxpr: Any) -> Iterator[int]:
        for equation in jaxpr.eqns:
            inner = list(jaxprs_in_params(equation.params))
            if inner and not equation.primitive.name.startswith("scatter"):
                yield from (bytes_ for each in inner for bytes_ in of(each))
            elif equation.invars and (bytes_ := moved(equation)) is not None:
                yield bytes_

    return list(of(jax.make_jaxpr(program)(*arguments).jaxpr))


def management(layout: DiffKVLayout, phase: str, batch: int) -> list[int]:
    """Bytes of each launch of page management, in a step of `batch` sequences."""
    H, levels = layout.all_heads, layout.levels
    pages = jax.eval_shape(
        partial(
            page_manager.init, layout.num_pages, layout.num_slots, H, layout.table_width, levels,
            layout.single,
        )
    )  # fmt: skip
    slots = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def of(dtype, *shape: int):
        return jax.ShapeDtypeStruct((batch, H, *shape), dtype)

    if phase == GENERATION:
        return traffic(page_manager.grow, pages, slots, of(bool, levels))
    return traffic(page_manager.allocate_prompts, pages, slots, of(jnp.int32)) + traffic(
        page_manager.plan_prompts, pages, slots, of(jnp.int32, levels)
    )


def simulate(flags: ManagementFlags, model: str, phase: str, batch: int, knob: str) -> Row:
    attention, host = FACTORS[knob]
    server, most = SERVERS[model], max(flags.batches)
    config = gpu.config_of(DIFFKV, server, flags.gpu, most, max(flags.tokens, server.longest))
    cost = gpu.clock_of(flags.changed(attention, host), server, config)
    layout: Any = cost.layout
    contexts = np.full(batch, flags.tokens)
    new = contexts if phase == PROMPTS else np.ones_like(contexts)
    held = gpu.held(flags, config, cost.model, contexts, contexts)
    work = layout.work(contexts, new, held)
    parts = {
        name: cost.model.shard.num_layers * float(cost.costs.part_s(part))
        for name, part in work.items() if np.any(part.bytes)
    }  # fmt: skip
    compression_s = sum(parts.get(name, 0.0) for name in COMPRESSION)
    model_s = cost.dense_s(int(new.sum()), batch) + sum(parts.values()) - compression_s
    bytes_ = management(layout, phase, batch)
    management_s = sum(float(cost.costs.op_s(Elements(each))) for each in bytes_)
    device_s = model_s + compression_s + management_s
    step_s = float(cost.host.step_s(device_s, batch, server.gpus))
    seconds = (model_s, compression_s, management_s, step_s - device_s)
    return Row(
        model, phase, batch, knob, 1e3 * step_s, len(bytes_), sum(bytes_), 1e6 * management_s,
        *(each / step_s for each in seconds),
    )  # fmt: skip


def measure(flags: ManagementFlags, _) -> Iterator[Row]:
    for model in flags.models:
        for phase in (PROMPTS, GENERATION):
            for batch in sorted(set(flags.batches)):
                for knob in FACTORS:
                    yield simulate(flags, model, phase, batch, knob)


def values(flags: ManagementFlags, rows: Sequence[Row]) -> Values:
    """management_PHASE_BATCH_MODEL, model_PHASE_BATCH_MODEL: shares of the step.
    most_PHASE, most_PHASE_KNOB: the largest share of management in a phase.
    """
    numbers: dict[str, float | None] = {}
    for row in rows:
        if not row.knob:
            at = f"{row.phase}_{row.batch}_{row.model}"
            numbers[f"management_{at}"] = row.management_share
            numbers[f"model_{at}"] = row.model_share
    for phase in (PROMPTS, GENERATION):
        for knob in FACTORS:
            mine = [r.management_share for r in rows if (r.phase, r.knob) == (phase, knob)]
            numbers[f"most_{phase}" + (f"_{knob}" if knob else "")] = max(mine, default=None)
    return numbers


def draw(_: ManagementFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, mine in panels(figure, [row for row in rows if not row.knob], "phase"):
        bottom, labels = np.zeros(len(mine)), [f"{row.model}\n{row.batch}" for row in mine]
        for part in PARTS:
            heights = np.array([getattr(row, f"{part}_share") for row in mine])
            axes.bar(labels, heights, bottom=bottom, label=part)
            bottom += heights
        axes.set(ylabel="share of the step")
        axes.tick_params(axis="x", labelsize="x-small")
    figure.axes[0].legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="Memory management's share of a step (DiffKV Fig. 14)",
    kind="simulated",
    claim="page management on the device takes less than 0.2 % of a step of prompts and less than "
    "0.9 % of one of generation",
    rule="so with every model and batch",
    holds=lambda v: v[f"most_{PROMPTS}"] < 0.002 and v[f"most_{GENERATION}"] < 0.009,
    setting=Setting(
        "Llama-3-8B on one, Qwen2.5-32B on two, 1,024 tokens; " + gpu.SETTING,
        "launches are counted in the traced programs, not in compiled ones; the paper does not "
        "name the models of its figure",
        "paper",
    ),
    flags=ManagementFlags,
    measure=measure,
    check=lambda flags: gpu.check(flags, flags.models, (DIFFKV,), 0),
    values=values,
    paper={f"most_{PROMPTS}": (0.0, 0.002), f"most_{GENERATION}": (0.0, 0.009)},
    draw=draw,
    tolerance=0.0,
    quick={"models": MODELS[:1]},
    minutes=(0.3, 0.6),
)

if __name__ == "__main__":
    STUDY.run()
