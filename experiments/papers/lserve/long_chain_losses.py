"""What long chains lose to streaming heads and to page selection (LServe §3.5, Table 4).

    python -m experiments.papers.lserve.long_chain_losses

The systems of `SYSTEMS` differ in the heads that stream, in the tokens that share a selection of
pages, and in the pages' scores. `lserve` is LServe as Table 4 asks it. Half of the heads stream, by
their gates.

A prompt passes through the model once with streaming heads, and once without. Right answers pass
through it once for each system, with masks written from the definitions, without engine and kernels
(`experiments/papers/masked.py`).
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.lib.program import refusals
from experiments.lib.typed_flags import Flags, flag
from experiments.papers import masked
from experiments.papers.lserve import page_before_newest as pages
from experiments.papers.lserve.gates import JUDGE_GATES, gates_of
from experiments.papers.lserve.page_before_newest import LOGICAL_PAGE, PAGE_SIZE
from experiments.study import Run, Setting, Study, Values
from models import checkpoint
from models.config import ModelConfig
from paged.kv_cache.lserve.options import Options

LOSS, NEAR = 10, 5  # percentage points


@dataclass(frozen=True)
class System:
    """The tokens that a query sees.

    text: the same in words.
    streams: whether half of the heads stream.
    interval: tokens that share a selection in heads that do not stream; 0: they read all pages.
    logical: tokens of a logical page; with 1, scores are exact.
    always: a page that is always read, by its distance from the newest page; 0 for none.
    """

    text: str
    streams: bool = False
    interval: int = 0
    logical: int = LOGICAL_PAGE
    always: int = 0


SYSTEMS = {
    "dense": System("all tokens"),
    "streaming": System("half of the heads stream, others read all tokens", streams=True),
    "selected_1": System("all heads dense, pages selected for each token", interval=1),
    "selected_4": System("all heads dense, pages selected for 4 tokens", interval=4),
    "exact_4": System("the same, by exact scores", interval=4, logical=1),
    "lserve": System("LServe: half stream, pages selected for 4 tokens", streams=True, interval=4),
    "lserve_with_page": System(
        "LServe, and the page before the newest", streams=True, interval=4, always=1
    ),
    "lserve_with_control": System(
        "LServe, and the page before that one", streams=True, interval=4, always=2
    ),
}


@dataclass(frozen=True)
class LossFlags(Flags):
    model: str = flag("judge", "'bundled', 'judge', a hub id or a folder", path=True)
    task: str = flag("cot_long", "a task of experiments/tasks/tasks.py")
    context: int = flag(1024, "tokens of prompt and answer", least=1)
    num_prompts: int = flag(100, "prompts", least=1)
    gates: str = flag(JUDGE_GATES, "as --lserve_gates", path=True)
    budget: int = flag(512, "tokens that a query reads, in whole pages", least=3 * PAGE_SIZE)
    seed: int = flag(7, "of the prompts", least=0)


@dataclass(frozen=True)
class Row:
    """A prompt under a system.

    first_wrong: index of the answer's first wrong token; -1 if the answer is right.
    """

    prompt: int
    system: str
    first_wrong: int


@dataclass(frozen=True)
class Rows:
    """The rows of a prompt, as `Run.once` keeps them."""

    fields: list[list]


def window(at_R, places: int):
    """[R, 1, S] bool: the tokens that a streaming head's query at each position sees (§3.3), and
    later tokens."""
    at, first = jnp.arange(places), at_R // PAGE_SIZE * PAGE_SIZE - Options.local
    return ((at < Options.sink) | (at >= first[:, None]))[:, None]


def seen(
    layer, q_RxKxGxD, keys_SxKxD, at_R, streams_LxK, sources_R, *, selects: bool, count: int,
    logical: int, always: int,
):  # fmt: skip
    """[R, K, S] the window in a streaming head; otherwise the pages read, or everything."""
    read = jnp.ones((1, 1, len(keys_SxKxD)), bool)
    if selects:
        read = pages.seen(
            layer, q_RxKxGxD, keys_SxKxD, at_R, sources_R, always, count=count, logical=logical
        )
    return jnp.where(streams_LxK[layer][:, None], window(at_R, len(keys_SxKxD)), read)


@functools.cache
def prompt_attention(config: ModelConfig):
    """An attention of prompts with streaming heads. Its state [L, K] bool: the streaming heads."""

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, streams_LxK):
        at = jnp.arange(len(q_TxHxD))
        q = q_TxHxD.reshape(len(at), config.num_kv_heads, -1, config.head_dim)
        mask = jnp.where(streams_LxK[layer][:, None], window(at, len(at)), True)
        mask &= at <= at[:, None, None]
        out = masked.attention(q, k_TxKxD, v_TxKxD, mask, config.attention.scale)
        return out.reshape(q_TxHxD.shape), streams_LxK

    return attend


def answers(
    budget: int, params, config: ModelConfig, streams_LxK: np.ndarray, question: masked.Question
) -> Iterator[tuple[str, np.ndarray]]:
    """The likeliest tokens after each but the last of the answer's, by system."""
    heads = {True: jnp.asarray(streams_LxK), False: jnp.zeros_like(streams_LxK)}
    asked = {
        streams: masked.Asked(params, config, question, prompt_attention(config), of)
        for streams, of in heads.items()
    }
    for name, system in SYSTEMS.items():
        mine = asked[system.streams]
        rows = pages.sources(mine.start, len(mine.tokens), system.interval or 1)
        yield name, mine.likeliest(
            seen, heads[system.streams], rows, selects=system.interval > 0,
            count=budget // PAGE_SIZE, logical=system.logical, always=system.always,
        )  # fmt: skip


