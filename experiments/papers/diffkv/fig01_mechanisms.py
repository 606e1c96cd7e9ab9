"""How DiffKV works (DiffKV Figs. 1, 6, 7, Algorithm 1), drawn from its policy and page manager.

    python -m experiments.papers.diffkv.fig01_mechanisms

The policy's own code chooses the precision of tokens with given significance, and manages their
pages. Notebook 4_kv_compression shows a model's cache.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import FigureBase

from experiments.lib import shipped
from experiments.papers import mechanisms
from experiments.papers.diffkv.systems import PAGE_SIZE
from experiments.papers.mechanisms import COLOURS, FREE, GREY, Mechanism, arrow, box, tile
from models import checkpoint
from paged.config import EngineConfig
from paged.kv_cache.diffkv import page_manager
from paged.kv_cache.diffkv.compression import NO_TOKEN, Found, Rules
from paged.kv_cache.diffkv.layout import layout_of
from paged.kv_cache.policy import ShardedModel
from pallas_kernels.quantization import KVFormat

DROPPED, LOW, HIGH = range(3)
SHADES = (FREE, "#e0a030", "#2f6b9a")
WINDOW = 1
# Mean attention [request, head, token]. The first head attends to few tokens, the second to all.
MEANS = np.array([
    [[0.9, 0.02, 0.3, 0.004, 0.3], [0.5, 0.4, 0.3, 0.3, 0.3]],
    [[0.9, 0.002, 0.004, 0.003, 0.3], [0.6, 0.5, 0.02, 0.4, 0.3]],
])  # fmt: skip
ALPHA = 1.0, 0.02
CASES = 4096  # random inputs of Algorithm 1
D = 128


def token_bytes(keys: int, values: int) -> int:
    return KVFormat(keys, D).token_bytes + KVFormat(values, D).token_bytes


BYTES = {DROPPED: 0, LOW: token_bytes(4, 2), HIGH: token_bytes(8, 4)}
SIXTEEN = 4 * D


def levels_of(means: np.ndarray) -> np.ndarray:
    """The precision [T] of each token of a head, by the policy's rule for prompts."""
    later = np.maximum(len(means) - 1 - np.arange(len(means)), 1)
    kept, _ = Rules(window=WINDOW).of_prompts(
        jnp.asarray((means * later)[:, None], jnp.float32),
        jnp.arange(len(means)), jnp.full(len(means), len(means)), jnp.array(ALPHA), 0,
    )  # fmt: skip
    high, low = (np.asarray(each)[:, 0] for each in kept)
    return np.where(high, HIGH, np.where(low, LOW, DROPPED))


def by_hand(means: np.ndarray) -> np.ndarray:
    """The paper's rule (§4): the mean attention to token i is compared with alpha / i. The newest
    tokens keep high precision."""
    found = []
    for i, mean in enumerate(means, start=1):
        recent = i > len(means) - WINDOW
        found.append(HIGH if recent or mean >= ALPHA[0] / i else
                     LOW if mean >= ALPHA[1] / i else DROPPED)  # fmt: skip
    return np.array(found)


def fig01() -> Mechanism:
    """Two requests of five tokens in two heads: pruned to equal budgets, quantised uniformly, and
    compressed by DiffKV."""
    ours = np.array([[levels_of(head) for head in request] for request in MEANS])
    expected = np.array([[by_hand(head) for head in request] for request in MEANS])
    top = np.argsort(-MEANS, -1)[..., :3]
    pruned = np.zeros_like(ours)
    np.put_along_axis(pruned, top, 3, -1)
    shares = {
        "(a) pruning to three tokens": ((pruned == 3).mean(), pruned),
        "(b) 4 bits for all": (token_bytes(4, 4) / SIXTEEN, np.full_like(ours, LOW)),
        "(c) DiffKV": (np.vectorize(BYTES.get)(ours).mean() / SIXTEEN, ours),
    }

    def draw(figure: FigureBase) -> None:
        for axes, (title, (share, levels)) in zip(figure.subplots(1, 3), shares.items()):
            for i, (request, head) in enumerate(np.ndindex(2, 2)):
                x = 0.0
                for token, level in enumerate(levels[request, head]):
                    width = 1.0 if level == 3 else {DROPPED: 0, LOW: 0.28, HIGH: 0.5}[level]
                    if title.startswith("(b)"):
                        width = token_bytes(4, 4) / SIXTEEN
                    if not width:
                        continue
                    shade = GREY if level == 3 else SHADES[level]
                    tile(axes, x, -i, shade, str(token + 1), width=0.95 * width, height=0.7)
                    x += width
                axes.text(-0.15, -i + 0.35, f"R{request + 1}, head {head + 1}", ha="right",
                          va="center", fontsize="x-small")  # fmt: skip
            axes.set(xlim=(0, 5), ylim=(-3.2, 1))
            axes.set_title(f"{title}: {share:.0%} of 16 bits", fontsize="small")
            axes.set_axis_off()

    return Mechanism(
        "Fig. 1: what two heads of two requests keep",
        {
            "tokens_classified_otherwise": ((ours != expected).sum(), 0),
            "heads_that_keep_alike": (
                sum(np.array_equal(request[0], request[1]) for request in ours), 0),
            "less_memory_than_pruning": (
                shares["(c) DiffKV"][0] < shares["(a) pruning to three tokens"][0], 1),
        },
        draw,
    )  # fmt: skip


