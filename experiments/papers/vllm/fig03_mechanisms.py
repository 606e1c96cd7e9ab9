"""How vLLM works (vLLM Figs. 3 to 10), drawn from runs of this engine.

    python -m experiments.papers.vllm.fig03_mechanisms

The examples are short prompts like the paper's, with a token for each word. Blocks have 4 tokens,
in Fig. 3 one. The engine's scheduler, its block manager and Orca's reserving allocators run. Output
tokens are made up. Only Fig. 5 computes attention, through a block table. memory_map shows a longer
run step by step; notebook 1_paged_attention explains that run.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch

from experiments.lib.plots import MEMORY_COLOURS
from experiments.papers import mechanisms
from experiments.papers.mechanisms import COLOURS, FREE, Mechanism, arrow, box, tile
from experiments.papers.vllm import snapshots
from experiments.papers.vllm.snapshots import BLOCK, Snapshot, engine_of, sampling
from paged.kv_cache.policy import ShardedModel
from paged.requests.sampling_params import SamplingParams
from pallas_kernels.paged_attention import paged_attention

A = "Four score and seven years ago our".split()
A_GOES_ON = ["fathers", "brought", "forth"]
B = "It was the best of times".split()
PREFIX = "sea otter is loutre de mer peppermint is".split()
TASKS = {"A": ["cheese", "is"], "B": ["plush", "girafe"]}
IDS: dict[str, int] = {}


def ids(words: Sequence[str]) -> list[int]:
    return [IDS.setdefault(word, 10 + len(IDS)) for word in words]


def shots_of(
    requests: Mapping[str, tuple[Sequence[str], SamplingParams]], interval: int = 1, **fields: Any
) -> list[Snapshot]:
    given = {name: (ids(words), how) for name, (words, how) in requests.items()}
    return snapshots.run(engine_of(**fields), given, interval, progress=False)


def table(shot: Snapshot, request: str, sequence: int = 0) -> list[tuple[int, int]]:
    """A sequence's block table: (physical block, filled slots) of each logical block."""
    mine = [
        (owner.logical, block, owner.filled)
        for block, owners in shot.device.items()
        for owner in owners
        if (owner.request, owner.sequence) == (request, sequence)
    ]
    return [(block, filled) for _, block, filled in sorted(mine)]


def sequences(shot: Snapshot) -> list[tuple[str, int]]:
    return sorted({(o.request, o.sequence) for owners in shot.device.values() for o in owners})


def draw_tables(axes: Axes, shot: Snapshot, title: str, colour: Mapping[tuple, str]) -> None:
    """Draws the logical blocks of each sequence above, the physical blocks below, and a line for
    each block table entry. The filled part of a block is coloured. Reference counts above one are
    printed."""
    rows = sequences(shot)
    blocks = min(len(shot.refcounts) - 1, max(shot.device) + 2)
    for block in range(1, blocks + 1):
        owners = shot.device.get(block, [])
        tile(axes, block - 1, 0, FREE)
        for i, owner in enumerate(owners):
            shade, height = colour[owner.request, owner.sequence], 0.8 / len(owners)
            width = 0.9 * owner.filled / BLOCK
            tile(axes, block - 1, i * height, shade, width=width, height=height)
        if shot.refcounts[block] > 1:
            axes.text(block - 0.55, 0.4, f"×{shot.refcounts[block]}", ha="center", va="center",
                      color="white", fontsize="small", weight="bold")  # fmt: skip
        axes.text(block - 0.55, -0.35, str(block), ha="center", va="center", fontsize="x-small")
    for row, (request, sequence) in enumerate(rows):
        y = 2.2 + 1.1 * row
        several = sum(r == request for r, _ in rows) > 1
        name = f"{request}{sequence}" if several else request
        axes.text(-0.4, y + 0.4, name, ha="right", va="center", fontsize="small")
        for logical, (block, filled) in enumerate(table(shot, request, sequence)):
            shade = colour[request, sequence]
            tile(axes, logical, y, FREE)
            tile(axes, logical, y, shade, width=0.9 * filled / BLOCK)
            axes.plot([logical + 0.45, block - 0.55], [y, 0.8], color=shade, linewidth=0.8)
    axes.set(xlim=(-1.2, blocks), ylim=(-0.8, 2.2 + 1.1 * max(2, len(rows))))
    axes.set_title(title, fontsize="small", loc="left")
    axes.set_axis_off()


