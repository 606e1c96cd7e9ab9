"""The arrays that a step of three requests passes to the device, drawn from a run of the engine.

python docs/examples/step_as_data.py [PICTURE]
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.papers.mechanisms import COLOURS, FREE
from models import checkpoint
from paged import Engine, EngineConfig, SamplingParams
from paged.simulator.executor import SimulatedExecutor
from paged.step_inputs import FROM_DEVICE, StepInputs

PICTURE = Path(__file__).parents[1] / "step.png"
P = 4  # tokens of a page
NOWHERE = -2  # slot of a padding token, whose key and value are not written


class Recorder(SimulatedExecutor):
    """A simulated executor that keeps the inputs of each step."""

    def __init__(self, vocab_size: int):
        super().__init__(vocab_size=vocab_size, dtype="float32")
        self.steps: list[StepInputs] = []

    def execute(self, inputs: StepInputs):
        self.steps.append(inputs)
        return super().execute(inputs)


def step() -> StepInputs:
    """The inputs of the second step: A (a prompt of 6 tokens) decodes, B and C prefill."""
    model = checkpoint.load_config("bundled")
    config = EngineConfig(
        page_size=P, kv_cache_tokens=10 * P, max_num_seqs=4, max_model_len=3 * P,
        max_num_batched_tokens=16, max_prefills_per_step=2,
    )  # fmt: skip
    executor = Recorder(model.vocab_size)
    engine = Engine(model, config, executor)
    how = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add_request([*range(41, 47)], how, "A")
    engine.step()
    engine.add_request([*range(51, 58)], how, "B")
    engine.add_request([*range(61, 64)], how, "C")
    engine.step()
    return executor.steps[1]


def slot_mapping(inputs: StepInputs) -> np.ndarray:
    """The slot [T] of each token's key and value: page * P + offset; NOWHERE for padding."""
    row = np.minimum(inputs.token_rows, len(inputs.lengths) - 1)
    page = np.asarray(inputs.tables)[row, inputs.positions // P]
    slots = page * P + inputs.positions % P
    return np.where(inputs.token_rows < len(inputs.lengths), slots, NOWHERE)


def colour(row: int) -> str:
    """The colour of a row of the step; grey for padding."""
    return {0: COLOURS[1], 1: COLOURS[2], 2: COLOURS[0]}.get(row, FREE)


def cells(axes: Axes, y: float, name: str, values, rows, x: int = 0) -> None:
    """Draws a row of numbers. Each number has the colour of its request."""
    axes.text(x - 0.3, y + 0.4, name, ha="right", va="center", fontsize="small")
    for at, (value, row) in enumerate(zip(values, rows, strict=True), x):
        text = {FROM_DEVICE: "device", NOWHERE: "–"}.get(int(value), str(value))
        size = "xx-small" if value == FROM_DEVICE else "small"
        face = colour(row)
        ink = "#777777" if face == FREE else "white"
        axes.add_patch(Rectangle((at, y), 0.94, 0.8, facecolor=face))
        axes.text(at + 0.47, y + 0.4, text, ha="center", va="center", fontsize=size, color=ink)


def draw(axes: Axes, inputs: StepInputs) -> None:
    T, S, Sp = len(inputs.tokens), len(inputs.lengths), inputs.num_prefill_rows
    rows, slots = np.asarray(inputs.token_rows), slot_mapping(inputs)
    axes.text(0, 13.4, "T = 20 tokens: prompts padded to 16, then 4 rows of decodes", weight="bold",
              fontsize="small")  # fmt: skip
    for y, (name, values) in enumerate({
        "slot mapping": slots, "token_rows": rows, "positions": inputs.positions,
        "tokens": inputs.tokens,
    }.items()):  # fmt: skip
        cells(axes, 9.3 + y, name, values, rows)
    axes.text(0, 8.1, "S = 6 rows: 2 of prompts, 4 of decodes", weight="bold", fontsize="small")
    live = [row if inputs.lengths[row] else S for row in range(S)]
    for x, name, values in (
        (0, "lengths", inputs.lengths),
        (11, "last_tokens", inputs.last_tokens),
    ):
        cells(axes, 7, name, values, live, x)
    tables = np.asarray(inputs.tables)
    for column in range(tables.shape[1]):
        name = "tables" if column == 1 else ""
        cells(axes, 6 - column, name, tables[:, column], live)
    cells(axes, 6, "query_starts", inputs.query_starts, [*range(Sp), S], 11)

    axes.text(0, 2.8, "KV pages of a layer and head: colours are read, dark ones also written",
              weight="bold", fontsize="small")  # fmt: skip
    written = {int(slot): int(row) for slot, row in zip(slots, rows) if row < S}
    kept = {
        int(tables[row, at // P] * P + at % P): row
        for row in range(S)
        for at in range(inputs.lengths[row])
    }
    for page in range(1, tables.max() + 2):
        x = (page - 1) * (P + 0.3) * 0.75
        axes.text(x + 1.5, 0.7, f"page {page}", ha="center", va="center", fontsize="small")
        for at in range(page * P, (page + 1) * P):
            of = kept.get(at, S)
            axes.add_patch(Rectangle((x + 0.75 * (at % P), 1.2), 0.7, 0.9, facecolor=colour(of),
                                     alpha=1 if at in written or of == S else 0.45))  # fmt: skip
            axes.text(x + 0.75 * (at % P) + 0.35, 1.65, str(at), ha="center", va="center",
                      fontsize="x-small")  # fmt: skip
    for x, (name, row) in zip(
        (0, 6.6, 13.2), {"A decodes": 2, "B's prompt": 0, "C's prompt": 1}.items()
    ):
        axes.add_patch(Rectangle((x, 14.6), 0.94, 0.8, facecolor=colour(row)))
        axes.text(x + 1.2, 15, name, va="center", fontsize="small")
    axes.set(xlim=(-3.6, T + 0.2), ylim=(0.3, 15.6))
    axes.set_axis_off()


if __name__ == "__main__":
    figure = Figure(figsize=(9, 6), layout="constrained")
    draw(figure.subplots(), step())
    figure.savefig(
        sys.argv[1] if len(sys.argv) > 1 else PICTURE, dpi=130, metadata={"Software": None}
    )
