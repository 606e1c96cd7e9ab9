"""The public ops. They check shapes, fill in defaults and choose an implementation."""

import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.arguments import check_groups, check_options, check_schedule, sizes
from pallas_kernels.attention.schedule import DecodeSchedule
from pallas_kernels.quantized_attention import decode_sm90, reference, tables, xla
from pallas_kernels.quantized_attention.pages import PageFormat
from pallas_kernels.quantized_attention.sections import Section, refusal_of_formats, schedule_of

DECODE = {
    "reference": reference.decode,
    "xla": xla.decode,
    "mosaic_gpu": decode_sm90.decode_unified,
}


def plan_mixed_decode(
    counts_SxKxI, formats: tuple[PageFormat, ...], *, implementation: str | None = None
) -> DecodeSchedule | None:
    """The schedule of `mixed_precision_attention`, to be made once for all layers.

    counts, formats, implementation: as in `mixed_precision_attention`.

    Returns None where the implementation works without a schedule."""
    not_read = any(format.key_group or format.outliers for format in formats)
    if not_read or not backend.runs_kernels(implementation):
        return None
    counts = tuple(jnp.moveaxis(counts_SxKxI, -1, 0))
    return schedule_of(counts, [Section.of_format(format) for format in formats])


def mixed_precision_attention(
    q_SxHxD,
    words_NxW,
    tables_SxKxM,
    counts_SxKxI,
    formats: tuple[PageFormat, ...],
    *,
    single: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    oldest_S=None,
    schedule: DecodeSchedule | None = None,
    implementation: str | None = None,
):
    """Decode attention: one query per sequence over pages of two or three precisions (DiffKV §6.2).

    q:        [S, H, D] queries; head h reads KV head h // G.
    words:    [N, W] uint32, unified pages.
    tables:   [S, K, M] int32 page ids of each sequence's KV head. With two precisions, pages of
              the high precision fill the row from its left end, and pages of the low precision
              from its right end (§5.2). Entries between these pages may be anything. With three
              precisions, the first `single` columns hold pages of the highest precision only,
              and the other two precisions share the other columns in the same way (§5.3).
    counts:   [S, K, I] int32 tokens in each of I precisions. No count may exceed the capacity of
              the precision's columns.
    formats:  the page format of each precision, the highest precision first.
    single:   the number of columns for the highest of three precisions; 0 with two precisions.
    scale:    multiplies q·k; None means D ** -0.5.
    soft_cap: scores become soft_cap * tanh(score / soft_cap).
    oldest:   [S] int32. Only tokens with a stored position of at least `oldest` are read; None
              means 0. The kernel does not support it.
    schedule: `plan_mixed_decode` of these counts; None makes one for this call.

    Returns three results:
    the attention [S, H, D] in q's dtype, zeros for heads without tokens to read;
    the log-sum-exp of the scores [S, H] float32, -inf for heads without tokens to read;
    a tuple with one array of scores per precision, [S, K, pages, P, G] float32. `pages` is M -
    `single`, and `single` for the highest of three precisions. Pages are in reading order, so page
    0 of the low precision is the table's last entry. Axis P numbers the tokens of a page. The last
    three axes may be padded. Scores of tokens that are not read may be anything. A token's
    probability is exp(score - log-sum-exp).

    Raises ValueError if arguments do not fit together, or if the named implementation cannot run
    them.
    """
    found = sizes(
        q=(q_SxHxD, "S H D"), words=(words_NxW, "N W"), tables=(tables_SxKxM, "S K M"),
        counts=(counts_SxKxI, f"S K {len(formats)}"),
    )  # fmt: skip
    H, K, M, D = (found[letter] for letter in "HKMD")
    check_groups(H, K)
    check_options(scale, soft_cap)
    check_schedule(schedule, DecodeSchedule)
    runs = tables.runs(len(formats), M, single)
    for format in formats:
        dims = format.keys.head_dim, format.values.head_dim
        if dims != (D, D) or found["W"] != format.words:
            raise ValueError(
                f"pages of {format.words} words for head dim {dims} do not fit queries "
                f"{q_SxHxD.shape} and a pool {words_NxW.shape}"
            )
    refusal = refusal_of_formats(q_SxHxD, words_NxW, K, formats)
    window = {} if oldest_S is None else {"oldest": oldest_S}
    if window:
        refusal = refusal or "it reads tokens of all positions"
    implementations = DECODE
    if implementation is None and not refusal and backend.runs_kernels(None):
        # `choose` needs results of the same shapes from the programs for both devices.
        implementations = DECODE | {"xla": decode_sm90.with_its_shapes(xla.decode)}
    run = backend.choose("mixed_precision_attention", implementations, implementation, refusal)
    counts = tuple(jnp.moveaxis(jnp.asarray(counts_SxKxI, jnp.int32), -1, 0))
    return run(
        q_SxHxD, words_NxW, tables_SxKxM, counts, formats=formats, runs=runs,
        scale=D**-0.5 if scale is None else scale, soft_cap=soft_cap, schedule=schedule, **window,
    )  # fmt: skip
