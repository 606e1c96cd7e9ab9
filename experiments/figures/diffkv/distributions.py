"""What DiffKV builds on: attention scores, norms of values, and how many tokens matter (DiffKV §3,
Figs. 2 to 5).

python -m experiments.figures.diffkv.distributions

Over whole prompts of each task, by layer and KV head: the significance of each token, which is the
mean of the probabilities that later tokens give it, the largest of its KV head's query heads; the
norm of its value; and how many tokens hold 95 % of a prompt's significance.

Claims: scores span far more orders of magnitude than norms (paper: seven against two); tokens that
matter differ in number between layers, heads and prompts. Writes to --output_dir: tokens.csv (by
task, layer and head), distributions.png, report.json and summary.json.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.flags import define_model
from experiments.lib.program import Options, Program, refusals
from experiments.tasks import tasks
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from models.families import family
from pallas_kernels.quantized_attention import prompt_attention

SHARE = 0.95
FILES = ("tokens.csv", "distributions.png")


class Prompt(NamedTuple):
    """scores: [L, T, K] significance of tokens. norms: [L, T, K] of their values. The last token,
    which no later one sees, is left out."""

    scores: np.ndarray
    norms: np.ndarray

    def critical(self) -> np.ndarray:
        """[L, K] the least number of tokens with `SHARE` of all significance."""
        descending = -np.sort(-self.scores, axis=1)
        sums = np.cumsum(descending, axis=1)
        return (sums < SHARE * sums[:, -1:]).sum(1) + 1


@partial(jax.jit, static_argnums=1)
def _measure(params, config: ModelConfig, tokens_T):
    T = len(tokens_T)
    shape = config.num_layers, T, config.num_kv_heads
    starts, later = jnp.array([0, T]), jnp.maximum(T - 1 - jnp.arange(T), 1)[:, None]

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, noted):
        out, sums_TxK = prompt_attention(q_TxHxD, k_TxKxD, v_TxKxD, starts)
        norms = jnp.linalg.norm(v_TxKxD.astype(jnp.float32), axis=-1)
        scores, all_norms = noted
        return out, (scores.at[layer].set(sums_TxK / later), all_norms.at[layer].set(norms))

    noted = jnp.zeros(shape), jnp.zeros(shape)
    return family(config).forward(params, config, tokens_T, jnp.arange(T), attend, noted)[1]


def measure(params, config: ModelConfig, tokenizer, prompts) -> list[Prompt]:
    found = []
    for prompt in tqdm(prompts, desc=prompts[0].task):
        tokens = np.array(tokenizer(prompt.prompt + prompt.answer)["input_ids"], np.int32)
        scores, norms = _measure(params, config, tokens)
        found.append(Prompt(np.asarray(scores)[:, :-1], np.asarray(norms)[:, :-1]))
    return found


def table(task: str, found: Sequence[Prompt]) -> list[dict]:
    """A row for each layer and KV head: tokens that matter, their mean and deviation over prompts,
    and percentiles of scores and norms."""
    critical = np.stack([prompt.critical() for prompt in found])
    rows = []
    for layer, head in np.ndindex(critical.shape[1:]):
        counts = critical[:, layer, head]
        row = dict(task=task, layer=layer, head=head, tokens=len(found[0].scores[0]))
        row |= dict(critical_mean=float(counts.mean()), critical_std=float(counts.std()))
        for name, index in (("score", 0), ("norm", 1)):
            values = np.concatenate([prompt[index][layer, :, head] for prompt in found])
            for percentile, value in zip((0.1, 50, 99.9), np.percentile(values, (0.1, 50, 99.9))):
                row[f"{name}_p{percentile:g}"] = float(value)
        rows.append(row)
    return rows


def orders(values: np.ndarray) -> float:
    """Orders of magnitude between the least and the most, of those above 0."""
    positive = values[values > 0]
    return float(np.log10(positive.max() / positive.min()))


def summarise(rows: Sequence[dict], found: dict[str, list[Prompt]]) -> dict[str, float]:
    everything = [prompt for prompts in found.values() for prompt in prompts]
    layers = range(len(everything[0].scores))
    both = {
        name: [
            orders(np.concatenate([p[i][layer].ravel() for p in everything])) for layer in layers
        ]
        for name, i in (("score", 0), ("norm", 1))
    }
    numbers = {f"{name}_orders_of_magnitude": max(values) for name, values in both.items()}
    means = {(r["task"], r["layer"], r["head"]): r["critical_mean"] for r in rows}
    numbers["critical_tokens_least_head"] = min(means.values())
    numbers["critical_tokens_most_head"] = max(means.values())
    for task in found:
        of_task = [mean for (name, _, _), mean in means.items() if name == task]
        numbers[f"critical_tokens_{task}"] = float(np.mean(of_task))
    return numbers


def plot(rows: Sequence[dict], found: dict[str, list[Prompt]], path: Path, footer: str) -> None:
    figure = Figure(figsize=(12, 7), layout="constrained")
    figure.supxlabel(footer, fontsize=7)
    scores, norms, tokens, by_layer, by_head, by_task = figure.subplots(2, 3).flat
    everything = [prompt for prompts in found.values() for prompt in prompts]
    for axes, index, title in (
        (scores, 0, "significance of tokens (Fig. 2; paper: 7 orders)"),
        (norms, 1, "norms of values (Fig. 2; paper: 2 orders)"),
    ):
        _draw_distributions(axes, everything, index, title)
    one, middle = everything[0], len(everything[0].scores) // 2
    for head in range(one.scores.shape[2]):
        tokens.semilogy(one.scores[middle, :, head], linewidth=0.5, label=f"head {head}")
    tokens.set(
        xlabel="token", ylabel="significance", title=f"layer {middle} of one prompt (Fig. 3)"
    )
    tokens.legend(fontsize="x-small")
    critical = np.stack([prompt.critical() for prompt in everything])
    of_layers = critical.mean(2)
    layers = range(critical.shape[1])
    by_layer.errorbar(layers, of_layers.mean(0), of_layers.std(0), marker="o", capsize=3)
    by_layer.set_xticks(layers)
    by_layer.set(xlabel="layer", ylabel="tokens", title="tokens with 95 %, by layer (Fig. 4)")
    names = [f"{layer}.{head}" for layer, head in np.ndindex(critical.shape[1:])]
    flat = critical.reshape(len(critical), -1)
    by_head.barh(range(len(names)), flat.mean(0), xerr=flat.std(0), color="#2f6b9a")
    by_head.set_yticks(range(len(names)), names)
    by_head.set(xlabel="tokens", title="by layer.head (Fig. 5)")
    by_head.tick_params(axis="y", labelsize=6)
    for task in found:
        means = [row["critical_mean"] for row in rows if row["task"] == task]
        by_task.plot(sorted(means), label=task, marker=".")
    by_task.set(xlabel="heads, sorted", ylabel="tokens", title="by task")
    by_task.legend(fontsize="x-small")
    run_record.save_figure(figure, path, dpi=130)


def _draw_distributions(axes: Axes, prompts: Sequence[Prompt], index: int, title: str) -> None:
    """The share of tokens below x in three layers."""
    last = len(prompts[0].scores) - 1
    for layer in sorted({0, last // 2, last}):
        values = np.sort(np.concatenate([prompt[index][layer].ravel() for prompt in prompts]))
        at = np.linspace(0, len(values) - 1, 400).astype(int)
        axes.semilogx(values[at], at / len(values), label=f"layer {layer}")
    axes.set(ylabel="share of tokens below", title=title)
    axes.legend(fontsize="x-small")


def main(options: Options) -> None:
    folder = Path(options.output_dir)
    with refusals():
        longest = checkpoint.load_config(options.model).max_position_embeddings
        if options.context_length > longest:
            raise ValueError(f"--context_length must be at most the model's longest, {longest}")
        tokenizer = load_tokenizer(options.model)
        prompts = {
            task: tasks.make_prompts(
                task, options.context_length, options.num_prompts, options.seed, tokenizer
            )
            for task in options.tasks
        }
        if not prompts:
            raise ValueError("--tasks must name at least one")
        config, params = checkpoint.load(options.model, "float32")
    found = {task: measure(params, config, tokenizer, prompts[task]) for task in prompts}
    rows = [row for task in found for row in table(task, found[task])]
    numbers = summarise(rows, found)
    environment = run_record.describe_environment()
    facts = {
        "experiment": "diffkv_distributions", "flags": vars(options), "rows": rows,
        "weights_sha256": checkpoint.weights_hash(options.model),
    }  # fmt: skip
    print(
        f"orders of magnitude, most of a layer: scores {numbers['score_orders_of_magnitude']:.1f} "
        f"(paper: 7), norms of values {numbers['norm_orders_of_magnitude']:.1f} (paper: 2)"
    )
    for task in found:
        print(f"{task:12}{numbers[f'critical_tokens_{task}']:8.1f} tokens with 95 %, mean of heads")
    least, most = (numbers[f"critical_tokens_{name}_head"] for name in ("least", "most"))
    print(f"by head and task: {least:.1f} to {most:.1f} of {options.context_length} tokens")
    run_record.write_csv(folder, "tokens.csv", rows)
    plot(rows, found, folder / "distributions.png", run_record.hardware_line(environment))
    run_record.write_json(folder, "report.json", facts | environment)
    run_record.write_summary(folder, numbers)


def define_flags() -> None:
    define_model()
    flags.DEFINE_list("tasks", "story,needle,multikey,values,cot", "of experiments/tasks/tasks.py")
    flags.DEFINE_integer("context_length", 1024, "tokens of prompt and answer", lower_bound=2)
    flags.DEFINE_integer("num_prompts", 20, "per task", lower_bound=1)
    flags.DEFINE_integer("seed", 7, "of the prompts", lower_bound=0)


PROGRAM = Program(main, define_flags, "results/diffkv_distributions", FILES)

if __name__ == "__main__":
    PROGRAM.run()
