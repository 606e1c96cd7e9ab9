"""DiffKV's observations on attention scores, norms of values and critical tokens (DiffKV §3,
Figs. 2 to 5).

python -m experiments.papers.diffkv.fig02_distributions

Four quantities are measured over whole prompts of each task, and over parts of --texts, by layer
and KV head. The number of critical tokens differs between layers, heads and prompts.

    significance     mean attention probability of later tokens on a token, maximum over the KV
                     head's query heads
    norm             norm of the token's value
    critical tokens  number of tokens that hold 95 % of a prompt's significance
    pruned           share of the tokens that DiffKV drops from a prompt (§4), at --alpha_l
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from tqdm import tqdm

from experiments.lib import shipped, text_files
from experiments.lib.plain_attention import check_model
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Setting, Study, Values
from experiments.tasks import tasks
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from models.families import family
from paged.kv_cache.diffkv.compression import Rules
from pallas_kernels.prompt_attention import prompt_attention

SHARE = 0.95
MOST_LABELS = 16  # of heads
WINDOW = Rules.window


@dataclass(frozen=True)
class PromptFlags(Flags):
    model: str = flag("bundled", "'bundled', 'judge', a hub id, or a folder", path=True)
    tasks: tuple[str, ...] = flag(
        ("story", "needle", "multikey", "values", "cot"), "of experiments/tasks/tasks.py"
    )
    context_length: int = flag(1024, "tokens of prompt and answer", least=2)
    num_prompts: int = flag(20, "per task and text", least=1)
    seed: int = flag(7, "of the prompts", least=0)
    texts: tuple[str, ...] = flag((), "text files, cut into prompts", path=True)
    alpha_l: float = flag(0.1, "of low precision, below which tokens are dropped", least=0)


@dataclass(frozen=True)
class Row:
    """A KV head on a task or text.

    prompts: number of prompts.
    tokens: tokens of the first prompt, without its last token.
    critical_mean, critical_std: mean and deviation over prompts of the number of critical tokens.
    pruned: share of tokens that DiffKV drops from the prompts.
    score_*, norm_*: 0.1th, 50th and 99.9th percentiles of significance and of values' norms.
    """

    task: str
    layer: int
    head: int
    prompts: int
    tokens: int
    critical_mean: float
    critical_std: float
    pruned: float
    score_p01: float
    score_p50: float
    score_p999: float
    norm_p01: float
    norm_p50: float
    norm_p999: float


class Prompt(NamedTuple):
    """Measurements of a prompt without its last token, to which no later token attends.

    scores: significance [L, T, K] of tokens.
    norms: norms [L, T, K] of the tokens' values.
    """

    scores: np.ndarray
    norms: np.ndarray

    def critical(self) -> np.ndarray:
        """The least number [L, K] of tokens that hold `SHARE` of the significance."""
        descending = -np.sort(-self.scores, axis=1)
        sums = np.cumsum(descending, axis=1)
        return (sums < SHARE * sums[:, -1:]).sum(1) + 1

    def pruned(self, alpha_l: float) -> np.ndarray:
        """The share [L, K] of tokens that DiffKV drops (`Rules.of_prompts`)."""
        T = self.scores.shape[1] + 1
        below = self.scores < alpha_l / np.arange(1, T)[:, None]
        below[:, max(0, T - WINDOW) :] = False
        return below.sum(1) / T


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


def tokens_of(tokenizer, prompts: Sequence[tasks.TaskPrompt]) -> list[np.ndarray]:
    """The tokens of prompts with their answers."""
    texts = [prompt.prompt + prompt.answer for prompt in prompts]
    return [np.array(tokenizer(text)["input_ids"], np.int32) for text in texts]


def over_prompts(params, config: ModelConfig, name: str, prompts) -> list[Prompt]:
    found = []
    for tokens in tqdm(prompts, desc=name):
        scores, norms = _measure(params, config, tokens)
        found.append(Prompt(np.asarray(scores)[:, :-1], np.asarray(norms)[:, :-1]))
    return found


def rows_of(task: str, found: Sequence[Prompt], alpha_l: float = 0.0) -> Iterator[Row]:
    critical = np.stack([prompt.critical() for prompt in found])
    pruned = np.mean([prompt.pruned(alpha_l) for prompt in found], 0)
    for layer, head in np.ndindex(critical.shape[1:]):
        counts, percentiles = critical[:, layer, head], []
        for index in (0, 1):
            values = np.concatenate([prompt[index][layer, :, head] for prompt in found])
            percentiles += np.percentile(values, (0.1, 50, 99.9)).tolist()
        yield Row(
            task, layer, head, len(found), len(found[0].scores[0]), float(counts.mean()),
            float(counts.std()), float(pruned[layer, head]), *percentiles,
        )  # fmt: skip


def prompts_of(flags: PromptFlags) -> dict[str, list[np.ndarray]]:
    """Tokens of prompts, by task and by the name of a text. Raises ValueError for an unknown task,
    for too long a context, for too short a text, for texts whose names are not their own, and for a
    model whose attention is not plain."""
    check_model(flags.model, [flags.context_length])
    tokenizer, length = load_tokenizer(flags.model), flags.context_length
    found = {
        task: tokens_of(
            tokenizer, tasks.make_prompts(task, length, flags.num_prompts, flags.seed, tokenizer)
        )
        for task in flags.tasks
    }
    first = tokenizer("")["input_ids"]  # of each prompt
    for path in map(shipped.found, flags.texts):
        if (name := Path(path).name) in found:
            raise ValueError(
                f"--texts: {path} has the name of a task or of another text; rename it"
            )
        text = text_files.read_text(path)
        tokens, size = tokenizer(text, add_special_tokens=False)["input_ids"], length - len(first)
        if not (count := min(flags.num_prompts, len(tokens) // size)):
            raise ValueError(f"{path}: has {len(tokens)} tokens; a prompt needs {size}")
        parts = (tokens[i * size : (i + 1) * size] for i in range(count))
        found[name] = [np.array(first + part, np.int32) for part in parts]
    return found


@functools.lru_cache(maxsize=1)
def found_of(flags: PromptFlags) -> dict[str, list[Prompt]]:
    """Measured prompts by task, cached because the rows and the figure both need them."""
    config, params = checkpoint.load(flags.model, "float32")
    prompts = prompts_of(flags)
    return {name: over_prompts(params, config, name, asked) for name, asked in prompts.items()}


def measure(flags: PromptFlags, _) -> Iterator[Row]:
    for task, found in found_of(flags).items():
        yield from rows_of(task, found, flags.alpha_l)


def check(flags: PromptFlags) -> None:
    prompts_of(flags)


def orders(values: np.ndarray) -> float:
    """Orders of magnitude between the least and the largest positive value."""
    positive = values[values > 0]
    return float(np.log10(positive.max() / positive.min()))


def values(flags: PromptFlags, rows: Sequence[Row]) -> Values:
    """The values of `summarise`, without those of texts, and

    critical_range_most_head: largest range over the tasks of a head's mean of critical tokens.
    pruned_NAME: share of tokens that DiffKV drops, by task and text.
    """
    found, ranges, numbers = found_of(flags), dict[tuple[int, int], list[float]](), {}
    of_tasks = [row for row in rows if row.task in flags.tasks]
    for row in of_tasks:
        ranges.setdefault((row.layer, row.head), []).append(row.critical_mean)
    numbers["critical_range_most_head"] = max(max(each) - min(each) for each in ranges.values())
    for name in found:
        mine = [row for row in rows if row.task == name]
        numbers[f"pruned_{name}"] = float(np.mean([row.pruned for row in mine]))

    return summarise(of_tasks, {task: found[task] for task in flags.tasks}) | numbers


def summarise(rows: Sequence[Row], found: Mapping[str, list[Prompt]]) -> dict[str, float]:
    everything = [prompt for prompts in found.values() for prompt in prompts]
    layers = range(len(everything[0].scores))
    both = {
        name: [
            orders(np.concatenate([p[i][layer].ravel() for p in everything])) for layer in layers
        ]
        for name, i in (("score", 0), ("norm", 1))
    }
    numbers = {f"{name}_orders_of_magnitude": max(values) for name, values in both.items()}
    means = {(r.task, r.layer, r.head): r.critical_mean for r in rows}
    numbers["critical_tokens_least_head"] = min(means.values())
    numbers["critical_tokens_most_head"] = max(means.values())
    for task in found:
        of_task = [mean for (name, _, _), mean in means.items() if name == task]
        numbers[f"critical_tokens_{task}"] = float(np.mean(of_task))
    return numbers


def draw(flags: PromptFlags, figure: Figure, rows: Sequence[Row]) -> None:
    found = {task: found_of(flags)[task] for task in flags.tasks}
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
    every = -(-len(names) // MOST_LABELS)
    by_head.set_yticks(range(0, len(names), every), names[::every])
    by_head.set(xlabel="tokens", title="by layer.head (Fig. 5)")
    by_head.tick_params(axis="y", labelsize=6)
    for task in found:
        means = [row.critical_mean for row in rows if row.task == task]
        by_task.plot(sorted(means), label=task, marker=".")
    by_task.set(xlabel="heads, sorted", ylabel="tokens", title="by task")
    by_task.legend(fontsize="x-small")


def _draw_distributions(axes: Axes, prompts: Sequence[Prompt], index: int, title: str) -> None:
    """Draws the share of tokens with a value of at most x, for three layers."""
    last = len(prompts[0].scores) - 1
    for layer in sorted({0, last // 2, last}):
        values = np.sort(np.concatenate([prompt[index][layer].ravel() for prompt in prompts]))
        at = np.linspace(0, len(values) - 1, 400).astype(int)
        axes.semilogx(values[at], at / len(values), label=f"layer {layer}")
    axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    axes.set(ylabel="share of tokens below", title=title)
    axes.legend(fontsize="x-small")


def table(flags: PromptFlags, rows: Sequence[Row]) -> str:
    lines = [f"{'tokens with 95 %':28}{'mean':>8}{'least':>8}{'most':>8}{'pruned %':>10}"]
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        means, pruned = [row.critical_mean for row in mine], np.mean([row.pruned for row in mine])
        lines.append(
            f"{task:28}{np.mean(means):8.1f}{min(means):8.1f}{max(means):8.1f}{100 * pruned:10.2f}"
        )
    return "\n".join(lines)


STUDY = Study(
    __file__,
    title="Attention scores, norms of values, and tokens that matter (DiffKV §3, Figs. 2 to 5)",
    kind="analogue",
    claim="scores span far more orders of magnitude than norms: seven against two",
    rule="scores span at least twice the orders of magnitude of norms",
    holds=lambda v: v["score_orders_of_magnitude"] >= 2 * v["norm_orders_of_magnitude"],
    setting=Setting(
        "the judge model, 20 prompts of each of five tasks, 1,024 tokens; pruning also on "
        "legal text and numbers",
        "the paper measures Llama-3-8B on articles of Wikitext",
        "reduced",
    ),
    flags=PromptFlags,
    measure=measure,
    values=values,
    paper={"score_orders_of_magnitude": 7, "norm_orders_of_magnitude": 2},
    check=check,
    draw=draw,
    table=table,
    quick={"num_prompts": 2},
    full={
        "model": "judge",
        "texts": ("LICENSE", "models/bundled/diffkv_compression.json"),
    },
    minutes=(0.5, 3),
    size=(12, 7),
)

if __name__ == "__main__":
    STUDY.run()