def fig06() -> Mechanism:
    """A prompt's pages: each head gets pages for the worst case, plans the pages that it keeps, and
    returns the surplus to the end of the circular free list."""
    heads, worst, pages_in_all = 4, 5, 24
    kept = np.array([[3, 1], [1, 3], [2, 0], [1, 1]], np.int32)
    slots = jnp.zeros(1, jnp.int32)
    start = page_manager.init(pages_in_all, 1, heads, 8)
    allocated = page_manager.allocate_prompts(start, slots, jnp.array([worst], jnp.int32))
    planned = page_manager.plan_prompts(allocated, slots, jnp.asarray(kept[None]))
    shots = {"all free": start, "as at worst": allocated, "planned; surplus back": planned}

    def free_ids(pages: page_manager.Pages) -> list[int]:
        at = (int(pages.start[0]) + np.arange(int(pages.free[0]))) % pages_in_all
        return np.asarray(pages.free_list)[at].tolist()

    def held_ids(pages: page_manager.Pages) -> list[list[tuple[int, int, int]]]:
        """(column, page, level) of each page that a head holds, by head."""
        found = []
        for head in range(heads):
            mine = []
            for level, run in enumerate(pages.runs):
                for number in range(int(pages.held[0, head, level])):
                    column = int(run.column(np.arange(number + 1))[number])
                    mine.append((column, int(pages.tables[0, head, column]), level))
            found.append(mine)
        return found

    def draw(figure: FigureBase) -> None:
        for axes, (title, pages) in zip(figure.subplots(1, 3), shots.items()):
            for head, mine in enumerate(held_ids(pages)):
                for column in range(pages.tables.shape[2]):
                    tile(axes, column, -head, FREE)
                for column, page, level in mine:
                    tile(axes, column, -head, SHADES[LOW if level else HIGH], str(page))
                axes.text(-0.2, -head + 0.4, f"head {head + 1}", ha="right", va="center",
                          fontsize="x-small")  # fmt: skip
            listed, first = free_ids(pages), int(pages.start[0])
            free = {(first + i) % pages_in_all for i in range(len(listed))}
            for place in range(pages_in_all):
                tile(axes, place / 3, -5.2, COLOURS[4] if place in free else FREE, width=0.29)
            axes.text(4, -5.7, f"circular list: {len(listed)} pages free", ha="center",
                      fontsize="x-small")  # fmt: skip
            axes.set(xlim=(-0.2, 8.2), ylim=(-6, 1.2))
            axes.set_title(title, fontsize="small")
            axes.set_axis_off()

    mine = [page for head in held_ids(planned) for _, page, _ in head]
    everything = sorted(mine + free_ids(planned))
    return Mechanism(
        "Fig. 6: pages of a prompt",
        {
            "pages_at_worst": (pages_in_all - len(free_ids(allocated)), heads * worst),
            "pages_kept": (len(mine), int(kept.sum())),
            "pages_lost_or_twice": (everything != list(range(pages_in_all)), 0),
        },
        draw,
    )  # fmt: skip


def fig07() -> Mechanism:
    """Each worker has a memory manager for its own heads; the scheduler sees page counts only."""
    workers, model = 2, checkpoint.load_config(shipped.MODELS / "llama-3-8b")
    config = EngineConfig(
        policy="diffkv", tensor_parallel=workers, page_size=PAGE_SIZE, chunked_prefill=False,
        max_num_batched_tokens=4096,
    )  # fmt: skip
    layout = layout_of(config, ShardedModel.split(model, workers, "float16"))
    heads = layout.all_heads
    names = ", ".join(f"{f.name}: {f.tokens} tokens a page" for f in layout.formats)

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        box(axes, 4, 3.4, "Scheduler: counts of pages, no page", COLOURS[0], 5)
        for worker in range(workers):
            x = 7 * worker
            box(axes, x, 1.7, f"Worker {worker}: memory manager of {heads} heads", COLOURS[1], 6)
            box(axes, x, 0.2, "compressor and attention over unified pages", COLOURS[2], 6)
            arrow(axes, (6.5, 3.3), (x + 3, 2.9), "<->")
        axes.text(6.5, -0.25, f"unified pages: {names}", ha="center", fontsize="x-small")
        axes.set(xlim=(-0.4, 13.4), ylim=(-0.4, 4.7))
        axes.set_axis_off()

    return Mechanism(
        "Fig. 7: workers and their memory managers",
        {
            "heads_of_all_workers": (workers * heads, model.num_layers * model.num_kv_heads),
            "precisions": (layout.levels, 2),
        },
        draw,
    )  # fmt: skip


