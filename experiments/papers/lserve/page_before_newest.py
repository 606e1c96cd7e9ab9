"""Which page shared selections miss in answers of `cot` (LServe §3.5.3, Table 6).

python -m experiments.papers.lserve.page_before_newest

Each of --intervals is a system: the number of tokens that share a selection. Further systems always
read the page before the newest, or as a control the page before that one, in place of the selected
page of lowest score. The place of a selection in an answer depends on the prompt's length, so
several --contexts show whether a length is a special case.

Right answers pass through the model once for each system, with masks written from the definition of
page selection, without engine and kernels (`experiments/papers/masked.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.lib.plain_attention import check_model
from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.papers import masked
from experiments.study import Run, Setting, Study, Values
from models.config import ModelConfig

PAGE_SIZE, LOGICAL_PAGE = 64, 16
LOSS, LEFT, APART = 10, 5, 5  # percentage points
MOST_BARS = 3  # contexts that are drawn as bars
READ = {0: "", 1: "_with_page", 2: "_with_control"}  # pages before the newest -> suffix of values


@dataclass(frozen=True)
class PageFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    task: str = flag("cot", "a task of experiments/tasks/tasks.py")
    contexts: tuple[int, ...] = flag((2047, 2048), "tokens of prompt and answer", least=1)
    num_prompts: int = flag(40, "prompts of each context", least=1)
    budget: int = flag(1024, "tokens that a query reads, in whole pages", least=3 * PAGE_SIZE)
    intervals: tuple[int, ...] = flag((1, 2, 4, 8, 16), "tokens that share a selection", least=1)
    seed: int = flag(7, "of the prompts", least=0)


@dataclass(frozen=True)
class Row:
    """A prompt under a system.

    interval: tokens that share a selection.
    always: the page that is always read, by its distance from the newest page; 0 for none.
    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    context: int
    prompt: int
    interval: int
    always: int
    first_wrong: int


def pages_read(scores_RxKxM, newest_R, count: int, always):
    """[R, K, M] bool: the newest page, and the `count` - 1 older pages of highest score; among
    these the page `always` before the newest, if it is not 0."""
    pages, newest = jnp.arange(scores_RxKxM.shape[2]), newest_R[:, None, None]
    scores = jnp.where(pages == newest - always, jnp.inf, scores_RxKxM)
    scores = jnp.where(pages < newest, scores, -jnp.inf)
    chosen = jax.lax.top_k(scores, count - 1)[1]
    return (jax.nn.one_hot(chosen, len(pages)).sum(2) > 0) | (pages == newest)