@functools.lru_cache(maxsize=1)
def loaded(model: str):
    return checkpoint.load(model)


@functools.lru_cache(maxsize=1)
def questions_of(flags: LossFlags) -> list[masked.Question]:
    return masked.questions(flags.model, flags.task, flags.context, flags.num_prompts, flags.seed)


def streams_of(flags: LossFlags) -> np.ndarray:
    """[L, K] bool: the half of the KV heads that streams. Raises ValueError if the gates are not
    the model's."""
    config, options = (
        checkpoint.load_config(flags.model),
        Options(gates=gates_of(flags.model, flags.gates)),
    )
    options.check_gates(config)
    return options.streams(config)


def of_prompt(flags: LossFlags, index: int) -> Rows:
    config, params = loaded(flags.model)
    question = questions_of(flags)[index]
    found = answers(flags.budget, params, config, streams_of(flags), question)
    return Rows([[index, name, question.first_wrong(likeliest)] for name, likeliest in found])


def check(flags: LossFlags) -> None:
    masked.check_model(flags.model, [flags.context])
    streams_of(flags)
    pages.check_budget(flags.budget, flags.context, questions_of(flags))


def measure(flags: LossFlags, run: Run) -> Iterator[Row]:
    with refusals():
        loaded(flags.model)
    for index in tqdm(range(flags.num_prompts), flags.task):
        if run.stopped():
            return
        for each in run.once(of_prompt, flags, index).fields:
            yield Row(*each)


def values(_: LossFlags, rows: Sequence[Row]) -> Values:
    """Right answers by system, percent: right_SYSTEM."""
    return {f"right_{name}": right for name, right in percent(rows).items()}


def percent(rows: Sequence[Row]) -> dict[str, float]:
    names = dict.fromkeys(row.system for row in rows)
    return {
        name: masked.percent_right(row.first_wrong for row in rows if row.system == name)
        for name in names
    }


def holds(v: Mapping[str, float]) -> bool:
    dense = v["right_dense"]
    if v["right_lserve"] > dense - LOSS:
        raise ValueError("LServe loses no answers, so there is nothing to explain")
    right = "right_streaming", "right_selected_1", "right_lserve_with_page"
    return (
        all(v[name] >= dense - NEAR for name in right)
        and v["right_lserve_with_control"] <= v["right_lserve_with_page"] - NEAR
    )


def draw(_: LossFlags, figure: Figure, rows: Sequence[Row]) -> None:
    axes, right = figure.subplots(), percent(rows)
    bars = axes.barh([SYSTEMS[name].text for name in right], list(right.values()))
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.set(xlabel="right answers (%)", xlim=(0, 110))
    axes.invert_yaxis()


STUDY = Study(
    __file__,
    title="What long chains lose (LServe Table 4)",
    kind="analogue",
    claim="long chains lose answers because tokens that share a selection miss the page before the "
    "newest",
    rule=f"LServe loses {LOSS} points or more; streaming heads alone, a selection for each token "
    f"alone, and LServe if that page is always read lose {NEAR} at most; the page before it is at "
    f"least {NEAR} worse",
    holds=holds,
    setting=Setting(
        "the judge model, chains of 24 statements at 1,024 tokens, 512 of them read; a forward "
        "pass",
        "the paper has no such figure",
        "reduced",
    ),
    flags=LossFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"num_prompts": 2},
    minutes=(1, 10),
    size=(8, 3.5),
)

if __name__ == "__main__":
    STUDY.run()
