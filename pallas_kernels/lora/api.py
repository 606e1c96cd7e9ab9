"""The public ops. They check shapes, fill in defaults and choose an implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arguments import check_schedule, sizes
from pallas_kernels.lora import reference, sgmv_sm90, xla
from pallas_kernels.lora.segments import PAGE_RANKS, Segments
from pallas_kernels.lora.work_items import SgmvSchedule, sgmv_schedule

SGMV = {"reference": reference.fused, "xla": xla.fused, "mosaic_gpu": sgmv_sm90.fused}
SHRINK = {"reference": reference.shrink, "xla": xla.shrink, "mosaic_gpu": sgmv_sm90.shrink}
EXPAND = {"reference": reference.expand, "xla": xla.expand, "mosaic_gpu": sgmv_sm90.expand}


def plan_sgmv(
    segments: Segments, num_tokens: int, *, implementation: str | None = None
) -> SgmvSchedule | None:
    """The schedule of `sgmv` for these segments of `num_tokens` tokens, to be made once for all
    layers and projections (Punica §6). Returns None if the implementation needs no schedule, and if
    there are no segments (S = 0)."""
    if not backend.runs_kernels(implementation) or not segments.slots.shape[0]:
        return None
    return sgmv_schedule(segments, num_tokens)


def sgmv(
    x_TxI,
    a_LxNx16xI,
    b_LxNx16xO,
    layer: int | jax.Array,
    segments: Segments,
    rank_pages_AxQ,
    num_rank_pages_A,
    *,
    v_dtype=None,
    schedule: SgmvSchedule | None = None,
    implementation: str | None = None,
):
    """LoRA's addend x·A·B to a projection, with A and B of each token's adapter (Punica §4).

    x:        [T, I] inputs of the projection.
    a, b:     [L, N, 16, I] and [L, N, 16, O] pools of rank pages, for all layers of one projection.
              A page holds 16 ranks: 16 columns of A, stored as rows, and 16 rows of B. The factor
              alpha / rank is part of b. If a rank is not a multiple of 16, the rest of the
              adapter's last page is zero.
    layer:    int32 scalar, which may be traced. The pools are indexed and never copied.
    segments: the adapter slot of each run of tokens. Tokens outside all segments get zeros.
    rank_pages: [A, Q] int32 page ids of the adapter in each slot. Only the first `num_rank_pages`
              entries must be valid. Other entries are never used.
    num_rank_pages: [A] int32 number of rank pages of each slot's adapter, from 0 to Q. An adapter's
              cost is proportional to this number.
    v_dtype:  the dtype to which x·A is rounded before the product with B. None means x's dtype;
              the paper has 16 bits.
    schedule: `plan_sgmv` of these segments; None makes one for this call.

    Under tensor parallelism, each device passes its own part of x, a and b. If I is split, the sum
    of the devices' results is the whole result. If O is split, each result is a part of the whole
    result. A part may be narrower than the rank.

    Returns [T, O] in x's dtype. Products are summed in float32. Raises ValueError if arguments do
    not fit together, or if the named implementation cannot run them.
    """
    found = _check(
        segments, rank_pages_AxQ, num_rank_pages_A, x=(x_TxI, "T I"), a=(a_LxNx16xI, "L N 16 I"),
        b=(b_LxNx16xO, "L N 16 O"),
    )  # fmt: skip
    if not found["S"]:
        return jnp.zeros((found["T"], found["O"]), x_TxI.dtype)
    v_dtype = jnp.dtype(x_TxI.dtype if v_dtype is None else v_dtype)
    _check_schedule(schedule, segments, x_TxI.shape[0])
    refusal = sgmv_sm90.unsupported(
        rank_pages_AxQ, x_TxI.dtype, v_dtype, a=a_LxNx16xI, b=b_LxNx16xO
    )
    run = backend.choose("sgmv", SGMV, implementation, refusal)
    return run(
        x_TxI, a_LxNx16xI, b_LxNx16xO, layer, segments, rank_pages_AxQ, num_rank_pages_A,
        v_dtype=v_dtype, schedule=schedule,
    )  # fmt: skip


def sgmv_shrink(
    x_TxI,
    a_LxNx16xI,
    layer: int | jax.Array,
    segments: Segments,
    rank_pages_AxQ,
    num_rank_pages_A,
    *,
    v_dtype=None,
    schedule: SgmvSchedule | None = None,
    implementation: str | None = None,
):
    """The first half of `sgmv`, v = x·A: [T, Q * 16] in `v_dtype`, by default x's dtype.

    Columns 16q to 16q + 15 are the product with page q of the token's adapter, or zero if the
    adapter has no page q. Arguments and errors are as in `sgmv`.
    """
    found = _check(
        segments, rank_pages_AxQ, num_rank_pages_A, x=(x_TxI, "T I"), a=(a_LxNx16xI, "L N 16 I")
    )
    v_dtype = jnp.dtype(x_TxI.dtype if v_dtype is None else v_dtype)
    if not found["S"]:
        return jnp.zeros((found["T"], found["Q"] * PAGE_RANKS), v_dtype)
    _check_schedule(schedule, segments, x_TxI.shape[0])
    refusal = sgmv_sm90.unsupported(rank_pages_AxQ, x_TxI.dtype, a=a_LxNx16xI)
    run = backend.choose("sgmv_shrink", SHRINK, implementation, refusal)
    return run(
        x_TxI, a_LxNx16xI, layer, segments, rank_pages_AxQ, num_rank_pages_A, v_dtype=v_dtype,
        schedule=schedule,
    )  # fmt: skip


def sgmv_expand(
    v_TxR,
    b_LxNx16xO,
    layer: int | jax.Array,
    segments: Segments,
    rank_pages_AxQ,
    num_rank_pages_A,
    *,
    dtype=None,
    schedule: SgmvSchedule | None = None,
    implementation: str | None = None,
):
    """The second half of `sgmv`, v·B: [T, O] in `dtype`, by default v's dtype.

    v: [T, Q * 16] from `sgmv_shrink`. Columns 16q and up are ignored for an adapter with q pages.
    All other arguments and the errors are as in `sgmv`.
    """
    found = _check(
        segments, rank_pages_AxQ, num_rank_pages_A, b=(b_LxNx16xO, "L N 16 O"),
        v=(v_TxR, f"T {rank_pages_AxQ.shape[-1] * PAGE_RANKS}"),
    )  # fmt: skip
    dtype = jnp.dtype(v_TxR.dtype if dtype is None else dtype)
    if not found["S"]:
        return jnp.zeros((found["T"], found["O"]), dtype)
    _check_schedule(schedule, segments, v_TxR.shape[0])
    refusal = sgmv_sm90.unsupported(rank_pages_AxQ, v_TxR.dtype, b=b_LxNx16xO)
    run = backend.choose("sgmv_expand", EXPAND, implementation, refusal)
    return run(
        v_TxR, b_LxNx16xO, layer, segments, rank_pages_AxQ, num_rank_pages_A, dtype=dtype,
        schedule=schedule,
    )  # fmt: skip


def _check(segments, rank_pages, num_rank_pages, **arrays) -> dict[str, int]:
    found = sizes(
        **arrays, rank_pages=(rank_pages, "A Q"), num_rank_pages=(num_rank_pages, "A"), empty=False
    )
    found |= sizes(
        slots=(segments.slots, "S"), starts=(segments.starts, "S"), ends=(segments.ends, "S")
    )
    if found["S"]:
        sizes(count=(segments.count, "1"))
    return found


def _check_schedule(schedule, segments, T: int) -> None:
    check_schedule(schedule, SgmvSchedule)
    if schedule is None:
        return
    wanted = jax.eval_shape(lambda segments: sgmv_schedule(segments, T), segments)
    if jax.tree.map(jnp.shape, schedule) != jax.tree.map(jnp.shape, wanted):
        raise ValueError(
            f"the schedule is not one of {T} tokens and {segments.slots.shape[0]} segments"
        )
