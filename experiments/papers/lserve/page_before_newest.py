"""Why selections that two or four tokens share lose answers of `cot` (LServe §3.5.3, Table 6).

python -m experiments.papers.lserve.page_before_newest

When a page has just begun, the page before it, with the statement generated last, is one candidate
of many. A selection for a token that needs little may miss it, and the next token shares the
selection. Each of --intervals is a system: the number of tokens that share a selection; further
systems always read the page before the newest, in place of the selected page of lowest score.

Prompts and right answers pass through the model once for each system, with masks written from the
definition of page selection: without engine, pages and kernels, so errors of these would show. An
answer is right if each of its tokens is the likeliest after the right tokens before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib.typed_flags import Flags, flag
from experiments.study import Run, Setting, Study, Values
from experiments.tasks import tasks
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from models.families import family
from models.full_attention import causal_attend

PAGE_SIZE, LOGICAL_PAGE = 64, 16
WITH_PAGE = (2, 4)  # intervals of the systems that always read the page before the newest


@dataclass(frozen=True)
class PageFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    task: str = flag("cot", "a task of experiments/tasks/tasks.py")
    context: int = flag(2048, "tokens of prompt and answer", least=1)
    num_prompts: int = flag(24, "prompts", least=1)
    budget: int = flag(1024, "tokens that a query reads, in whole pages", least=3 * PAGE_SIZE)
    intervals: tuple[int, ...] = flag((1, 2, 4, 8, 16), "tokens that share a selection", least=1)
    seed: int = flag(7, "of the prompts", least=0)


@dataclass(frozen=True)
class Row:
    """A prompt under a system.

    interval: tokens that share a selection.
    with_page: whether the page before the newest is always read.
    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    prompt: int
    interval: int
    with_page: bool
    first_wrong: int


@partial(jax.jit, static_argnums=1)
def prefill(params, config: ModelConfig, tokens_T, kv_Lx2xSxKxD):
    """The keys and values of a prompt, written to the first T of S places."""
    exact = causal_attend(config)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, kv):
        kv = kv.at[layer, :, : len(tokens_T)].set(jnp.stack([k_TxKxD, v_TxKxD]))
        return exact(layer, q_TxHxD, k_TxKxD, v_TxKxD, None)[0], kv

    positions = jnp.arange(len(tokens_T))
    return family(config).forward(params, config, tokens_T, positions, attend, kv_Lx2xSxKxD)[1]