def tables_of(figure: FigureBase, shots: Mapping[str, Snapshot]) -> None:
    """Draws a panel for each snapshot. shots: snapshots by panel title."""
    owners = [key for shot in shots.values() for key in sequences(shot)]
    colour = {key: COLOURS[i % len(COLOURS)] for i, key in enumerate(dict.fromkeys(owners))}
    panels = figure.subplots(1, len(shots), squeeze=False)[0]
    for axes, (title, shot) in zip(panels, shots.items()):
        draw_tables(axes, shot, title, colour)


def fig03() -> Mechanism:
    """Orca (Max) reserves 2,048 slots for A. Seven prompt tokens and the first of three output
    tokens fill 8 slots."""
    fields = {"policy": "orca_max", "max_model_len": 2048, "kv_cache_tokens": 8192, "page_size": 1}
    alone, both = engine_of(**fields), engine_of(**fields)
    alone.generate([ids(A)], [sampling(3)])
    both.generate([ids(A), ids(B[:3])], [sampling(3), sampling(2)])
    step = alone.metrics.steps[1]  # the step after the prefill

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for row, (name, record) in enumerate(
            {"A alone": step, "A and B": both.metrics.steps[1]}.items()
        ):
            left = 0.0
            for part, shade in MEMORY_COLOURS.items():
                slots = getattr(record, "kv_" + part.replace(" ", "_"))
                if not slots:
                    continue
                width = float(np.log2(1 + slots))
                axes.barh(row, width, left=left, color=shade, edgecolor="white")
                axes.text(left + width / 2, row, f"{slots:,}", ha="center", va="center",
                          fontsize="small")  # fmt: skip
                left += width
            axes.text(-0.3, row, name, ha="right", va="center")
        axes.set(yticks=[], xticks=[], xlabel="KV slots of 8,192 (widths are logarithmic)")
        axes.spines[["left", "bottom"]].set_visible(False)
        handles = [Patch(color=shade, label=part) for part, shade in MEMORY_COLOURS.items()]
        axes.legend(handles=handles, ncols=5, frameon=False, fontsize="x-small", loc="lower center",
                    bbox_to_anchor=(0.5, 1))  # fmt: skip

    parts = step.kv_token_states, step.kv_reserved, step.kv_internal
    return Mechanism(
        "Fig. 3: memory of a system that reserves, Orca (Max)",
        {
            "token_states": (parts[0], 8), "reserved": (parts[1], 2),
            "internal_fragmentation": (parts[2], 2038), "slots_of_a_request": (sum(parts), 2048),
        },
        draw,
    )  # fmt: skip


def fig04() -> Mechanism:
    """One scheduler and one set of block tables serve several workers, each with its KV heads."""
    workers = 2
    engine = engine_of(tensor_parallel=workers)
    engine.add_request(ids(A), sampling(), "A")
    engine.step()
    shot = snapshots.take(engine, 0, [])
    sharded = ShardedModel.split(engine.model, workers, "float32")
    blocks, heads = len(table(shot, "A")), sharded.shard.num_kv_heads

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        running = len(engine.scheduler.running)
        box(axes, 0, 3.2, f"Scheduler\n{running} request runs", COLOURS[0], 3)
        box(axes, 4, 3.2, f"KV cache manager\nA's block table: {blocks} blocks", COLOURS[1], 4)
        free = engine.host_policy.pool.num_free
        box(axes, 9, 3.2, f"GPU block allocator\n{free} of {len(shot.refcounts) - 1} free",
            COLOURS[2], 3.4)  # fmt: skip
        for worker in range(workers):
            box(axes, 1 + 6 * worker, 0.8,
                f"Worker {worker}: cache engine, model shard\n{heads} KV heads of every block",
                COLOURS[3], 5)  # fmt: skip
            arrow(axes, (6, 3.1), (3.5 + 6 * worker, 1.95))
        for x in (3.15, 8.15):
            arrow(axes, (x, 3.7), (x + 0.75, 3.7), "<->")
        axes.set(xlim=(-0.5, 13), ylim=(0.4, 4.6))
        axes.set_axis_off()

    return Mechanism(
        "Fig. 4: one manager, many workers",
        {"blocks_of_a": (blocks, 2), "kv_heads_of_workers": (
            workers * heads, engine.model.num_kv_heads)},
        draw,
    )  # fmt: skip


