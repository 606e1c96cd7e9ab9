"""The public ops. They check shapes and choose an implementation."""

from pallas_kernels import backend
from pallas_kernels.arguments import sizes
from pallas_kernels.kv_write import reference, write_sm90, xla
from pallas_kernels.quantization import QuantizedPages

WRITE = {"reference": reference.write, "xla": xla.write, "mosaic_gpu": write_sm90.write}
COPY = {"reference": reference.copy, "xla": xla.copy, "mosaic_gpu": write_sm90.copy}
DEFAULT = "xla"  # until a measurement shows that the kernels are faster


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

    k_pages, v_pages: [N, P, D], the pools. `QuantizedPages` quantise the new tokens.
    k, v: [T, K, D], the new tokens.
    slot_mapping: [T, K] int32, page * P + offset for each token and KV head. Entries must be
        distinct and not negative. Padding tokens have entries of N * P or more, and write nothing.

    Returns the two pools; donated pools are written in place. Raises ValueError if the shapes do
    not fit together, if the pools have 2**31 slots or more, or if the named implementation cannot
    run them.
    """
    found = sizes(
        k=(k_TxKxD, "T K D"), v=(v_TxKxD, "T K D"), k_pages=(k_pages_NxPxD, "N P D"),
        v_pages=(v_pages_NxPxD, "N P D"), slot_mapping=(slot_mapping_TxK, "T K"),
    )  # fmt: skip
    K, D, N, P = (found[letter] for letter in "KDNP")
    if N * P >= 2**31:
        raise ValueError(
            f"{N} pages of {P} tokens have {N * P} slots, and an int32 counts to 2**31 - 1"
        )
    if isinstance(k_pages_NxPxD, QuantizedPages) or isinstance(v_pages_NxPxD, QuantizedPages):
        refusal: str | None = "it writes no quantised pages"
    else:
        refusal = write_sm90.unsupported(
            k_pages_NxPxD, [(K, D), (K, D)], v_pages_NxPxD, k_TxKxD, v_TxKxD
        )
    run = backend.choose("write_kv", WRITE, implementation or DEFAULT, refusal)
    return run(k_pages_NxPxD, v_pages_NxPxD, k_TxKxD, v_TxKxD, slot_mapping_TxK)


def copy_pages(pages_NxPxD, sources_C, destinations_C, *, implementation: str | None = None):
    """Copy page sources[i] to page destinations[i] for all i at once (copy-on-write, vLLM §4.4).

    pages: [N, P, D].
    sources, destinations: [C] int32. A pair with a destination of N or more copies nothing. All
        other destinations must be distinct, and must not be among the sources.

    Returns the pool; a donated pool is written in place. Raises ValueError if the shapes do not fit
    together, or if the named implementation cannot run them.
    """
    sizes(
        pages=(pages_NxPxD, "N P D"), sources=(sources_C, "C"), destinations=(destinations_C, "C")
    )
    refusal = write_sm90.unsupported(pages_NxPxD, [pages_NxPxD.shape[1:]])
    run = backend.choose("copy_pages", COPY, implementation or DEFAULT, refusal)
    return run(pages_NxPxD, sources_C, destinations_C)