@partial(jax.jit, static_argnums=(1, 6, 7))
def likeliest(
    params, config: ModelConfig, kv_Lx2xSxKxD, start, tokens_R, sources_R, count: int,
    with_page: bool,
):  # fmt: skip
    """[R] the likeliest token after each of R tokens from position `start` on.

    kv: [L, 2, S, K, D] keys and values of the tokens before `start`; S is a multiple of the page.
    sources: [R] the row whose query selects pages for the row.
    count: pages that a row reads, the newest included.
    with_page: whether the page before the newest is read in place of a selected one.
    """
    K, D, G = config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
    S = kv_Lx2xSxKxD.shape[2]
    at_R, pages = start + jnp.arange(len(tokens_R)), jnp.arange(S // PAGE_SIZE)
    newest = (at_R // PAGE_SIZE)[:, None, None]

    def attend(layer, q_RxHxD, k_RxKxD, v_RxKxD, cache):
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(kv_Lx2xSxKxD[layer, i], new, start, 0)
            for i, new in enumerate((k_RxKxD, v_RxKxD))
        )
        q = q_RxHxD.reshape(-1, K, G, D)
        selecting = q[sources_R]
        logical = keys.reshape(-1, PAGE_SIZE // LOGICAL_PAGE, LOGICAL_PAGE, K, D)
        bounds = "rkgd,pckd->rkgpc"
        scores_RxKxP = (
            jnp.einsum(bounds, jnp.maximum(selecting, 0), logical.max(2))
            + jnp.einsum(bounds, jnp.minimum(selecting, 0), logical.min(2))
        ).max((2, 4))
        if with_page:
            scores_RxKxP = jnp.where(pages == newest - 1, jnp.inf, scores_RxKxP)
        scores_RxKxP = jnp.where(pages < newest, scores_RxKxP, -jnp.inf)
        chosen = jax.lax.top_k(scores_RxKxP, count - 1)[1]
        read = jax.nn.one_hot(chosen, len(pages)).sum(2) > 0
        seen = jnp.repeat(read | (pages == newest), PAGE_SIZE, 2)
        seen &= jnp.arange(S) <= at_R[:, None, None]
        logits = jnp.einsum("rkgd,skd->rkgs", q, keys) * config.attention.scale
        probs = jax.nn.softmax(jnp.where(seen[:, :, None], logits, -jnp.inf))
        return jnp.einsum("rkgs,skd->rkgd", probs, values).reshape(-1, K * G, D), cache

    model = family(config)
    hidden, _ = model.forward(params, config, tokens_R, at_R, attend, None)
    return model.logits(params, config, hidden).argmax(-1)


def sources(start: int, rows: int, interval: int) -> np.ndarray:
    """[R] the row whose selection each row uses: of the last multiple of the interval, or the first
    row."""
    positions = start + np.arange(rows)
    return np.maximum(positions // interval * interval, start) - start


def answers(flags: PageFlags, params, config: ModelConfig, prompt, answer) -> Iterator[tuple]:
    """(interval, with_page, the answer's likeliest tokens) of each system. prompt, answer: token
    ids; the answer's first token is the likeliest after the prompt, which reads all pages."""
    T, R = len(prompt), len(answer) - 1
    S = -(-(T + R) // PAGE_SIZE) * PAGE_SIZE
    empty = jnp.zeros((config.num_layers, 2, S, config.num_kv_heads, config.head_dim))
    kv = prefill(params, config, np.array(prompt), empty)
    systems = [(n, False) for n in flags.intervals]
    systems += [(n, True) for n in flags.intervals if n in WITH_PAGE]
    for interval, with_page in systems:
        found = likeliest(
            params, config, kv, T, np.array(answer[:-1]), sources(T, R, interval),
            flags.budget // PAGE_SIZE, with_page,
        )  # fmt: skip
        yield interval, with_page, np.asarray(found)


def prompts_of(flags: PageFlags) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) as token ids. Raises ValueError for an unknown task, or one that does not
    fit."""
    tokenizer = load_tokenizer(flags.model)
    made = tasks.make_prompts(flags.task, flags.context, flags.num_prompts, flags.seed, tokenizer)
    found = []
    for each in made:
        prompt = tokenizer(each.prompt)["input_ids"]
        found.append((prompt, tokenizer(each.prompt + each.answer)["input_ids"][len(prompt) :]))
    return found


def check(flags: PageFlags) -> None:
    pages = min(len(p) for p, _ in prompts_of(flags)) // PAGE_SIZE
    if flags.budget // PAGE_SIZE > pages:
        raise ValueError(f"--budget is at most a prompt's {pages} whole pages of {PAGE_SIZE}")


def measure(flags: PageFlags, run: Run) -> Iterator[Row]:
    config, params = checkpoint.load(flags.model)
    for i, (prompt, answer) in enumerate(tqdm(prompts_of(flags), "prompts", leave=False)):
        if run.stopped():
            return
        for interval, with_page, found in answers(flags, params, config, prompt, answer):
            wrong = np.flatnonzero(found != answer[1:])
            yield Row(i, interval, with_page, int(wrong[0]) + 1 if len(wrong) else -1)


def name(interval: int, with_page: bool) -> str:
    return f"{interval}_with_page" if with_page else f"{interval}"


def values(_: PageFlags, rows: Sequence[Row]) -> Values:
    """right_N, right_N_with_page: right answers in percent. often_N: the most frequent index of a
    first wrong token; None without one."""
    numbers: dict[str, float | None] = {}
    for system in dict.fromkeys((row.interval, row.with_page) for row in rows):
        mine = [row.first_wrong for row in rows if (row.interval, row.with_page) == system]
        wrong = [at for at in mine if at >= 0]
        numbers[f"right_{name(*system)}"] = 100 * (1 - len(wrong) / len(mine))
        numbers[f"often_{name(*system)}"] = float(np.bincount(wrong).argmax()) if wrong else None
    return numbers


def draw(flags: PageFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes, numbers = figure.subplots(), values(flags, rows)
    systems = dict.fromkeys((row.interval, row.with_page) for row in rows)
    labels = [f"{n}{', page before the newest read' * page}" for n, page in systems]
    bars = axes.barh(labels, [numbers[f"right_{name(*system)}"] or 0 for system in systems])
    often = [numbers[f"often_{name(*system)}"] for system in systems]
    texts = ["" if at is None else f"first error mostly at token {at:.0f}" for at in often]
    axes.bar_label(bars, texts, padding=4, fontsize="small")
    axes.set(xlabel="right answers (%)", ylabel="tokens of a selection")


STUDY = Study(
    __file__,
    title="Selections just after a page has begun (LServe Table 6)",
    kind="analogue",
    claim="two and four tokens may share a selection if the page before the newest is always read",
    rule="with that page, both have at most 5 points fewer right answers than a selection for each "
    "token",
    holds=lambda v: all(v[f"right_{n}_with_page"] >= v["right_1"] - 5 for n in WITH_PAGE),
    setting=Setting(
        "the judge model, cot at 2,048 tokens, half of them read; a forward pass with masks",
        "the paper has no such figure",
        "reduced",
    ),
    flags=PageFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 2},
    minutes=(1, 3),
    size=(8, 3.6),
)

if __name__ == "__main__":
    STUDY.run()
