"""How concentrated a model's attention is, and so what selecting pages can gain and lose.

For each layer and query head it measures, over the rows that produce the answers of a task, how
many keys hold 90 % of the attention mass, and the mass on the first 4 and on the last 64 tokens. A
model that needs only its strongest key cannot show whether a page selector is good.

    python -m experiments.figures.attention_concentration --model=bundled
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.flags import define_model
from experiments.lib.program import Options, Program, refusals
from experiments.tasks import tasks
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from models.families import family

FIRST, LAST, SHARE = 4, 64, 0.9
MEASURES = ("keys_for_90_percent", "mass_on_first_4", "mass_on_last_64")


def define_flags() -> None:
    define_model()
    flags.DEFINE_list(
        "tasks", "needle,multikey,values,count,vote,cot_long", "of experiments/tasks/tasks.py"
    )
    flags.DEFINE_integer("context_length", 1024, "tokens of prompt and answer", lower_bound=1)
    flags.DEFINE_integer("num_prompts", 8, "per task", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the prompts", lower_bound=0)


def measuring_attend(config: ModelConfig, num_rows: int, share: float = SHARE):
    """Plain causal attention that writes MEASURES of its last `num_rows` rows to the cache.

    The cache is float32 [L, H, 3, num_rows]. share: of the mass that the first measure's keys hold.
    """
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        T = q_TxHxD.shape[0]
        q = q_TxHxD.reshape(T, K, H // K, D).transpose(1, 2, 0, 3) * D**-0.5
        scores = jnp.einsum("kgtd,skd->kgts", q, k_TxKxD, preferred_element_type=jnp.float32)
        query, key = jnp.arange(T)[:, None], jnp.arange(T)
        probs = jax.nn.softmax(jnp.where(key <= query, scores, -1e30)).reshape(H, T, T)
        rows = probs[:, T - num_rows :]
        descending = -jnp.sort(-rows, axis=-1)
        keys = (jnp.cumsum(descending, axis=-1) < share).sum(-1) + 1
        recent = key > query[T - num_rows :] - LAST
        measured = (keys, rows[..., :FIRST].sum(-1), jnp.where(recent, rows, 0).sum(-1))
        cache = cache.at[layer].set(jnp.stack(measured, axis=1))
        grouped = probs.reshape(K, H // K, T, T).astype(v_TxKxD.dtype)
        out = jnp.einsum("kgts,skd->tkgd", grouped, v_TxKxD)
        return out.reshape(T, H, D), cache

    return attend


@partial(jax.jit, static_argnums=(1, 3, 4))
def _measure(params, config: ModelConfig, tokens_T, num_rows: int, share: float):
    noted = jnp.zeros((config.num_layers, config.num_heads, len(MEASURES), num_rows))
    positions = jnp.arange(tokens_T.shape[0])
    attend = measuring_attend(config, num_rows, share)
    return family(config).forward(params, config, tokens_T, positions, attend, noted)[1]


def measure(
    params, config: ModelConfig, tokenizer, prompts, share: float = SHARE
) -> list[np.ndarray]:
    """For each prompt MEASURES [L, H, 3, rows] of all rows that produce a token of its answer."""
    found = []
    for prompt in tqdm(prompts, desc=prompts[0].task):
        tokens = tokenizer(prompt.prompt + prompt.answer)["input_ids"]
        answer = len(tokens) - len(tokenizer(prompt.prompt)["input_ids"])
        # The answer's last token is never an input.
        found.append(np.asarray(_measure(params, config, np.array(tokens[:-1]), answer, share)))
    return found


def table(task: str, measured: Sequence[np.ndarray]) -> list[dict]:
    """One row for each layer and head."""
    rows, together = [], np.concatenate(measured, axis=-1)
    for layer, head in np.ndindex(together.shape[:2]):
        keys, first, last = together[layer, head]
        row = dict(task=task, layer=layer, head=head)
        row |= dict(keys_median=float(np.median(keys)), keys_p95=float(np.percentile(keys, 95)))
        rows.append(row | dict(mass_first=float(first.mean()), mass_last=float(last.mean())))
    return rows


def summarise(rows: list[dict]) -> dict[str, float]:
    """For each task, how layers and heads differ, and how many heads need many keys."""
    summary: dict[str, float] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        keys = np.array([row["keys_median"] for row in rows if row["task"] == task])
        summary |= {
            f"{task}_keys_for_90_percent_{name}": float(value)
            for name, value in zip(("min", "median", "max"), np.percentile(keys, (0, 50, 100)))
        }
        summary[f"{task}_heads_with_more_than_4_keys"] = float((keys > 4).mean())
        for mass in ("mass_first", "mass_last"):
            values = [row[mass] for row in rows if row["task"] == task]
            summary[f"{task}_{mass}_mean"] = float(np.mean(values))
    return summary


def plot(rows: list[dict], path: Path, title: str) -> None:
    """A map for each task: rows are layers, columns heads, colours and numbers the keys."""
    names = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(
        figsize=(3.4 * min(3, len(names)), 2.4 * -(-len(names) // 3)), layout="constrained"
    )
    most = max(row["keys_median"] for row in rows)
    for i, task in enumerate(names):
        axes = figure.add_subplot(-(-len(names) // 3), min(3, len(names)), i + 1)
        own = [row for row in rows if row["task"] == task]
        shape = 1 + max(r["layer"] for r in own), 1 + max(r["head"] for r in own)
        keys = np.array([row["keys_median"] for row in own]).reshape(shape)
        image = axes.imshow(keys, norm=LogNorm(1, max(2, most)), cmap="viridis", aspect="auto")
        if keys.size <= 64:
            for (layer, head), value in np.ndenumerate(keys):
                colour = "white" if value < most**0.6 else "black"
                axes.text(
                    head, layer, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7
                )
        axes.set(title=task, xlabel="query head", ylabel="layer")
        axes.set_yticks(range(shape[0]))
    figure.colorbar(image, ax=figure.axes, label="keys with 90 % of the mass (median)")
    figure.suptitle(title, fontsize="medium")
    run_record.save_figure(figure, path, dpi=130)


def main(options: Options) -> None:
    output_dir = Path(options.output_dir)
    with refusals():
        tokenizer = load_tokenizer(options.model)
        prompts = {
            task: tasks.make_prompts(
                task, options.context_length, options.num_prompts, options.seed, tokenizer
            )
            for task in options.tasks
        }
        if not prompts:
            raise ValueError("--tasks must name at least one")
        config, params = checkpoint.load(options.model)
    rows = []
    for task in prompts:
        rows += table(task, measure(params, config, tokenizer, prompts[task]))
    run_record.write_csv(output_dir, "attention.csv", rows)
    plot(rows, output_dir / "attention.png", f"{options.model}, {options.context_length} tokens")
    summary = summarise(rows)
    report = dict(
        flags=vars(options),
        weights_hash=checkpoint.weights_hash(options.model),
        environment=run_record.describe_environment(),
        rows=rows,
    )
    run_record.write_json(output_dir, "report.json", report)
    run_record.write_summary(output_dir, summary)
    print(
        f"{'keys with 90 % of the attention mass':36}{'min':>7}{'median':>8}{'max':>7}"
        "  heads > 4 keys"
    )
    for task in options.tasks:
        low, middle, high = (
            summary[f"{task}_keys_for_90_percent_{name}"] for name in ("min", "median", "max")
        )
        many = summary[f"{task}_heads_with_more_than_4_keys"]
        print(f"{task:36}{low:7.0f}{middle:8.1f}{high:7.0f}{many:16.0%}")


PROGRAM = Program(
    main, define_flags, "results/attention_concentration", ("attention.csv", "attention.png")
)

if __name__ == "__main__":
    PROGRAM.run()
