"""Which heads of a model must see everything: DuoAttention's gates (LServe §3.3).

Each KV head's output is mixed, alpha * full + (1 - alpha) * streaming, where a streaming head sees
the sink and the last pages only. The model's weights stay as they are; the gates alone are trained,
to change the final hidden states of answers little and to be small: loss = mean squared distance +
0.05 * mean |alpha| (DuoAttention, §2.3). Heads whose gates stay high are the retrieval heads.

    python -m experiments.train.duo_gates --output_dir=results/duo_gates
    python -m experiments.train.duo_gates --flagfile=configs/judge_gates.flags

Without flags it trains the bundled model's gates on the tasks of evaluation. With the flag file it
trains those of the model 'judge' by the paper's recipe: 2,000 steps on passkeys, which no
evaluation has.
Contexts are long, because short ones fit the window and teach nothing. Writes to --output_dir:
gates.json (for `--policy=lserve`), gates.png, training.json, report.json and summary.json. The seed
gives the run, and the same command resumes a run that was stopped.
"""

import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.flags import define_float, define_model
from experiments.lib.program import Options, Program, refusals
from experiments.train import training_state
from experiments.train.attention import Window, batched_attend
from experiments.train.data import TrainingData
from models import checkpoint, llama
from models.config import ModelConfig

PENALTY = 0.05  # of the mean gate
FILES = ("gates.json", "gates.png", "training.json")


def mixed_attend(config: ModelConfig, length: int, window: Window, gates):
    """An `attend` (models/common.py) that mixes what full and streaming heads see by gates [L, K],
    from 0 (streaming) to 1."""
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
    """The loss of gates [L, K], and its first part: how far answers are moved. tokens, weights,
    positions: [B, T + 1], of a `Batch`."""
    length = tokens.shape[1] - 1
    inputs = tokens[:, :-1], positions[:, :-1]
    wanted = _hidden(params, config, *inputs, batched_attend(config, length))
    found = _hidden(params, config, *inputs, mixed_attend(config, length, window, gates))
    answers = (weights[:, 1:] >= 1).reshape(-1)
    distance = jnp.square(found - wanted).mean(-1)
    moved = jnp.sum(distance * answers) / jnp.maximum(answers.sum(), 1)
    return moved + PENALTY * jnp.abs(gates).mean(), moved


