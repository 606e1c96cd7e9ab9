"""Training of DuoAttention's gates, which select a model's retrieval heads (LServe §3.3).

A KV head's output is alpha * full + (1 - alpha) * streaming. A streaming head attends to the sink
and the last pages only. The model's weights are frozen; only the gates alpha are trained. The gates
must be small and change the final hidden states of answers little: loss = mean squared distance +
0.05 * mean |alpha| (DuoAttention, §2.3). Heads with high gates after training are retrieval heads.

    python -m experiments.papers.lserve.duo_gates --output_dir=results/duo_gates
    python -m experiments.papers.lserve.duo_gates --flagfile=configs/judge_gates.flags

Without flags the program trains the bundled model's gates on the studies' tasks. With the flag file
the program trains the gates of the model 'judge' by the paper's recipe: 2,000 steps on passkeys, a
task that no study uses. A model's sequences are of its own tokenizer. Contexts must exceed the
window, because within the window full and streaming heads have equal outputs. The program also
writes gates.json, for `--policy=lserve`, and gates.png. The seed determines the run, and the same
command resumes a stopped run.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.plain_attention import check_model
from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Run, Setting, Study, Values
from experiments.train import training_state
from experiments.train.attention import Window, batched_attend
from experiments.train.data import TrainingData
from models import checkpoint, llama, load_tokenizer
from models.config import ModelConfig
from models.families import family

PENALTY = 0.05  # weight of the mean gate in the loss
# The flags of configs/judge_gates.flags.
JUDGE = {
    "model": "judge", "mix": ("passkeys=1",), "steps": 2000, "lengths": (768,), "sink": 64,
    "local": 128,
}  # fmt: skip


@dataclass(frozen=True)
class GateFlags(Flags):
    model: str = flag("bundled", "'bundled', 'judge', a hub id or a folder", path=True)
    steps: int = flag(400, "of one sequence each", least=1)
    lengths: tuple[int, ...] = flag((2048, 4096), "tokens of sequences, in turn", least=1)
    mix: tuple[str, ...] = flag(
        ("needles=1", "values=2", "chain=1", "count=2", "vote=1", "cot=2"),
        "task=share,… of experiments/train/data.py",
    )
    sink: int = flag(128, "first tokens that streaming heads see", least=0)
    local: int = flag(256, "tokens before the query's page that they see", least=1)
    page_size: int = flag(64, "tokens of a page", least=1)
    rate: float = flag(0.02, "learning rate", least=1e-6)
    seed: int = flag(1, "of the sequences", least=0)

    def __post_init__(self):
        super().__post_init__()
        for name in ("sink", "local"):
            if getattr(self, name) % self.page_size:
                raise ValueError(f"--{name} must be whole pages of {self.page_size} tokens")
        most = self.sink + self.local + self.page_size
        if not self.lengths or min(self.lengths) <= most:
            raise ValueError(
                f"--lengths must be longer than the window ({most} tokens), not {self.lengths}"
            )
        assert self.shares  # raises ValueError for a malformed --mix

    @property
    def window(self) -> Window:
        return Window(self.sink, self.local, self.page_size)

    @property
    def shares(self) -> dict[str, float]:
        try:
            shares = {name: float(share) for name, share in (x.split("=") for x in self.mix)}
        except ValueError:
            raise ValueError(f"--mix must be task=share,…, not {self.mix}") from None
        if not shares or any(not 0 < share < np.inf for share in shares.values()):
            raise ValueError(f"--mix needs shares above 0, not {self.mix}")
        return shares


@dataclass(frozen=True)
class Row:
    """25 steps of training.

    loss: mean loss over the steps.
    moved: mean distance of the hidden states, the first term of the loss.
    seconds: seconds since the start.
    """

    step: int
    mean_gate: float
    median_gate: float
    loss: float
    moved: float
    seconds: int


def mixed_attend(config: ModelConfig, length: int, window: Window, gates):
    """An `attend` (models/common.py) that mixes the outputs of full and streaming heads by gates
    [L, K], from 0 (streaming) to 1 (full)."""
    full = batched_attend(config, length)
    streaming = batched_attend(config, length, window=window)
    group = config.num_heads // config.num_kv_heads

    def attend(layer, q, k, v, cache):
        alpha = jnp.repeat(gates[layer], group)[:, None]
        whole, near = (one(layer, q, k, v, None)[0] for one in (full, streaming))
        return alpha * whole + (1 - alpha) * near, cache

    return attend


def _hidden(params, config: ModelConfig, tokens, positions, attend):
    return llama.forward(params, config, tokens.reshape(-1), positions.reshape(-1), attend)[0]


def loss_fn(gates, params, config: ModelConfig, window: Window, tokens, weights, positions):
    """The loss of gates [L, K], and its first term: the distance of the answers' hidden states.

    tokens, weights, positions: fields [B, T + 1] of a `Batch`.
    """
    length = tokens.shape[1] - 1
    inputs = tokens[:, :-1], positions[:, :-1]
    wanted = _hidden(params, config, *inputs, batched_attend(config, length))
    found = _hidden(params, config, *inputs, mixed_attend(config, length, window, gates))
    answers = (weights[:, 1:] >= 1).reshape(-1)
    distance = jnp.square(found - wanted).mean(-1)
    moved = jnp.sum(distance * answers) / jnp.maximum(answers.sum(), 1)
    return moved + PENALTY * jnp.abs(gates).mean(), moved


def rate_at(steps: int, peak: float):
    """The learning rate's schedule: the rate rises during the first fifth of the steps and falls
    during the last fifth, as in DuoAttention (400 of 2,000)."""
    part = max(1, steps // 5)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, part),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, part),
        ],
        [part, max(part, steps - part)],
    )


def train(
    config: ModelConfig, params, data: TrainingData, *, steps: int, lengths: list[int],
    mix: dict[str, float], window: Window, rate: float, progress: bool = True,
    kept: Path | None = None, asked: dict[str, Any] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[np.ndarray, list[Row]]:  # fmt: skip
    """Returns trained gates [L, K], and a row for each 25 steps. Gates start at 1. A step trains on
    one sequence.

    kept: path of the checkpoint.
    asked: settings of the run. A stopped run resumes from a checkpoint with equal settings.
    """
    optimizer = optax.adamw(rate_at(steps, rate), weight_decay=0.0)
    gates = jnp.ones((config.num_layers, config.num_kv_heads))
    state = optimizer.init(gates)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(gates, state, tokens, weights, positions):
        (loss, moved), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
            gates, params, config, window, tokens, weights, positions
        )
        updates, state = optimizer.update(gradient, state, gates)
        return jnp.clip(optax.apply_updates(gates, updates), 0, 1), state, loss, moved

    rows: list[Row] = []
    if kept and kept.exists():
        before, meta = training_state.restore(kept, (gates, state))
        if meta["asked"] == asked:
            (gates, state), rows = before, [Row(**row) for row in meta["rows"]]
    first = rows[-1].step if rows else 0
    tally: dict[str, list[float]] = defaultdict(list)
    began = time.perf_counter() - (rows[-1].seconds if rows else 0)
    bar = tqdm(range(first, steps), "training gates", unit=" steps", disable=not progress)
    for number in bar:
        if stopped():
            break
        batch = data.batch(number, lengths[number % len(lengths)], 1, mix)
        gates, state, loss, moved = step(gates, state, batch.tokens, batch.weights, batch.positions)
        tally["loss"].append(float(loss))
        tally["moved"].append(float(moved))
        if number % 25 == 24 or number == steps - 1:
            mean, middle = (round(float(f(gates)), 4) for f in (np.mean, np.median))
            loss, moved = (round(float(np.mean(tally[name])), 5) for name in ("loss", "moved"))
            seconds = round(time.perf_counter() - began)
            rows.append(Row(number + 1, mean, middle, loss, moved, seconds))
            bar.set_postfix(vars(rows[-1]))
            tally.clear()
            if kept:
                training_state.save(
                    kept, (gates, state), {"asked": asked, "rows": list(map(vars, rows))}
                )
    return np.asarray(gates), rows


def draw_gates(axes: Axes, gates: np.ndarray) -> None:
    """Draws a map of gates [L, K]."""
    axes.imshow(gates, vmin=0, vmax=1, cmap="viridis")
    for (layer, head), gate in np.ndenumerate(gates):
        colour = "white" if gate < 0.6 else "black"
        axes.text(head, layer, f"{gate:.2f}", ha="center", va="center", color=colour, fontsize=7)
    axes.set(
        xlabel="KV head", ylabel="layer", title="gates: 1 sees everything, 0 may stream",
        xticks=range(gates.shape[1]), yticks=range(gates.shape[0]),
    )  # fmt: skip


def check(flags: GateFlags) -> None:
    config = checkpoint.load_config(flags.model)
    if family(config) is not llama:
        raise ValueError(f"--model={flags.model} is {config.model_type}: not of Llama's family")
    check_model(flags.model, flags.lengths)


def measure(flags: GateFlags, run: Run) -> Iterator[Row]:
    config, params = checkpoint.load(flags.model, "float32")
    with refusals():
        tokenizer = load_tokenizer(flags.model)
        data = TrainingData(flags.seed, corpus_characters=1_000_000, tokenizer=tokenizer)
        for task in flags.shares:
            data.batch(0, flags.lengths[0], 1, {task: 1.0})
    weights = checkpoint.weights_hash(flags.model)
    gates, rows = train(
        config, params, data, steps=flags.steps, lengths=list(flags.lengths), mix=flags.shares,
        window=flags.window, rate=flags.rate, kept=run.folder / "checkpoint.npz",
        asked=run_record.plain(flags) | {"weights_sha256": weights}, stopped=run.stopped,
    )  # fmt: skip
    yield from rows
    if run.stopped():
        return
    stored = {"weights_sha256": weights, "gates": np.round(gates, 4).tolist()}
    run_record.write_json(run.folder, "gates.json", stored)
    figure = run_record.new_figure(4.5, 4)
    draw_gates(figure.subplots(), gates)
    figure.colorbar(figure.axes[0].images[0])
    run_record.save_figure(figure, run.folder / "gates.png", dpi=130)


def values(_: GateFlags, rows: Sequence[Row]) -> Values:
    last = rows[-1]
    return {"mean_gate": last.mean_gate, "median_gate": last.median_gate, "moved": last.moved}


def draw(_: GateFlags, figure: Figure, rows: Sequence[Row]) -> None:
    for axes, name in zip(figure.subplots(1, 2), ("mean_gate", "moved")):
        axes.plot([row.step for row in rows], [getattr(row, name) for row in rows])
        axes.set(xlabel="step", ylabel=name.replace("_", " "), ylim=(0, None))


STUDY = Study(
    __file__,
    title="Gates of KV heads: which must see everything (LServe §3.3; DuoAttention)",
    kind="analogue",
    claim="half of the heads may stream",
    rule="the mean gate is at most one half",
    holds=lambda v: v["mean_gate"] <= 0.5,
    setting=Setting(
        "the model 'judge' (64 KV heads), 2,000 steps on passkeys of 768 tokens, as "
        "configs/judge_gates.flags says",
        "DuoAttention trains Llama-3-8B's 256 gates, on passkeys of 1k to 32k tokens",
        "reduced",
    ),
    flags=GateFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"steps": 25, "lengths": (512,)},
    full=JUDGE,
    minutes=(1, 60),
    size=(9, 3.4),
)

if __name__ == "__main__":
    STUDY.run()