def as_printed(candidate: float, high: float, low: float, N: int) -> tuple[int, ...]:
    """Algorithm 1 as printed. Returns three decisions:

    the level of the candidate;
    the level of the least significant token of high precision (HIGH: unchanged);
    whether the least significant token of low precision is dropped.
    """
    thresholds = [alpha / N for alpha in ALPHA]
    if candidate >= thresholds[0]:
        if thresholds[1] <= high < thresholds[0]:
            return HIGH, LOW, 0
        return HIGH, (DROPPED if high < thresholds[1] else HIGH), 0
    if candidate >= thresholds[1]:
        return LOW, HIGH, int(low < thresholds[1])
    return DROPPED, HIGH, 0


def decided(candidate: np.ndarray, high: np.ndarray, low: np.ndarray, N: int) -> np.ndarray:
    """The policy's decisions [cases, 3], in the order of `as_printed`."""
    means = jnp.asarray(np.stack([candidate, high, low], -1), jnp.float32)
    found = Found(jnp.zeros(means.shape, jnp.int32).at[:, 0].set(7), means)
    decision = Rules().decide(found, jnp.float32(N - 1), jnp.asarray(ALPHA, jnp.float32))
    arrives, replaces, at = map(np.asarray, decision)
    leaves, of_candidate = replaces[:, 0], at[:, 0] == 7
    goes = np.where(arrives[:, 1], LOW, DROPPED)
    where = np.where(leaves & of_candidate, goes, HIGH)
    victim = np.where(leaves & ~of_candidate, goes, HIGH)
    return np.stack([where, victim, replaces[:, 1]], -1)


def algorithm1() -> Mechanism:
    """Algorithm 1: the policy's decisions beside the printed ones, over random cases."""
    rng, N = np.random.default_rng(0), 100
    candidate, high, low = 10 ** rng.uniform(-5.5, -0.5, (3, CASES))
    low[::7], high[::11] = NO_TOKEN, NO_TOKEN  # no such token
    ours = decided(candidate, high, low, N)
    theirs = np.array([as_printed(*case, N) for case in zip(candidate, high, low)])
    outcomes: dict[str, tuple[Sequence[int], str]] = {
        "kept in high precision": ((HIGH, HIGH), SHADES[HIGH]),
        "kept; another one moves down": ((HIGH, LOW), "#6fa0c8"),
        "kept; another one is dropped": ((HIGH, DROPPED), "#a9c6de"),
        "moved down": ((LOW, HIGH), SHADES[LOW]), "dropped": ((DROPPED, HIGH), GREY),
    }  # fmt: skip

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for name, (key, shade) in outcomes.items():
            mine = (ours[:, 0] == key[0]) & (ours[:, 1] == key[1]) & (high < 1)
            axes.plot(candidate[mine], high[mine], ".", markersize=3, color=shade,
                      label=f"{name} ({mine.sum():,})")  # fmt: skip
        for alpha in ALPHA:
            axes.axvline(alpha / N, color="black", linewidth=0.6)
            axes.axhline(alpha / N, color="black", linewidth=0.6)
        axes.set(xscale="log", yscale="log", xlabel="significance of the candidate",
                 ylabel="least in high precision")  # fmt: skip
        axes.legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))

    return Mechanism(
        "Algorithm 1: a new token, 4,096 cases (lines: α/N)",
        {
            "cases": (len(ours), CASES),
            "decisions_unlike_the_papers": ((ours != theirs).any(1).sum(), 0),
            "outcomes_seen": (len({tuple(row) for row in theirs}), 6),
        },
        draw,
    )  # fmt: skip


STUDY = mechanisms.study(
    __file__, "DiffKV Figs. 1, 6, 7, Algorithm 1",
    fig01, fig06, fig07, algorithm1,
    claim="tokens are kept, moved down and dropped, and pages handed out, as the figures show",
    here="tokens of given significance, by the policy's rules and the device's page manager",
    size=(15, 8),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
