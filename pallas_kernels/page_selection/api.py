"""The public ops of hierarchical paging (LServe §3.5.2). They check shapes and choose an
implementation.

A (physical) page of P tokens has C = P / N_L logical pages of N_L tokens. The statistics of a
logical page are the largest and the smallest value of its keys in each channel. They are stored as
[max | min], 2 * D values.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arguments import check_schedule, sizes
from pallas_kernels.attention.schedule import DecodeSchedule
from pallas_kernels.page_selection import reference, select_sm90, write_sm90, xla

WRITE = {"reference": reference.write, "xla": xla.write, "mosaic_gpu": write_sm90.write}
SELECT = {"reference": reference.select, "xla": xla.select, "mosaic_gpu": select_sm90.select}
# The default stays XLA until a GPU has timed both.
DEFAULT_WRITE = "xla"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyRuns:
    """Runs of a step's tokens. The tokens of a run are consecutive and lie in one logical page.

    first: [I] int32, the first token of each run.
    counts: [I] int32, the number of tokens of each run; 0 for unused runs.
    """

    first: jax.Array
    counts: jax.Array


def key_runs(slots_T, written_T, logical: int, num_rows: int) -> KeyRuns:
    """The runs of ragged chunks, to be computed once for all layers and heads.

    slots: [T] int32, page * P + offset of each token in one layer and head.
    written: [T] bool, false for padding.
    logical: N_L.
    num_rows: the largest number of chunks.
    """
    T = len(slots_T)
    previous = jnp.concatenate([jnp.full(1, -2, slots_T.dtype), slots_T[:-1]])
    continues = (slots_T == previous + 1) & (slots_T % logical > 0)
    continues &= jnp.concatenate([jnp.zeros(1, bool), written_T[:-1]])
    # A chunk of n tokens touches n / N_L + 2 logical pages at most.
    size = min(T, T // logical + 2 * num_rows)
    (first,) = jnp.nonzero(written_T & ~continues, size=size, fill_value=T)
    run = jnp.cumsum(written_T & ~continues) - 1
    counts = jnp.zeros(size, jnp.int32).at[jnp.where(written_T, run, size)].add(1, mode="drop")
    return KeyRuns(first.astype(jnp.int32), counts)


def write_key_statistics(
    statistics_NxCx2D,
    k_TxKxD,
    slots_TxK,
    *,
    logical: int,
    runs: KeyRuns | None = None,
    implementation: str | None = None,
):
    """Update the statistics of logical pages with new keys (§3.5.2).

    The token at offset 0 of a logical page sets the page's statistics. All other tokens widen them.
    So a page needs no reset when it is allocated to another sequence.

    statistics: [N, C, 2D].
    k: [T, K, D], the keys of each sequence's tokens in order.
    slots: [T, K] int32, page * P + offset, not negative. Padding tokens, and heads without
        statistics, have slots of N * P or more, and write nothing.
    logical: N_L, the tokens of a logical page.
    runs: `key_runs` of these tokens; None if no two tokens share a logical page, as in decode.

    Returns the statistics; a donated array is written in place. Raises ValueError if the shapes do
    not fit together, if there are 2**31 slots or more, or if the named implementation cannot run
    them.
    """
    found = sizes(
        k=(k_TxKxD, "T K D"), statistics=(statistics_NxCx2D, "N C 2D"), slots=(slots_TxK, "T K")
    )
    N, C = found["N"], found["C"]
    if N * C * logical >= 2**31:
        raise ValueError(
            f"{N} pages of {C * logical} tokens have {N * C * logical} slots, and an int32 counts "
            "to 2**31 - 1"
        )
    refusal = write_sm90.refusal(k_TxKxD)
    run = backend.choose("write_key_statistics", WRITE, implementation or DEFAULT_WRITE, refusal)
    return run(statistics_NxCx2D, k_TxKxD, slots_TxK, runs, logical=logical)


def plan_selection(
    num_pages_R, selects_R, logical_pages: int, *, implementation: str | None = None
) -> DecodeSchedule | None:
    """The schedule of `select_pages` for these rows, to be made once for all layers.

    num_pages, implementation: as in `select_pages`.
    selects: [R] bool, as in `select_pages`, but not None.
    logical_pages: C.

    Returns None where the implementation works without a schedule.
    """
    if not (backend.runs_kernels(implementation) and select_sm90.has_tiles(logical_pages)):
        return None
    return select_sm90.schedule_of(num_pages_R, selects_R, logical_pages)


def select_pages(
    q_RxGxD,
    statistics_NxCx2D,
    tables_RxM,
    num_pages_R,
    count: int,
    *,
    selects_R=None,
    schedule: DecodeSchedule | None = None,
    implementation: str | None = None,
):
    """The pages with the highest scores for each row's queries, except the newest page (§3.5.2,
    eq. 2).

    A logical page's score is the sum over channels of max(q * k_max, q * k_min), an upper bound of
    q·k for its keys. A page's score is the maximum over its logical pages and the row's queries.

    q: [R, G, D]. A row has the G query heads of one KV head of a sequence, or one query head.
    statistics: [N, C, 2D].
    tables: [R, M] int32 page ids in token order.
    num_pages: [R] int32, the row's number of pages with tokens. The last page is not scored,
        because attention always reads it.
    count: the number of selected pages. A row that selects must have more than `count` pages.
    selects: [R] bool, whether each row selects; None means that all rows do. Other rows cost no
        work.
    schedule: `plan_selection` of these rows, made for all layers; None makes one for this call.

    Returns columns of the table [R, count] int32, ordered by descending score, then by ascending
    column. Rows that do not select may hold anything. Raises ValueError if the shapes do not
    fit together, if `count` is not from 1 to M, or if the named implementation cannot run them.
    """
    found = sizes(
        q=(q_RxGxD, "R G D"), statistics=(statistics_NxCx2D, "N C 2D"), tables=(tables_RxM, "R M"),
        num_pages=(num_pages_R, "R"),
    )  # fmt: skip
    if not 1 <= count <= found["M"]:
        raise ValueError(f"count must be from 1 to {found['M']}, not {count}")
    check_schedule(schedule, DecodeSchedule)
    selects_R = jnp.ones(found["R"], bool) if selects_R is None else selects_R
    refusal = select_sm90.refusal(q_RxGxD, statistics_NxCx2D)
    run = backend.choose("select_pages", SELECT, implementation, refusal)
    return run(
        q_RxGxD, statistics_NxCx2D, tables_RxM, num_pages_R, selects_R, count=count,
        schedule=schedule,
    )  # fmt: skip
