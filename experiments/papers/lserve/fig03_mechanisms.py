"""How LServe works (LServe Figs. 3 to 5, 7, 8), drawn from page lists, page selection and engine.

    python -m experiments.papers.lserve.fig03_mechanisms

Page lists and selections come from the ops. Figs. 5 and 8 observe an engine with a small random
model. Its pages have 4 tokens; dense heads read three pages, selected every two tokens. Notebook
3_sparse_attention shows these mechanisms on a model that answers questions.
"""

import functools
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import FigureBase

from experiments.lib.presets import PRESETS, TINY
from experiments.papers import mechanisms
from experiments.papers.mechanisms import COLOURS, FREE, GREY, Mechanism, tile
from models import params as parameters
from models.families import family
from paged.engine import Engine
from paged.kv_cache.lserve.host import LServeHost
from paged.requests.sampling_params import SamplingParams
from pallas_kernels.block_sparse_attention import streaming_blocks
from pallas_kernels.page_selection import key_runs, select_pages, write_key_statistics

PAGES, SINK, LOCAL, SELECTED = 12, 1, 2, 4
PHYSICAL, LOGICAL, CHANNELS = 8, 4, 16  # Fig. 7: tokens of a page and of a logical page
PROMPT, GENERATED = 24, 16


def streams() -> np.ndarray:
    """Whether a streaming head reads a page of keys, [query pages, key pages]."""
    found = np.zeros((PAGES, PAGES), bool)
    lists, counts = streaming_blocks(jnp.arange(PAGES), SINK, LOCAL)
    for page, (blocks, count) in enumerate(zip(np.asarray(lists), np.asarray(counts))):
        found[page, blocks[:count]] = True
    return found


@functools.cache
def selection() -> tuple[np.ndarray, np.ndarray, int]:
    """A page selection of one query over random keys.

    Returns the scores [pages, logical pages], the selected pages, and the number of key statistics
    that are wrong.
    """
    rng, C = np.random.default_rng(3), PHYSICAL // LOGICAL
    keys = rng.standard_normal((PAGES * PHYSICAL, 1, CHANNELS), np.float32)
    slots = jnp.arange(PAGES * PHYSICAL, dtype=jnp.int32)[:, None]
    empty = jnp.zeros((PAGES, C, 2 * CHANNELS))
    runs = key_runs(slots[:, 0], jnp.ones(len(keys), bool), LOGICAL, 1)
    statistics = np.asarray(
        write_key_statistics(empty, jnp.asarray(keys), slots, logical=LOGICAL, runs=runs)
    )
    q = rng.standard_normal((1, 1, CHANNELS), np.float32)
    chosen = select_pages(
        jnp.asarray(q), jnp.asarray(statistics), jnp.arange(PAGES, dtype=jnp.int32)[None],
        jnp.array([PAGES], jnp.int32), SELECTED - 1,
    )  # fmt: skip
    largest, smallest = np.split(statistics, 2, axis=-1)
    scores = np.maximum(q[0] * largest, q[0] * smallest).sum(-1)
    by_logical = keys.reshape(PAGES, C, LOGICAL, CHANNELS)
    wrong = (largest != by_logical.max(2)) | (smallest != by_logical.min(2))
    return scores, np.asarray(chosen)[0], int(wrong.sum())


def fig03() -> Mechanism:
    """The kernel visits the pages of keys of a page of queries one after the other. A skipped page
    takes no iteration."""
    rows = {"dense head": np.arange(PAGES), "streaming head": np.flatnonzero(streams()[-1])}
    rows["selected pages"] = np.sort([*selection()[1], PAGES - 1])

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for row, (name, pages) in enumerate(rows.items()):
            for page in range(PAGES):
                tile(axes, page, row, FREE)
            for step, page in enumerate(pages.tolist(), start=1):
                tile(axes, page, row, COLOURS[row], str(step), size="medium")
            axes.text(-0.2, row + 0.4, f"{name}: {len(pages)} of {PAGES} iterations", ha="right",
                      va="center", fontsize="small")  # fmt: skip
        axes.set(xlim=(0, PAGES), ylim=(3, -0.1), yticks=[])
        axes.set_xlabel("page of keys (numbers: the kernel's iteration)")
        axes.set_xticks(np.arange(PAGES) + 0.45, [str(page) for page in range(PAGES)])

    return Mechanism(
        "Fig. 3: pages of keys, one after the other",
        {
            "iterations_dense": (len(rows["dense head"]), PAGES),
            "iterations_streaming": (len(rows["streaming head"]), SINK + LOCAL + 1),
            "iterations_selected": (len(rows["selected pages"]), SELECTED),
        },
        draw,
    )  # fmt: skip


