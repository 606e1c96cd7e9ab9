"""Public ops: check shapes and pick an implementation."""

from pallas_kernels import backend
from pallas_kernels.kv_write import reference, write_sm90, xla

WRITE = {"reference": reference.write, "xla": xla.write, "mosaic_gpu": write_sm90.write}
COPY = {"reference": reference.copy, "xla": xla.copy, "mosaic_gpu": write_sm90.copy}
DEFAULT = "xla"  # everywhere, until the kernels are measured to be faster


def write_kv(
    k_pages_NxPxD,
    v_pages_NxPxD,
    k_TxKxD,
    v_TxKxD,
    slot_mapping_TxK,
    *,
    implementation: str | None = None,
):
    """Write each token's keys and values into the pools, in the pools' dtype (vLLM §5.1).

    k_pages, v_pages: [N, P, D]; k, v: [T, K, D].
    slot_mapping: [T, K] int32, page * P + offset of each (token, KV head). Entries of N * P or more
    write nothing (padding tokens); entries must be distinct and not negative.

    Returns the two pools; donated ones are written in place. Raises ValueError on shapes that do
    not fit together, or that a named implementation cannot run.
    """
    T, K, D = k_TxKxD.shape
    if k_pages_NxPxD.shape != v_pages_NxPxD.shape or k_pages_NxPxD.shape[2:] != (D,):
        raise ValueError(
            f"pools must both be [N, P, {D}] for keys {k_TxKxD.shape}, "
            f"not {k_pages_NxPxD.shape} and {v_pages_NxPxD.shape}"
        )
    if v_TxKxD.shape != (T, K, D) or slot_mapping_TxK.shape != (T, K):
        raise ValueError(
            f"keys {k_TxKxD.shape} need values of that shape and a slot mapping [{T}, {K}], "
            f"not {v_TxKxD.shape} and {slot_mapping_TxK.shape}"
        )
    refusal = write_sm90.unsupported(
        k_pages_NxPxD, [(K, D), (K, D)], v_pages_NxPxD, k_TxKxD, v_TxKxD
    )
    run = backend.choose("write_kv", WRITE, implementation or DEFAULT, refusal)
    return run(k_pages_NxPxD, v_pages_NxPxD, k_TxKxD, v_TxKxD, slot_mapping_TxK)


def copy_pages(pages_NxPxD, sources_C, destinations_C, *, implementation: str | None = None):
    """Copy pages sources[i] → destinations[i] in one pass (copy-on-write, vLLM §4.4).

    Pairs with a destination of N or more copy nothing; real destinations must be distinct and be no
    pair's source. int32 [C]. Returns the pool; a donated one is written in place. Raises ValueError
    on shapes that do not fit together, or that a named implementation cannot run.
    """
    if sources_C.shape != destinations_C.shape or sources_C.ndim != 1:
        raise ValueError(
            f"sources and destinations must both be [C], "
            f"not {sources_C.shape} and {destinations_C.shape}"
        )
    refusal = write_sm90.unsupported(pages_NxPxD, [pages_NxPxD.shape[1:]])
    run = backend.choose("copy_pages", COPY, implementation or DEFAULT, refusal)
    return run(pages_NxPxD, sources_C, destinations_C)
