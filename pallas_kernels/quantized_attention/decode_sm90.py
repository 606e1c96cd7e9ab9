"""Decode attention over pages of few bits on Hopper (LServe §3.2; DiffKV §6.2).

As in paged_attention/decode_sm90.py a warpgroup computes and another one fetches. Such a pair is
called a lane. A schedule gives each lane an equal part of the work. A thread block has two lanes,
because fetching warpgroups can leave registers to computing warpgroups only within a thread block.

A tile is a number of whole quantised pages. Their words are loaded from shared memory to registers,
where they become 16-bit floats (quantization/registers.py). Keys are multiplied from registers.
Values are stored to shared memory again, because only the tensor core can transpose them. Scales
and zero points are applied to scores and probabilities, never to elements:

    q . k         = scale * (q . c) + zero * sum(q)
    sum of p * v  = (p * scale) . c + p . zero

A row's tokens may have several precisions, each with separate pages. All tiles of the first
precision come first, then all tiles of the second, and so on. One softmax runs over all tiles.

Floor: the words of the tokens that are read are moved once. A multiprocessor needs about 1,500
clocks to read a tile of 4-bit keys and 2-bit values, and a warp needs about 1,500 instructions to
unpack it. So tiles are as large as the shared memory for two lanes allows, and no element is
unpacked twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce, wraps

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import schedule as schedules
from pallas_kernels.attention import split_kv, tiles
from pallas_kernels.attention.pipeline import Ring, drain
from pallas_kernels.attention.tiles import LOG2_E, NEG_INF, columns, constant, rows
from pallas_kernels.mosaic import (
    pl,
    plgpu,
    product_of_registers,
    reduced_rows,
    reduction_scratch,
    store,
    swizzled,
    tile_layout,
    whole_product,
)
from pallas_kernels.quantization import registers
from pallas_kernels.quantization.quantizer import split
from pallas_kernels.quantized_attention.sections import (
    CHUNK,
    Section,
    buffers,
    pages_of_tile,
    rows_copied_together,
    schedule_of,
    views_of,
)

LANES = 2  # Lanes of a thread block.
STAGES = 2  # Tiles of a lane in flight.
QUERY_SLOTS = 1  # Items of a lane with queries in shared memory.
# Registers of a thread. All lanes together have the registers of a multiprocessor.
COMPUTING_REGISTERS, FETCHING_REGISTERS = 232, 24


def decode(
    q, k_words, v_words, tables, counts, sections: Sequence[Section], *, page_offset=0, scale,
    sliding_window=None, soft_cap=None, schedule=None, returns_scores=False,
):  # fmt: skip
    """Decode over one or more precisions.

    counts: [S, K] tokens, one array per precision. A sliding window requires a single precision.

    Returns the attention [S, H, D], the log-sum-exp [S, H], and a list with one array of scores per
    precision, [S, K, pages, rows, N], with pages in reading order. Without returns_scores the list
    is empty. `pages` is at least the number of the precision's columns, rows at least P, and N at
    least G. Scores of tokens that are not read, and of padding heads, may be anything.
    """
    S, H, D = q.shape
    K, M = tables.shape[1:]
    dtype, G, R = q.dtype, H // K, S * K
    N, pages = split_kv.padded_group(G), pages_of_tile(sections)
    if schedule is None:
        schedule = schedule_of(counts, sections, sliding_window)
    assert len(schedule.merges) % LANES == 0, f"a schedule of {len(schedule.merges)} blocks"
    pools = k_words, v_words
    views, place_of_view = views_of(pools, sections)
    sizes, buffers_of = buffers(sections, pages)
    # All scores of a tile are written, so the shapes hold whole tiles.
    shapes = [
        (R, pages * pl.cdiv(section.width or M, pages), section.rows, N) for section in sections
    ] * returns_scores
    copies = [sum(1 + format.scaled for format in section.formats) for section in sections]

    def paged_decode_of_words(
        ins: split_kv.Inputs, outs: split_kv.Outputs,
        *, queries_s, scales_s, q_s, values_s, p_s, out_s, scratch_s, queries, tiles_ring, codes_s,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        lane, fetches = lax.rem(warpgroup, LANES), warpgroup >= LANES
        block = lax.axis_index("block") * LANES + lane
        first_item, end_item = ins.block_items[block], ins.block_items[block + 1]
        hidden_zero = ins.block_items[0]  # The first block's first item is always 0.
        queries = replace(queries, begin=first_item, offset=lane * QUERY_SLOTS)
        ring = replace(tiles_ring, offset=lane * STAGES)

        def over_tiles(item, body, carry):
            """Loop `body(number, count, tile, carry)` over all tiles of an item, by precision."""
            begin, end = ins.items[item, 1], ins.items[item, 2]
            before = 0
            for number, section in enumerate(sections):
                count = ins.items[item, 4 + number]
                lower, upper = begin - before, end - before
                if number:
                    lower = jnp.maximum(lower, 0)
                if number + 1 < len(sections):
                    all_tiles = pl.cdiv(count, pages * section.tokens)
                    upper, before = jnp.minimum(upper, all_tiles), before + all_tiles
                carry = lax.fori_loop(lower, upper, partial(body, number, count), carry)
            return carry

        @pl.when(fetches)
        def fetch():
            plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")

            def fetch_item(item, n):
                row, slot = ins.items[item, 0], queries.free(item)
                plgpu.copy_gmem_to_smem(
                    ins.q.at[row], queries_s.at[slot, pl.ds(0, G)], queries.filled.at[slot]
                )
                return over_tiles(item, partial(fetch_tile, row), n)

            def fetch_tile(row, number, count, tile, n):
                section = sections[number]
                P, first = section.tokens, schedules.first_token(count, sliding_window)
                ids = tiles.page_ids(
                    ins.tables.at[row], lax.rem(row, K), tile * (pages * P), pages * P, first,
                    count, P, ins.offset, section.column, section.step,
                )  # fmt: skip
                slot = ring.free(n)
                for i, page in enumerate(ids):
                    at = i * section.rows
                    for which, format in enumerate(section.formats):
                        C = format.code_words
                        of_codes, of_scales = section.firsts[2 * which : 2 * which + 2]
                        plgpu.copy_gmem_to_smem(
                            ins.pools[place_of_view[which, C]].at[page, pl.ds(of_codes // C, P)],
                            codes_s[buffers_of[number][which]].at[slot, pl.ds(at, P)],
                            ring.filled.at[slot],
                        )
                        if format.scaled:
                            words = 4 * pl.cdiv(P, 4)  # A copy must have a multiple of 16 bytes.
                            plgpu.copy_gmem_to_smem(
                                ins.pools[which].at[page, pl.ds(of_scales, words)],
                                scales_s[which].at[slot, pl.ds(at, words)],
                                ring.filled.at[slot],
                            )
                for _ in range(pages * (max(copies) - copies[number])):
                    plgpu.barrier_arrive(ring.filled.at[slot])
                return n + 1

            drain(lax.fori_loop(first_item, end_item, fetch_item, jnp.int32(0)), ring)
            drain(end_item, queries)

        @pl.when(jnp.logical_not(fetches))
        def compute():
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            my_q, my_values, my_p, my_out, scratch = (
                x.at[lane] for x in (q_s, values_s, p_s, out_s, scratch_s)
            )

            def run_item(item, n):
                found = split_kv.queries_of(item, queries, queries_s, my_q)
                sums = reduced_rows("add", found.astype(jnp.float32), scratch)
                zeros = constant(0, (CHUNK, N))
                row = ins.items[item, 0]
                n, acc, top, total, rest = over_tiles(
                    item, partial(step, row, sums), (n, *split_kv.softmax_start(D, N), zeros)
                )
                acc += columns(reduced_rows("add", rest, scratch), acc.shape)
                # The previous item's copy to global memory may still read out_s.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                state = acc, top, reduced_rows("add", total, scratch)
                split_kv.end_item(state, row, ins.items[item, 3], split_kv.begin_row, my_out, outs)
                return n

            def step(row, sums, number, count, tile, carry):
                n, acc, top, total, rest = carry
                section, slot = sections[number], ring.wait(n)
                (keys, values), shape = section.formats, (CHUNK, N)
                k_s, v_s = (codes_s[buffer].at[slot] for buffer in buffers_of[number])
                first = schedules.first_token(count, sliding_window)
                chunks = range(0, pages * section.rows, CHUNK)

                def held(at, shape):
                    return _held(section, at, tile * pages, shape, first, count, sliding_window)

                def scales(which, at):
                    words = scales_s[which].at[slot, pl.ds(at, CHUNK)]
                    return split(plgpu.load(words, layout=tile_layout(without=1), optimized=False))

                def codes(words_s, at, format):
                    words = plgpu.load(
                        words_s.at[pl.ds(at, CHUNK)], layout=tile_layout(), optimized=False
                    )
                    return registers.operand(words, format, dtype, hidden_zero)

                scores = []
                for at in chunks:
                    products = product_of_registers(
                        shape, codes(k_s, at, keys), my_q.transpose((1, 0))
                    )
                    if keys.scaled:
                        unit, zero = scales(0, at)
                        # The offset may exceed the codes, so it is subtracted before any rounding.
                        products -= columns(sums * registers.offset(keys, dtype), shape)
                        products *= rows(unit, shape)
                        products += rows(zero, shape) * columns(sums, shape)
                    of_chunk = split_kv.scores_of(products, scale, soft_cap)
                    if returns_scores:
                        page, of_page = divmod(at, section.rows)
                        place = outs.scores[number].at[row, tile * pages + page]
                        store(place.at[pl.ds(of_page, CHUNK)], of_chunk)
                    scores.append(jnp.where(held(at, shape), of_chunk * LOG2_E, NEG_INF))
                largest = reduced_rows("max", reduce(jnp.maximum, scores), scratch)
                new_top = jnp.maximum(top, largest)
                decay = jnp.exp2(top - new_top)
                total, rest, acc = (x * columns(decay, x.shape) for x in (total, rest, acc))
                weights_of = []
                for at, of_chunk in zip(chunks, scores):
                    weights = probs = jnp.exp2(of_chunk - columns(new_top, shape))
                    total += probs
                    if values.scaled:
                        unit, zero = scales(1, at)
                        seen, middle = held(at, shape), 2 ** (values.bits - 1)
                        weights = jnp.where(seen, probs * rows(unit, shape), 0.0)
                        rest += jnp.where(seen, probs * rows(zero + middle * unit, shape), 0.0)
                    weights = weights.astype(dtype)
                    if values.scaled and (more := registers.offset(values, dtype) + middle):
                        # The product uses rounded weights, so the offset's term uses them too.
                        rest -= weights.astype(jnp.float32) * more
                    weights_of.append(weights)
                for at, weights in zip(chunks, weights_of):
                    elements = codes(v_s, at, values)
                    if not values.scaled:  # Another sequence may have left NaN in the page.
                        seen = held(at, elements.shape)
                        elements = jnp.where(seen, elements, jnp.zeros_like(elements))
                    my_values[...] = elements
                    my_p.transpose((1, 0))[...] = weights
                    plgpu.commit_smem()
                    if at == chunks[-1]:
                        ring.hand_back(n)
                    acc += whole_product(
                        (D, N), my_values.transpose((1, 0)), my_p.transpose((1, 0))
                    )
                return n + 1, acc, new_top, total, rest

            lax.fori_loop(first_item, end_item, run_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    stages = LANES * STAGES
    of_scales = plgpu.SMEM((stages, pages * max(section.rows for section in sections)), jnp.uint32)

    def of_lanes(*shape):
        return plgpu.SMEM((LANES, *shape), dtype, transforms=swizzled(64))

    out, lse, scores = split_kv.launch(
        paged_decode_of_words, "paged_decode_of_words", split_kv.write_row, schedule,
        q, (*pools, *views), tables, page_offset=page_offset, scores=shapes, lanes=LANES,
        row_s=plgpu.SMEM((N, D), dtype),
        scratch={
            "queries_s": plgpu.SMEM((LANES * QUERY_SLOTS, N, D), dtype),
            "scales_s": (of_scales, of_scales),
            "q_s": of_lanes(N, D), "values_s": of_lanes(CHUNK, D), "p_s": of_lanes(N, CHUNK),
            "out_s": plgpu.SMEM((LANES, N, D), dtype), "scratch_s": reduction_scratch(N, LANES),
            "queries": Ring.scratch(QUERY_SLOTS, lanes=LANES),
            "tiles_ring": Ring.scratch(STAGES, copies=pages * max(copies), lanes=LANES),
            "codes_s": [
                plgpu.SMEM((stages, count, C), jnp.uint32, transforms=swizzled(min(C, 32), rows, 4))
                for (C, count), rows in zip(
                    sizes, rows_copied_together(sections, buffers_of, pools), strict=True
                )
            ],
        },
        num_threads=2 * LANES, thread_name="warpgroup",
    )  # fmt: skip
    return out, lse, [x.reshape(S, K, *x.shape[1:]) for x in scores]


def _held(section: Section, at: int, first_page, shape, first, count, sliding_window):
    """Mask of `shape`, whose rows are a tile's rows from `at` on: true for attended tokens."""
    P, R = section.tokens, section.rows
    offset = tiles.index_of(0, shape, at % R)
    token = (first_page + at // R) * P + offset
    held = token < count
    if P % CHUNK:
        held &= offset < P
    if sliding_window is not None:
        held &= token >= first
    return held


def decode_pages(q, k_pages, v_pages, tables, lengths, *, returns_scores=False, **options):
    """`paged_attention` over `QuantizedPages`."""
    (S, H, _), (K, M), P = q.shape, tables.shape[1:], k_pages.page_size
    section = Section.of_page(k_pages.format, v_pages.format, P)
    out, lse, scores = decode(
        q, k_pages.words, v_pages.words, tables, (lengths,), [section],
        returns_scores=returns_scores, **options,
    )  # fmt: skip
    if not returns_scores:
        return out, lse
    x = scores[0][:, :, :M, :P, : H // K].reshape(S * K, M * P, -1)
    return out, lse, split_kv.of_tokens(x, tables, lengths, H, P, options.get("sliding_window"))


def decode_unified(
    q, words, tables, counts, *, formats, runs, scale, soft_cap=None, schedule=None
):  # fmt: skip
    """As `mixed_precision_attention`, for arguments that `refusal_of_formats` allows."""
    sections = [Section.of_format(format, run) for format, run in zip(formats, runs, strict=True)]
    out, lse, scores = decode(
        q, words, words, tables, counts, sections, scale=scale, soft_cap=soft_cap,
        schedule=schedule, returns_scores=True,
    )  # fmt: skip
    return out, lse, tuple(scores)


def with_its_shapes(run: Callable) -> Callable:
    """The implementation `run`, with its scores padded to the shapes of the kernel's scores."""

    @wraps(run)
    def padded(q, words, tables, counts, *, formats, **options):
        out, lse, scores = run(q, words, tables, counts, formats=formats, **options)
        sections = [Section.of_format(format) for format in formats]
        pages, N = pages_of_tile(sections), split_kv.padded_group(q.shape[1] // tables.shape[1])
        of_each = []
        for x, section in zip(scores, sections):
            more = -x.shape[2] % pages, section.rows - section.tokens, N - x.shape[-1]
            of_each.append(jnp.pad(x, [(0, 0), (0, 0), *((0, n) for n in more)]))
        return out, lse, tuple(of_each)

    return padded