def fig04() -> Mechanism:
    """One kernel iterates over lists of whole pages: causal, streaming and selected pages."""
    query, key = np.mgrid[:PAGES, :PAGES]
    causal, chosen = key <= query, np.zeros((1, PAGES), bool)
    chosen[0, [*selection()[1], PAGES - 1]] = True

    def draw(figure: FigureBase) -> None:
        panels = figure.subplots(1, 3, width_ratios=[1, 1, 1])
        named = {
            "prefill, dense head": causal, "prefill, streaming head": streams(),
            "decode, selected pages": np.repeat(chosen, 2, 0),
        }  # fmt: skip
        for axes, (title, mask) in zip(panels, named.items()):
            seen = causal if len(mask) == PAGES else np.ones_like(mask)
            axes.imshow(np.where(mask, 1.0, np.where(seen, 0.2, 0.0)), cmap="Blues", vmax=1.2)
            axes.set(xlabel="page of keys", xticks=[], yticks=[])
            axes.set_title(title, fontsize="small")
        panels[0].set_ylabel("page of queries")

    far = (key >= SINK) & (key < query - LOCAL)
    return Mechanism(
        "Fig. 4: block-sparse patterns of one kernel",
        {
            "tiles_dense": (causal.sum(), PAGES * (PAGES + 1) // 2),
            "tiles_of_the_future": ((streams() & ~causal).sum(), 0),
            "far_tiles_of_a_streaming_head": ((streams() & far).sum(), 0),
            "tiles_missing_of_its_window": ((causal & ~far & ~streams()).sum(), 0),
        },
        draw,
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The state after a step.

    tokens: number of computed tokens.
    dense, streaming: number of pages of a dense head and of a streaming head.
    selected_at: position of the query for which the first dense head last selected pages.
    pages: pages of this selection.
    """

    tokens: int
    dense: int
    streaming: int
    selected_at: int
    pages: tuple[int, ...]


@functools.cache
def steps() -> tuple[list[Step], int]:
    """The steps of an engine with a small random model, and the number of pages in a streaming
    head's window."""
    config = PRESETS["lserve"].engine_config(TINY, run_ahead=False)
    params = parameters.init(family(TINY).declare(TINY), jax.random.key(0))
    engine = Engine.from_model(params, TINY, config)
    how = SamplingParams(max_tokens=GENERATED, ignore_eos=True)
    engine.add_request([3 + i % 50 for i in range(PROMPT)], how)
    host, found = engine.host_policy, list[Step]()
    assert isinstance(host, LServeHost) and host.streaming
    while engine.has_unfinished():
        engine.step()
        (shot,) = engine.executor.snapshot()  # type: ignore[attr-defined]
        dense, streaming = (part.block_tables for part in (host.dense, host.streaming))
        tokens = int(dense.num_tokens[0])
        if not tokens or not engine.has_unfinished():
            continue
        layer = int(np.argmax(shot.num_dense > 0))
        found.append(Step(
            tokens, int(dense.num_blocks[0]),
            int(streaming.num_blocks[0] - streaming.num_dropped[0]),
            int(shot.positions[0]), tuple(np.sort(shot.pages[0, layer, 0]).tolist()),
        ))  # fmt: skip
    return found, host.layout.window


def fig05() -> Mechanism:
    """Two paged caches: a dense head's pages grow with the text, a streaming head's do not. A
    prompt's chunk needs pages beyond the window; the first generated token frees them."""
    found, window = steps()
    page = PRESETS["lserve"].engine_config(TINY).page_size

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        x = [step.tokens for step in found]
        axes.step(x, [s.dense for s in found], where="post", c=COLOURS[0], label="a dense head")
        axes.step(x, [s.streaming for s in found], where="post", c=COLOURS[1],
                  label="a streaming head")  # fmt: skip
        axes.axhline(window, color=GREY, linestyle=":", label="sink, window and own page")
        axes.set(xlabel="tokens of the sequence", ylabel=f"pages of {page} tokens", ylim=(0, None))
        axes.legend(frameon=False, fontsize="small")

    last = found[-1]
    return Mechanism(
        "Fig. 5: two paged caches",
        {
            "pages_of_a_dense_head": (last.dense, -(-last.tokens // page)),
            "most_of_a_streaming_head": (
                max(s.streaming for s in found if s.tokens > PROMPT + 1), window),
        },
        draw,
    )  # fmt: skip


def fig07() -> Mechanism:
    """Pages of 8 tokens with two logical pages of 4: a page is as important as its best logical
    page."""
    scores, chosen, wrong = selection()
    best = scores.max(1)
    order = np.argsort(-best[:-1], kind="stable")[: SELECTED - 1]

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for page in range(PAGES):
            picked = page in chosen or page == PAGES - 1
            shade = COLOURS[0] if picked else GREY
            for logical, score in enumerate(scores[page]):
                axes.bar(page + 0.4 * logical - 0.2, score, 0.36, color=shade,
                         alpha=1.0 if score == best[page] else 0.4)  # fmt: skip
            axes.plot([page - 0.4, page + 0.4], [best[page]] * 2, color="black", linewidth=1)
        axes.set_xticks(range(PAGES))
        axes.set(xlabel="physical page of 8 tokens (bars: its logical pages; blue: selected)",
                 ylabel="importance")  # fmt: skip
        axes.text(PAGES - 1, best[-1], "newest,\nalways read", ha="center", va="bottom",
                  fontsize="x-small")  # fmt: skip

    return Mechanism(
        "Fig. 7: hierarchical pages",
        {
            "selected_that_are_not_the_best": (len(set(chosen.tolist()) - set(order.tolist())), 0),
            "statistics_unlike_the_keys": (wrong, 0),
            "logical_pages_of_a_page": (scores.shape[1], 2),
            "pages_read": (len({*chosen.tolist(), PAGES - 1}), SELECTED),
        },
        draw,
    )  # fmt: skip


def fig08() -> Mechanism:
    """A selection serves two tokens: every second decode step selects."""
    found, _ = steps()
    decodes = [step for step in found if step.tokens > PROMPT]
    selects = [i for i, step in enumerate(decodes) if step.selected_at == step.tokens - 1]
    changed = sum(
        a.pages != b.pages and b.selected_at != b.tokens - 1 for a, b in pairwise(decodes)
    )
    gaps = {b - a for a, b in pairwise(selects)}

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        read = np.zeros((max(max(step.pages) for step in decodes) + 1, len(decodes)))
        for i, step in enumerate(decodes):
            read[list(step.pages), i] = 1.0 if i in selects else 0.6
        axes.imshow(read, aspect="auto", cmap="Blues", vmax=1.2, origin="lower")
        for i in selects:
            axes.axvline(i - 0.5, color=COLOURS[1], linewidth=1)
        axes.set(xlabel="token that is generated (red: a selection is made)", ylabel="page read")

    return Mechanism(
        "Fig. 8: a selection is used again (every 2 tokens)",
        {
            "most_tokens_of_a_selection": (max(gaps), 2), "fewest": (min(gaps), 2),
            "steps_whose_pages_change_without_one": (changed, 0),
        },
        draw,
    )  # fmt: skip


STUDY = mechanisms.study(
    __file__, "LServe Figs. 3 to 5, 7, 8",
    fig03, fig04, fig05, fig07, fig08,
    claim="pages are skipped, kept, judged, selected and selected again as the figures show",
    here="12 pages of random keys; an engine over a random model of two layers",
    size=(14, 10),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