def rate_at(steps: int, peak: float):
    """A fifth of the steps to rise, and a fifth to fall, as DuoAttention's 400 of 2,000."""
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
) -> tuple[np.ndarray, list[dict]]:  # fmt: skip
    """Gates [L, K], all 1 at first, and a row for each 25 steps. One sequence a step.

    kept: a checkpoint, from which a stopped run resumes if it was `asked` the same.
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

    rows: list[dict] = []
    if kept and kept.exists():
        before, meta = training_state.restore(kept, (gates, state))
        if meta["asked"] == asked:
            (gates, state), rows = before, meta["rows"]
    first = rows[-1]["step"] if rows else 0
    tally: dict[str, list[float]] = defaultdict(list)
    began = time.perf_counter() - (rows[-1]["seconds"] if rows else 0)
    bar = tqdm(range(first, steps), "training gates", unit=" steps", disable=not progress)
    for number in bar:
        batch = data.batch(number, lengths[number % len(lengths)], 1, mix)
        gates, state, loss, moved = step(gates, state, batch.tokens, batch.weights, batch.positions)
        tally["loss"].append(float(loss))
        tally["moved"].append(float(moved))
        if number % 25 == 24 or number == steps - 1:
            means = {name: round(float(np.mean(values)), 5) for name, values in tally.items()}
            rows.append({"step": number + 1, "mean_gate": round(float(gates.mean()), 4)} | means)
            rows[-1]["seconds"] = round(time.perf_counter() - began)
            bar.set_postfix(rows[-1])
            tally.clear()
            if kept:
                training_state.save(kept, (gates, state), {"asked": asked, "rows": rows})
    return np.asarray(gates), rows


def draw(axes: Axes, gates: np.ndarray) -> None:
    """A map of gates [L, K]."""
    axes.imshow(gates, vmin=0, vmax=1, cmap="viridis")
    for (layer, head), gate in np.ndenumerate(gates):
        colour = "white" if gate < 0.6 else "black"
        axes.text(head, layer, f"{gate:.2f}", ha="center", va="center", color=colour, fontsize=7)
    axes.set(
        xlabel="KV head", ylabel="layer", title="gates: 1 sees everything, 0 may stream",
        xticks=range(gates.shape[1]), yticks=range(gates.shape[0]),
    )  # fmt: skip


def plot(gates: np.ndarray, path: Path, footer: str) -> None:
    figure = Figure(figsize=(4.5, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes, gates)
    figure.colorbar(axes.images[0])
    figure.supxlabel(footer, fontsize="x-small", color="#666666")
    run_record.save_figure(figure, path, dpi=130)


def checked(options: Options) -> tuple[Window, list[int], dict[str, float]]:
    """Window, lengths and mix of the flags. Raises ValueError for what cannot be."""
    window = Window(options.sink, options.local, options.page_size)
    for name in ("sink", "local"):
        if getattr(options, name) % options.page_size:
            raise ValueError(f"--{name} must be whole pages of {options.page_size} tokens")
    most = window.sink + window.local + window.page
    if not options.lengths or not all(x.isdecimal() and most < int(x) for x in options.lengths):
        raise ValueError(
            f"--lengths must be longer than the window ({most} tokens), not {options.lengths}"
        )
    try:
        mix = {name: float(share) for name, share in (x.split("=") for x in options.mix)}
    except ValueError:
        raise ValueError(f"--mix is task=share,…, not {options.mix}") from None
    if not mix or any(not 0 < share < np.inf for share in mix.values()):
        raise ValueError(f"--mix needs shares above 0, not {options.mix}")
    return window, [int(x) for x in options.lengths], mix


def main(options: Options) -> None:
    with refusals():
        window, lengths, mix = checked(options)
        longest = checkpoint.load_config(options.model).max_position_embeddings
        if max(lengths) > longest:
            raise ValueError(f"--lengths must be at most the model's longest, {longest}")
        config, params = checkpoint.load(options.model, "float32")
        data = TrainingData(options.seed, corpus_characters=1_000_000)
        for task in mix:
            data.batch(0, lengths[0], 1, {task: 1.0})
    folder, weights = Path(options.output_dir), checkpoint.weights_hash(options.model)
    gates, rows = train(
        config, params, data, steps=options.steps, lengths=lengths, mix=mix, window=window,
        rate=options.rate, kept=folder / "checkpoint.npz",
        asked=vars(options) | {"weights_sha256": weights},
    )  # fmt: skip
    environment = run_record.describe_environment()
    stored = {"weights_sha256": weights, "gates": np.round(gates, 4).tolist()}
    run_record.write_json(folder, "gates.json", stored)
    run_record.write_json(folder, "training.json", {"flags": vars(options), "log": rows})
    facts = {"experiment": "duo_gates", "flags": vars(options), "weights_sha256": weights}
    run_record.write_json(folder, "report.json", facts | {"gates": stored["gates"]} | environment)
    order = np.sort(gates.reshape(-1))
    run_record.write_summary(folder, {
        "mean_gate": float(gates.mean()),
        "median_gate": float(np.median(order)),
        "moved": rows[-1]["moved"],
    })  # fmt: skip
    plot(gates, folder / "gates.png", run_record.hardware_line(environment))
    print(np.round(gates, 2))


def define_flags() -> None:
    define_model()
    flags.DEFINE_integer("steps", 400, "of one sequence each", lower_bound=1)
    flags.DEFINE_list("lengths", ["2048", "4096"], "tokens of sequences, in turn")
    flags.DEFINE_list(
        "mix", ["needles=1", "values=2", "chain=1", "count=2", "vote=1", "cot=2"],
        "task=share,… of experiments/train/data.py",
    )  # fmt: skip
    flags.DEFINE_integer("sink", 128, "first tokens that streaming heads see", lower_bound=0)
    flags.DEFINE_integer(
        "local", 256, "tokens before the query's page that they see", lower_bound=1
    )
    flags.DEFINE_integer("page_size", 64, "tokens of a page", lower_bound=1)
    define_float("rate", 0.02, "learning rate", 1e-6)
    flags.DEFINE_integer("seed", 1, "of the sequences", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/duo_gates", FILES)

if __name__ == "__main__":
    PROGRAM.run()
