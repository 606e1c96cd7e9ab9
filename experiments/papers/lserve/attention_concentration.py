"""The concentration of a model's attention, which limits gain and loss of page selection.

python -m experiments.papers.lserve.attention_concentration

For each layer and query head, three quantities are measured over the query rows that produce a
task's answers: the number of keys that hold 90 % of the attention mass, the mass on the first 4
tokens, and the mass on the last 64 tokens. If a model needs only its strongest key, its answers
cannot show whether a page selector is good. maps.png has the attention maps of some heads, from the
most to the least concentrated one, on the first prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib import run_record
from experiments.lib.plain_attention import check_model
from experiments.lib.typed_flags import Flags, flag
from experiments.study import Run, Setting, Study, Values
from experiments.tasks import tasks
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from models.families import family

FIRST, LAST, SHARE = 4, 64, 0.9
CELL, MAPS = 8, 10  # tokens of a side of a map's cell; number of maps
MEASURES = ("keys_for_90_percent", "mass_on_first_4", "mass_on_last_64")


@dataclass(frozen=True)
class AttentionFlags(Flags):
    model: str = flag("bundled", "'bundled', 'judge', a hub id or a folder", path=True)
    tasks: tuple[str, ...] = flag(
        ("needle", "multikey", "values", "count", "vote", "cot_long"),
        "of experiments/tasks/tasks.py",
    )
    context_length: int = flag(1024, "tokens of prompt and answer", least=1)
    num_prompts: int = flag(8, "per task", least=1)
    seed: int = flag(0, "of the prompts", least=0)


@dataclass(frozen=True)
class Row:
    """A query head of a layer, on a task.

    keys_median, keys_p95: number of keys that hold 90 % of the mass, median and 95th percentile
        over the query rows.
    mass_first, mass_last: mass on the first 4 and the last 64 tokens, mean over the query rows.
    """

    task: str
    layer: int
    head: int
    keys_median: float
    keys_p95: float
    mass_first: float
    mass_last: float


def noting_attend(config: ModelConfig, note: Callable[[jax.Array], jax.Array]):
    """Returns causal attention that writes `note(probabilities [H, T, T])` of each layer to the
    cache."""
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        T = q_TxHxD.shape[0]
        q = q_TxHxD.reshape(T, K, H // K, D).transpose(1, 2, 0, 3) * D**-0.5
        scores = jnp.einsum("kgtd,skd->kgts", q, k_TxKxD, preferred_element_type=jnp.float32)
        query, key = jnp.arange(T)[:, None], jnp.arange(T)
        probs = jax.nn.softmax(jnp.where(key <= query, scores, -1e30)).reshape(H, T, T)
        grouped = probs.reshape(K, H // K, T, T).astype(v_TxKxD.dtype)
        out = jnp.einsum("kgts,skd->tkgd", grouped, v_TxKxD)
        return out.reshape(T, H, D), cache.at[layer].set(note(probs))

    return attend


def measuring_attend(config: ModelConfig, num_rows: int, share: float = SHARE):
    """`noting_attend` of MEASURES of the last `num_rows` query rows, float32 [L, H, 3, num_rows].

    share: share of the mass that the keys of the first measure hold.
    """

    def measures(probs_HxTxT):
        T = probs_HxTxT.shape[-1]
        rows = probs_HxTxT[:, T - num_rows :]
        descending = -jnp.sort(-rows, axis=-1)
        keys = (jnp.cumsum(descending, axis=-1) < share).sum(-1) + 1
        query, key = jnp.arange(T)[:, None], jnp.arange(T)
        recent = key > query[T - num_rows :] - LAST
        measured = (keys, rows[..., :FIRST].sum(-1), jnp.where(recent, rows, 0).sum(-1))
        return jnp.stack(measured, axis=1)

    return noting_attend(config, measures)


def mapping_attend(config: ModelConfig):
    """`noting_attend` of each head's map, float32 [L, H, C, C]: the largest probability of CELL
    queries and CELL keys."""

    def cells(probs_HxTxT):
        H, T, _ = probs_HxTxT.shape
        C = T // CELL
        whole = probs_HxTxT[:, : C * CELL, : C * CELL]
        return whole.reshape(H, C, CELL, C, CELL).max((2, 4))

    return noting_attend(config, cells)


@partial(jax.jit, static_argnums=1)
def maps_of(params, config: ModelConfig, tokens_T):
    """The maps [L, H, C, C] of `mapping_attend`."""
    T = tokens_T.shape[0]
    empty = jnp.zeros((config.num_layers, config.num_heads, T // CELL, T // CELL))
    attend = mapping_attend(config)
    return family(config).forward(params, config, tokens_T, jnp.arange(T), attend, empty)[1]


def draw_maps(figure: Figure, maps_LxHxCxC: np.ndarray, keys_LxH: np.ndarray) -> None:
    """Draws the maps of heads at equal steps in the order of their numbers of keys."""
    order = np.argsort(keys_LxH, axis=None, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(MAPS, len(order))).astype(int)]
    for i, place in enumerate(chosen):
        layer, head = divmod(int(place), keys_LxH.shape[1])
        axes = figure.add_subplot(2, -(-len(chosen) // 2), i + 1)
        size = CELL * maps_LxHxCxC.shape[-1]
        image = axes.imshow(
            np.maximum(maps_LxHxCxC[layer, head], 1e-4), norm=LogNorm(1e-4, 1), cmap="viridis",
            extent=(0, size, size, 0),
        )  # fmt: skip
        axes.set_title(f"layer {layer}, head {head}: {keys_LxH[layer, head]:.0f} keys", size=8)
        axes.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=figure.axes, label="probability")


@partial(jax.jit, static_argnums=(1, 3, 4))
def _measure(params, config: ModelConfig, tokens_T, num_rows: int, share: float):
    noted = jnp.zeros((config.num_layers, config.num_heads, len(MEASURES), num_rows))
    positions = jnp.arange(tokens_T.shape[0])
    attend = measuring_attend(config, num_rows, share)
    return family(config).forward(params, config, tokens_T, positions, attend, noted)[1]


def measured(
    params, config: ModelConfig, tokenizer, prompts, share: float = SHARE
) -> list[np.ndarray]:
    """MEASURES [L, H, 3, rows] of each prompt, over the rows that produce a token of its answer."""
    found = []
    for prompt in tqdm(prompts, desc=prompts[0].task):
        tokens = tokenizer(prompt.prompt + prompt.answer)["input_ids"]
        answer = len(tokens) - len(tokenizer(prompt.prompt)["input_ids"])
        # The answer's last token is never an input.
        found.append(np.asarray(_measure(params, config, np.array(tokens[:-1]), answer, share)))
    return found


def rows_of(task: str, found: Sequence[np.ndarray]) -> Iterator[Row]:
    together = np.concatenate(found, axis=-1)
    for layer, head in np.ndindex(together.shape[:2]):
        keys, first, last = together[layer, head]
        yield Row(
            task, layer, head, float(np.median(keys)), float(np.percentile(keys, 95)),
            float(first.mean()), float(last.mean()),
        )  # fmt: skip


def prompts_of(flags: AttentionFlags, tokenizer) -> dict[str, list[tasks.TaskPrompt]]:
    """Prompts by task. Raises ValueError for an unknown task, for one that does not fit, and for a
    model whose attention is not plain."""
    check_model(flags.model, [flags.context_length])
    lengths = flags.context_length, flags.num_prompts, flags.seed
    return {task: tasks.make_prompts(task, *lengths, tokenizer) for task in flags.tasks}


def check(flags: AttentionFlags) -> None:
    prompts_of(flags, load_tokenizer(flags.model))


def measure(flags: AttentionFlags, run: Run) -> Iterator[Row]:
    tokenizer = load_tokenizer(flags.model)
    config, params = checkpoint.load(flags.model)
    for task, prompts in prompts_of(flags, tokenizer).items():
        found = measured(params, config, tokenizer, prompts)
        yield from rows_of(task, found)
        if task == flags.tasks[0]:
            tokens = tokenizer(prompts[0].prompt + prompts[0].answer)["input_ids"][:-1]
            figure = run_record.new_figure(13, 5.5)
            maps = np.asarray(maps_of(params, config, np.array(tokens)))
            draw_maps(figure, maps, np.median(found[0][:, :, 0], axis=-1))
            run_record.save_figure(figure, run.folder / "maps.png", dpi=110)


def values(_: AttentionFlags, rows: Sequence[Row]) -> Values:
    """Numbers by task: min, median and max of keys_median over the heads, the share of heads with
    more than 4 keys, and the means of mass_first and mass_last."""
    numbers: dict[str, float] = {}
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        keys = np.array([row.keys_median for row in mine])
        numbers |= {
            f"{task}_keys_for_90_percent_{name}": float(value)
            for name, value in zip(("min", "median", "max"), np.percentile(keys, (0, 50, 100)))
        }
        numbers[f"{task}_heads_with_more_than_4_keys"] = float((keys > 4).mean())
        for mass in ("mass_first", "mass_last"):
            numbers[f"{task}_{mass}_mean"] = float(np.mean([getattr(row, mass) for row in mine]))
    return numbers


def draw(_: AttentionFlags, figure: Figure, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row.task for row in rows))
    most = max(row.keys_median for row in rows)
    shape = 1 + max(row.layer for row in rows), 1 + max(row.head for row in rows)
    for i, task in enumerate(names):
        axes = figure.add_subplot(-(-len(names) // 3), min(3, len(names)), i + 1)
        keys = np.array([row.keys_median for row in rows if row.task == task]).reshape(shape)
        image = axes.imshow(keys, norm=LogNorm(1, max(2, most)), cmap="viridis", aspect="auto")
        for (layer, head), value in np.ndenumerate(keys) if keys.size <= 64 else ():
            colour = "white" if value < most**0.6 else "black"
            axes.text(
                head, layer, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7
            )
        axes.set(title=task, xlabel="query head", ylabel="layer", yticks=range(shape[0]))
    figure.colorbar(image, ax=figure.axes, label="keys with 90 % of the mass (median)")


def table(flags: AttentionFlags, rows: Sequence[Row]) -> str:
    numbers = values(flags, rows)
    title = "keys with 90 % of the attention mass"
    lines = [f"{title:36}{'min':>7}{'median':>8}{'max':>7}  heads > 4 keys"]
    for task in dict.fromkeys(row.task for row in rows):
        low, middle, high = (
            numbers[f"{task}_keys_for_90_percent_{name}"] for name in ("min", "median", "max")
        )
        many = numbers[f"{task}_heads_with_more_than_4_keys"]
        lines.append(f"{task:36}{low:7.0f}{middle:8.1f}{high:7.0f}{many:16.0%}")
    return "\n".join(lines)


STUDY = Study(
    __file__,
    title="How concentrated the attention of answers is (what LServe §3.5 rests on)",
    kind="analogue",
    claim="few keys hold most of a head's attention",
    rule="on every task 90 % of the median head's mass lies on at most 64 keys",
    holds=lambda v: all(n <= 64 for name, n in v.items() if "90_percent_median" in name),
    setting=Setting(
        "the judge model, six tasks at 1,024 tokens",
        "the paper's claim is of Llama-3-8B and longer contexts",
        "reduced",
    ),
    flags=AttentionFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    table=table,
    quick={"tasks": ("needle", "count"), "num_prompts": 2},
    full={"model": "judge"},
    minutes=(0.3, 8),
    size=(10, 4.8),
)

if __name__ == "__main__":
    STUDY.run()