def fig05() -> Mechanism:
    """Attention of one query over three scattered blocks through a block table, compared with
    attention over the same tokens stored contiguously."""
    words, D, where = [*A, *A_GOES_ON[:2]], 16, [7, 1, 3]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, D), np.float32) for n in (1, len(words), len(words)))
    pool = np.zeros((2, 9, BLOCK, D), np.float32)
    for side, tokens in enumerate((k, v)):
        for i, token in enumerate(tokens):
            pool[side, where[i // BLOCK], i % BLOCK] = token
    paged = paged_attention(
        jnp.asarray(q[:, None]), jnp.asarray(pool[0]), jnp.asarray(pool[1]),
        jnp.array([[where]], jnp.int32), jnp.array([[len(words)]], jnp.int32),
    )  # fmt: skip
    weights = np.exp((k @ q[0]) * D**-0.5)
    weights /= weights.sum()
    apart = float(np.abs(np.asarray(paged)[0, 0] - weights @ v).max())

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for logical, block in enumerate(where):
            mine = range(logical * BLOCK, min(len(words), (logical + 1) * BLOCK))
            at = [5 * logical + i % BLOCK for i in mine]
            axes.bar(at, weights[list(mine)], color=COLOURS[logical],
                     label=f"logical block {logical}: physical block {block}")  # fmt: skip
            for x, i in zip(at, mine):
                axes.text(x, -0.008, words[i], ha="center", va="top", fontsize="small", rotation=20)
        axes.set(xticks=[], ylabel="attention of 'forth'", ylim=(0, None))
        axes.legend(frameon=False, fontsize="small")
        axes.set_title(f"through the table and contiguous: {apart:.0e} apart", fontsize="small",
                       loc="right")  # fmt: skip

    facts = {"differs_beyond_rounding": (apart > 1e-6, 0), "blocks": (len(where), 3)}
    return Mechanism("Fig. 5: attention over blocks that lie apart", facts, draw)


def fig06() -> Mechanism:
    """The block table of A during its prompt and two generated tokens. A new block is allocated
    only when the last block is full."""
    shots = shots_of({"A": (A, sampling())})
    filled = [[count for _, count in table(shot, "A")] for shot in shots[:3]]
    titles = ("the prompt, 7 tokens", f"'{A_GOES_ON[0]}' fills a block", "and the next needs one")
    return Mechanism(
        "Fig. 6: a block table, as a request grows",
        {
            "blocks_of_the_prompt": (len(filled[0]), 2), "filled_of_its_last": (filled[0][-1], 3),
            "blocks_after_a_token": (len(filled[1]), 2), "filled_then": (filled[1][-1], 4),
            "blocks_after_two": (len(filled[2]), 3), "filled_at_last": (filled[2][-1], 1),
        },
        partial(tables_of, shots=dict(zip(titles, shots))),
    )  # fmt: skip


def fig07() -> Mechanism:
    """The blocks of two running requests are scattered in one memory, and no block is shared."""
    shots = shots_of({"A": (A, sampling()), "B": (B, sampling())})
    together = next(s for s in shots if len(sequences(s)) == 2 and len(table(s, "A")) > 2)
    blocks = [block for name in "AB" for block, _ in table(together, name)]
    waste = sum(BLOCK - filled for name in "AB" for _, filled in table(together, name))
    return Mechanism(
        "Fig. 7: two requests",
        {
            "blocks_of_a": (len(table(together, "A")), 3), "shared": (max(together.refcounts), 1),
            "blocks_of_b": (len(table(together, "B")), 2),
            "twice_in_tables": (len(blocks) - len(set(blocks)), 0),
            "more_than_a_block_empty_in_a_request": (waste >= 2 * BLOCK, 0),
        },
        partial(tables_of, shots={"two requests in one memory": together}),
    )  # fmt: skip


def fig08() -> Mechanism:
    """Two samples of A's prompt share its blocks until one writes to the last block."""
    shots = shots_of({"A": (A, sampling(n=2, temperature=1.0))})
    prompt, written, later = shots[:3]
    first, second = (table(written, "A", i) for i in (0, 1))
    copies = sum("copy block" in text for text in written.happened)
    titles = "both samples share the prompt", "A0 writes: the last block is copied", "each goes on"
    return Mechanism(
        "Fig. 8: parallel samples, copy on write",
        {
            "references_of_the_prompts_blocks": (min(prompt.refcounts[b] for b, _ in first[:1]), 2),
            "copies": (copies, 1), "first_block_shared": (first[0] == second[0], 1),
            "last_block_shared": (first[1][0] == second[1][0], 0),
            "references_after_the_copy": (written.refcounts[second[1][0]], 1),
        },
        partial(tables_of, shots=dict(zip(titles, (prompt, written, later)))),
    )  # fmt: skip


def fig09() -> Mechanism:
    """A beam search of width four. Blocks that candidates share are stored once; blocks of dropped
    candidates are freed."""
    how = sampling(8, n=4, beam_width=4)
    shots = shots_of({"A": (A, how)}, kv_cache_tokens=20 * BLOCK)
    last = shots[-1]
    held = {block for block in range(1, len(last.refcounts)) if last.refcounts[block]}
    alone = sum(len(table(last, "A", beam)) for beam in range(4))
    seen = {block for shot in shots for block in shot.device}
    return Mechanism(
        "Fig. 9: a beam search of width four",
        {
            "owners_of_the_first_block": (last.refcounts[table(last, "A")[0][0]], 4),
            "candidates": (len(sequences(last)), 4),
            "blocks_unshared_would_need_more": (alone > len(held), 1),
            "some_block_was_freed_and_used_again": (len(seen) < sum(
                len(shot.device.keys() - before.device.keys())
                for before, shot in pairwise(shots)
            ) + len(shots[0].device), 1),
        },
        partial(tables_of, shots={f"step {s.step}": s for s in (shots[1], shots[4], last)}),
    )  # fmt: skip


def fig10() -> Mechanism:
    """Two prompts begin with the same examples. B does not recompute the prefix's blocks."""
    requests = {name: (PREFIX + words, sampling()) for name, words in TASKS.items()}
    shots = shots_of(requests, interval=2, prefix_caching=True)
    both = next(shot for shot in shots if len(sequences(shot)) == 2)
    a, b = ([block for block, _ in table(both, name)] for name in "AB")
    shared = [block for block in a if block in b]
    return Mechanism(
        "Fig. 10: a shared prefix",
        {
            "blocks_of_the_prefix": (len(shared), len(PREFIX) // BLOCK),
            "references": (both.refcounts[shared[0]], 2),
            "own_blocks_of_b": (len(b) - len(shared), 1),
        },
        partial(tables_of, shots={"A and B, after a prefix of 8 words": both}),
    )  # fmt: skip


STUDY = mechanisms.study(
    __file__, "vLLM Figs. 3 to 10",
    fig03, fig04, fig05, fig06, fig07, fig08, fig09, fig10,
    claim="blocks are mapped, grown, shared, copied when written and freed as the figures show",
    here="prompts like the figures', in short blocks; the engine's scheduler and allocators",
    size=(15, 15),
)  # fmt: skip

if __name__ == "__main__":
    STUDY.run()