def seen(
    layer, q_RxKxGxD, keys_SxKxD, at_R, sources_R, always, count: int, logical: int = LOGICAL_PAGE,
    page: int = PAGE_SIZE,
):  # fmt: skip
    """The tokens [R, K, S] of `pages_read`. sources: [R] the row whose query selects pages for the
    row. page, logical: tokens of a page and of a logical page. Logical pages of one token make
    scores exact."""
    bounds = page_bounds(q_RxKxGxD[sources_R], keys_SxKxD, logical)
    scores = bounds.reshape(*bounds.shape[:2], -1, page // logical).max(3)
    return jnp.repeat(pages_read(scores, at_R // page, count, always), page, 2)


def page_bounds(q_RxKxGxD, keys_SxKxD, page: int):
    """[R, K, S // page] the largest product of a KV head's queries with any key between the minimum
    and the maximum of a page's keys."""
    keys = keys_SxKxD.reshape(-1, page, *keys_SxKxD.shape[1:])
    return (
        jnp.einsum("rkgd,mkd->rkgm", jnp.maximum(q_RxKxGxD, 0), keys.max(1))
        + jnp.einsum("rkgd,mkd->rkgm", jnp.minimum(q_RxKxGxD, 0), keys.min(1))
    ).max(2)


def sources(start: int, rows: int, interval: int) -> np.ndarray:
    """[R] the row whose selection each row uses: of the last multiple of the interval, or the first
    row."""
    positions = start + np.arange(rows)
    return np.maximum(positions // interval * interval, start) - start


def answers(
    flags: PageFlags, params, config: ModelConfig, question: masked.Question
) -> Iterator[tuple]:
    """(interval, always, the likeliest tokens after each but the last of the answer's) of each
    system."""
    asked, count = masked.Asked(params, config, question), flags.budget // PAGE_SIZE
    for interval, always in product(flags.intervals, READ):
        rows = sources(asked.start, len(asked.tokens), interval)
        yield interval, always, asked.likeliest(seen, rows, always, count=count)


def of_prompt(flags: PageFlags, context: int, index: int) -> masked.Rows:
    config, params = masked.loaded(flags.model)
    question = masked.questions_of(flags, flags.task, context)[index]
    found = answers(flags, params, config, question)
    return masked.Rows(
        [[context, index, n, always, question.first_wrong(tokens)] for n, always, tokens in found]
    )


def check(flags: PageFlags) -> None:
    check_model(flags.model, flags.contexts)
    if any(PAGE_SIZE % interval for interval in flags.intervals):
        raise ValueError(f"--intervals must divide {PAGE_SIZE}, the tokens of a page")
    masked.check_distinct(intervals=flags.intervals, contexts=flags.contexts)
    for context in flags.contexts:
        check_budget(flags.budget, context, masked.questions_of(flags, flags.task, context))


def check_budget(budget: int, context: int, questions: Sequence[masked.Question]) -> None:
    """Raises ValueError for a prompt with fewer whole pages of PAGE_SIZE tokens than the budget."""
    pages = min(len(each.prompt) for each in questions) // PAGE_SIZE
    if budget // PAGE_SIZE > pages:
        raise ValueError(
            f"the shortest prompt of a context of {context} has {pages} whole pages of {PAGE_SIZE} "
            f"tokens, fewer than a budget of {budget}"
        )


def measure(flags: PageFlags, run: Run) -> Iterator[Row]:
    with refusals():
        masked.loaded(flags.model)
    for fields in masked.fields_of(run, of_prompt, flags, flags.contexts, flags.num_prompts):
        yield Row(*fields)


def values(_: PageFlags, rows: Sequence[Row]) -> Values:
    """By context C and interval N, in percent: right_C_N, and with a page that is always read
    right_C_N_with_page and right_C_N_with_control, right answers; often_C_N, the share of the most
    frequent first wrong token in all first wrong tokens; at_C_N, the index of this token. Over all
    contexts: pooled_N, pooled_N_with_page and pooled_N_with_control, right answers."""
    numbers: dict[str, float | None] = {}
    for interval, always in dict.fromkeys((row.interval, row.always) for row in rows):
        pooled = [r.first_wrong for r in rows if (r.interval, r.always) == (interval, always)]
        numbers[f"pooled_{interval}{READ[always]}"] = masked.percent_right(pooled)
    for system in dict.fromkeys((row.context, row.interval, row.always) for row in rows):
        context, interval, always = system
        mine = [r.first_wrong for r in rows if (r.context, r.interval, r.always) == system]
        wrong = [at for at in mine if at >= 0]
        numbers[f"right_{context}_{interval}{READ[always]}"] = masked.percent_right(mine)
        if not always:
            at = int(np.bincount(wrong).argmax()) if wrong else None
            share = 100 * wrong.count(at) / len(wrong) if at is not None else None
            numbers |= {f"often_{context}_{interval}": share, f"at_{context}_{interval}": at}
    return numbers


def holds(v: Mapping[str, float]) -> bool:
    right = {name.removeprefix("right_"): x for name, x in v.items() if name.startswith("right_")}
    plain = {name: x for name, x in right.items() if "with" not in name}
    alone = {name.partition("_")[0]: x for name, x in plain.items() if name.endswith("_1")}
    lost = [name for name, x in plain.items() if x <= alone[name.partition("_")[0]] - LOSS]
    if not lost:
        raise ValueError("no interval loses answers, so there is nothing to explain")
    return all(
        right[f"{name}_with_page"] >= alone[name.partition("_")[0]] - LEFT
        and right[f"{name}_with_control"] <= right[f"{name}_with_page"] - APART
        for name in lost
    )


def draw(flags: PageFlags, figure: Figure, rows: Sequence[Row]) -> None:
    numbers = values(flags, rows)
    labels = ("selected pages", "with the page before the newest", "with the page before that")
    contexts = list(dict.fromkeys(row.context for row in rows))
    if len(contexts) > MOST_BARS:
        draw_contexts(flags, figure, numbers, contexts)
        return
    for axes, context in zip(figure.subplots(1, len(contexts), squeeze=False)[0], contexts):
        x = np.arange(len(flags.intervals))
        for i, (suffix, label) in enumerate(zip(READ.values(), labels)):
            right = [numbers[f"right_{context}_{n}{suffix}"] or 0.0 for n in flags.intervals]
            axes.bar(x + 0.27 * (i - 1), right, 0.25, label=label)
        axes.set(
            title=f"{context:,} tokens", xlabel="tokens of a selection", ylabel="right answers (%)",
            xticks=x, xticklabels=[str(n) for n in flags.intervals], ylim=(0, 118),
        )  # fmt: skip
    figure.axes[0].legend(frameon=False, fontsize="small", ncols=2)


def draw_contexts(
    flags: PageFlags, figure: Figure, numbers: Values, contexts: Sequence[int]
) -> None:
    axes = figure.subplots()
    for n in flags.intervals:
        right = [numbers[f"right_{context}_{n}"] or 0.0 for context in contexts]
        axes.plot(contexts, right, marker="o", label=f"{n} tokens of a selection")
    axes.set(xlabel="tokens of prompt and answer", ylabel="right answers (%)", ylim=(-3, 103))
    axes.legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="The page that shared selections miss (LServe Table 6)",
    kind="analogue",
    claim="answers that are lost because tokens share a selection are right if the page before the "
    "newest is always read",
    rule=f"where an interval loses {LOSS} points or more to a selection for each token, at most "
    f"{LEFT} are lost with that page, and the page before it is at least {APART} points worse",
    holds=holds,
    setting=Setting(
        "the judge model, cot at 2,047 and 2,048 tokens, 1,024 of them read; a forward pass",
        "the paper has no such figure",
        "reduced",
    ),
    flags=PageFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 2},
    minutes=(1, 12),
    size=(10, 3.8),
)

if __name__ == "__main__":
    STUDY.run()
