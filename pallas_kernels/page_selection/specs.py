"""Cases of the selection of pages and of the statistics that it reads, by name.

Queries and statistics are small integers, so scores do not depend on the order of summation, and
many scores are equal: all implementations must select the same pages.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_selection import api, select_sm90
from pallas_kernels.specs import HEADS, Cost, Gates, Heads, Op, Spec
from pallas_kernels.tools.balance import balance

LOGICAL = 16  # tokens of a logical page


@dataclass(frozen=True)
class Selection:
    """The shapes of a call of page selection.

    sequences: the number of sequences. Each has `heads.K` rows. Half of the rows are streaming
        heads and do not select.
    context: the most tokens of a sequence.
    budget: tokens that attention reads.
    selecting: one in `selecting` sequences selects pages in this step.
    """

    heads: Heads
    sequences: int = 64
    context: int = 64 * 1024
    page_size: int = 64
    budget: int = 4096
    selecting: int = 4
    dtype: str = "bfloat16"

    @property
    def logical_pages(self) -> int:
        return self.page_size // LOGICAL


def select(shapes: Selection) -> Spec:
    (H, K, D), C = (shapes.heads.H, shapes.heads.K, shapes.heads.D), shapes.logical_pages
    R, M = shapes.sequences * K, shapes.context // shapes.page_size
    count = shapes.budget // shapes.page_size - 1

    def arguments(key):
        keys = jax.random.split(key, 4)
        N = shapes.sequences * max(1, K // 2) * M
        ends = jax.random.randint(keys[0], (2, N, C, D), -8, 9)
        row = jnp.arange(R)
        selects = (row // K % shapes.selecting == 0) & (row % K < max(1, K // 2))
        return {
            "q_RxGxD": jax.random.randint(keys[1], (R, H // K, D), -4, 5).astype(shapes.dtype),
            "statistics_NxCx2D": jnp.concatenate([ends.max(0), ends.min(0)], -1).astype(
                shapes.dtype
            ),
            "tables_RxM": jax.random.randint(keys[2], (R, M), 0, N, jnp.int32),
            "num_pages_R": jax.random.randint(keys[3], (R,), count + 2, M + 1, jnp.int32),
            "selects_R": selects,
        }

    def cost(arguments) -> Cost:
        scored = np.where(arguments["selects_R"], np.asarray(arguments["num_pages_R"]) - 1, 0)
        values = int(scored.sum()) * C * 2 * D
        return Cost(bytes=values * jnp.dtype(shapes.dtype).itemsize, flops=2 * values * (H // K))

    def plan(arguments, implementation):
        return api.plan_selection(
            arguments["num_pages_R"], arguments["selects_R"], C, implementation=implementation
        )

    def balanced(schedule, num_pages_R, selects_R):
        """The balance without partial results, because parts of a row need no merge."""
        scored = np.where(selects_R, np.asarray(num_pages_R, np.int64) - 1, 0)
        return balance(
            -(-scored // (select_sm90.ROWS // (2 * C))), schedule.items, schedule.block_items,
            places=len(schedule.block_items) - 1, partial_bytes=0, kv_bytes=1,
        )  # fmt: skip

    def of_selecting(arguments, results):
        return [x[np.asarray(arguments["selects_R"])] for x in results]

    return Spec(
        api.select_pages, arguments, cost, {"count": count}, indices=("num_pages_R", "selects_R"),
        plan=plan, balance=balanced, defined=of_selecting,
    )  # fmt: skip


def write(
    heads: Heads, counts: tuple[int, ...], *, num_pages: int = 65536, page_size: int = 64,
    dtype="bfloat16",
) -> Spec:  # fmt: skip
    """A write of chunks of `counts` tokens, which begin at random offsets in pages of their own. A
    padding token follows. The second half of the heads streams, and has no statistics. Chunks of
    one token are a decode step."""
    (K, D), T, C = (heads.K, heads.D), sum(counts) + 1, page_size // LOGICAL
    places = num_pages * page_size

    def arguments(key):
        keys = jax.random.split(key, 3)
        rng = np.random.default_rng(0)
        pages = rng.permutation(num_pages // K)
        slots = []
        for count in counts:
            first = int(rng.integers(page_size))
            held = -(-(first + count) // page_size)
            mine, pages = pages[:held], pages[held:]
            at = first + np.arange(count)
            slots += (mine[at // page_size] * page_size + at % page_size).tolist()
        slots_T = np.array([*slots, places])
        slots_TxK = slots_T[:, None] + np.arange(K) * (num_pages // K * page_size)
        slots_TxK = np.where(np.arange(K) < max(1, K // 2), slots_TxK, places)
        stored = jax.random.normal(keys[0], (2, num_pages, C, D), dtype)
        of_head, written = jnp.asarray(slots_T, jnp.int32), jnp.arange(T) < T - 1
        return {
            "statistics_NxCx2D": jnp.concatenate([stored.max(0), stored.min(0)], -1),
            "k_TxKxD": jax.random.normal(keys[1], (T, K, D), dtype),
            "slots_TxK": jnp.asarray(slots_TxK, jnp.int32),
            "runs": None
            if max(counts) == 1
            else api.key_runs(of_head, written, LOGICAL, len(counts)),
        }

    def cost(arguments) -> Cost:
        """The cost if keys are read once, and statistics are read and written once per run. A chunk
        is taken to have one run for each `LOGICAL` tokens, the fewest possible."""
        heads_with = max(1, K // 2)
        runs = sum(-(-count // LOGICAL) for count in counts)
        return Cost(bytes=heads_with * D * (sum(counts) + 4 * runs) * jnp.dtype(dtype).itemsize)

    return Spec(
        api.write_key_statistics, arguments, cost, {"logical": LOGICAL},
        donated=("statistics_NxCx2D",), most_pages=(2**31 - 1) // page_size,
    )  # fmt: skip


_LLAMA = HEADS["llama-3-8b"]
_BUNDLED = HEADS["bundled"]
SELECT_SHAPES = {
    "llama-3-8b": Selection(_LLAMA),
    "llama-3-8b-16k": Selection(_LLAMA, context=16 * 1024),
    "llama-3-8b-page128": Selection(_LLAMA, page_size=128),
    "llama-2-7b": Selection(HEADS["llama-2-7b"], sequences=16),
    "bundled": Selection(_BUNDLED, context=4096, budget=1024, dtype="float16"),
}
_WRITTEN = {
    "llama-3-8b": write(_LLAMA, (1,) * 64),
    "llama-3-8b-prefill": write(_LLAMA, (2048,) * 4),
    "llama-2-7b": write(HEADS["llama-2-7b"], (1,) * 64),
    "bundled": write(_BUNDLED, (1,) * 64, dtype="float16"),
}


def _selected(small: bool) -> dict[str, Spec]:
    few = {
        "small": Selection(Heads(4, 2, 64), 2, 1280, budget=192, selecting=2, dtype="float16"),
        # A thread block has more tiles than stages, and more rows than slots for queries.
        "many-tiles": Selection(Heads(4, 1), 9, 64 * 40, budget=256, selecting=1),
        "page128": Selection(Heads(12, 1), 3, 128 * 20, page_size=128, budget=512, selecting=2),
        "group1": Selection(Heads(2, 2), 3, 64 * 20, budget=192, selecting=1),
    }
    return {name: select(shapes) for name, shapes in (few if small else SELECT_SHAPES).items()}


SELECT = Op(
    api.SELECT,
    {name: select(shapes) for name, shapes in SELECT_SHAPES.items()},
    _selected,
    kernels=("page_scores",),
    gates=Gates(resident={"page_scores": 2}),
)
_FEW_WRITTEN = {
    "small": write(Heads(2, 2, 64), (5, 1, 37), num_pages=20),
    "dim128": write(Heads(2, 2), (5, 1, 37), num_pages=20),
    "decode": write(Heads(2, 2, 64), (1,) * 5, num_pages=20, dtype="float16"),
}
WRITE = Op(
    api.WRITE,
    _WRITTEN,
    lambda small: _FEW_WRITTEN if small else _WRITTEN,
    kernels=("write_statistics",),
)
