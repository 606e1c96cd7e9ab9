"""Decode attention over pages of few bits on Hopper (LServe §3.2; DiffKV §6.2).

As in decode_sm90.py a warpgroup computes, another one fetches, and a schedule gives equal parts of
the work to such pairs. Two of them, lanes, are one thread block: only within a block can those that
fetch leave their registers to those that compute. What differs besides is a tile: some whole pages,
as quantised. Their words go from shared memory to registers, where they become 16-bit floats
(quantization/registers.py): those of keys are multiplied there, and those of values go back to
shared memory, as only the tensor core can transpose them. Scales and zero points meet scores and
probabilities, never elements:

    q . k         = scale * (q . c) + zero * sum(q)
    sum of p * v  = (p * scale) . c + p . zero

A row's tokens may be of several precisions, each with pages of its own: tiles of the first come
before those of the second, and so on, and one softmax runs over all.

Floor: words of the tokens that are read, once. A tile of 4-bit keys and 2-bit values takes a
multiprocessor about 1,500 clocks to read, and a warp about as many instructions to unpack; so tiles
are as large as shared memory allows two lanes, and nothing is done twice for an element.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import (
    pl,
    plgpu,
    product_of_registers,
    reduced_rows,
    reduction_scratch,
    store,
    swizzled,
    whole_product,
)
from pallas_kernels.paged_attention import quantized_tiles, split_kv, tiles
from pallas_kernels.paged_attention import schedule as schedules
from pallas_kernels.paged_attention.quantized_tiles import CHUNK, Section
from pallas_kernels.paged_attention.tiles import LAYOUT, LOG2_E, NEG_INF, columns, constant, rows
from pallas_kernels.quantization import registers

LANES = 2  # Of a thread block.
STAGES = 2  # Tiles of a lane under way.
QUERY_SLOTS = 1  # Items of a lane whose queries are in shared memory.
# Of a thread, so that those of all lanes are what a multiprocessor has.
COMPUTING_REGISTERS, FETCHING_REGISTERS = 232, 24
_ROWS = LAYOUT.reduce(1)


def decode(
    q, k_words, v_words, tables, counts, sections: Sequence[Section], *, page_offset=0, scale,
    sliding_window=None, soft_cap=None, schedule=None, returns_scores=False,
):  # fmt: skip
    """Attention [S, H, D], its log-sum-exp [S, H], and a list of the scores of each precision, if
    asked for: [S, K, pages, rows, N] by page in the order of reading. These are as many as its
    columns, P and G, or more, and what belongs to no token that is read, or to no query head, may
    be anything.

    counts: of each precision, [S, K] tokens. A sliding window takes one precision.
    """
    S, H, D = q.shape
    K, M = tables.shape[1:]
    dtype, G, R = q.dtype, H // K, S * K
    N, pages = split_kv.padded_group(G), quantized_tiles.pages_of_tile(sections)
    if schedule is None:
        schedule = quantized_tiles.schedule_of(counts, sections, sliding_window)
    assert len(schedule.merges) % LANES == 0, f"a schedule of {len(schedule.merges)} blocks"
    views, place_of_view = quantized_tiles.views_of((k_words, v_words), sections)
    sizes, buffers_of = quantized_tiles.buffers_of(sections, pages)
    most_rows = pages * max(section.rows for section in sections)
    # The scores of a tile are written whole.
    shapes = [
        (R, pages * pl.cdiv(section.width or M, pages), section.rows, N) for section in sections
    ] * returns_scores
    copies = [sum(1 + format.scaled for format in section.formats) for section in sections]

    def paged_decode_of_words(q_ref, *other_refs):
        refs = list(other_refs)
        pool_refs, refs = refs[: 2 + len(views)], refs[2 + len(views) :]
        tables_ref, items_ref, block_items_ref, offset_ref, *refs = refs
        (out_ref, lse_ref, partials_ref, lses_ref), refs = refs[:4], refs[4:]
        scores_refs, refs = refs[: len(shapes)], refs[len(shapes) :]
        queries_s, k_scales_s, v_scales_s, *refs = refs
        of_lanes, refs = refs[:5], refs[5:]
        q_filled, q_read, filled, read, *codes_s = refs
        warpgroup = lax.axis_index("warpgroup")
        lane, fetches = lax.rem(warpgroup, LANES), warpgroup >= LANES
        block = lax.axis_index("block") * LANES + lane
        first_item, end_item = block_items_ref[block], block_items_ref[block + 1]
        hidden_zero = block_items_ref[0]  # the first item of all

        def query_slot(item):
            return lane * QUERY_SLOTS + lax.rem(item - first_item, QUERY_SLOTS)

        def slot_of(n):
            return lane * STAGES + lax.rem(n, STAGES)

        def over_tiles(item, body, carry):
            """`body(number, count, tile, carry)` for all tiles of an item, by precision."""
            begin, end = items_ref[item, 1], items_ref[item, 2]
            before = 0
            for number, section in enumerate(sections):
                count = items_ref[item, 4 + number]
                lower, upper = begin - before, end - before
                if number:
                    lower = jnp.maximum(lower, 0)
                if number + 1 < len(sections):
                    all_tiles = pl.cdiv(count, pages * section.tokens)
                    upper, before = jnp.minimum(upper, all_tiles), before + all_tiles
                carry = lax.fori_loop(lower, upper, functools.partial(body, number, count), carry)
            return carry

        @pl.when(fetches)
        def fetch():
            plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")

            def fetch_item(item, n):
                row, slot = items_ref[item, 0], query_slot(item)
                pl.when(item >= first_item + QUERY_SLOTS)(
                    lambda: plgpu.barrier_wait(q_read.at[slot])
                )
                plgpu.copy_gmem_to_smem(
                    q_ref.at[row], queries_s.at[slot, pl.ds(0, G)], q_filled.at[slot]
                )
                return over_tiles(item, functools.partial(fetch_tile, row), n)

            def fetch_tile(row, number, count, tile, n):
                section, slot = sections[number], slot_of(n)
                P, first = section.tokens, schedules.first_token(count, sliding_window)
                ids = tiles.page_ids(
                    tables_ref.at[row], lax.rem(row, K), tile * (pages * P), pages * P, first,
                    count, P, offset_ref, section.column, section.step,
                )  # fmt: skip
                pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(read.at[slot]))
                for i, page in enumerate(ids):
                    for which, format in enumerate(section.formats):
                        C = format.code_words
                        of_codes, of_scales = section.firsts[2 * which : 2 * which + 2]
                        plgpu.copy_gmem_to_smem(
                            pool_refs[place_of_view[which, C]].at[page, pl.ds(of_codes // C, P)],
                            codes_s[buffers_of[number][which]].at[slot, pl.ds(i * section.rows, P)],
                            filled.at[slot],
                        )
                        if format.scaled:
                            words = 4 * pl.cdiv(P, 4)  # A copy is of whole 16 bytes.
                            plgpu.copy_gmem_to_smem(
                                pool_refs[which].at[page, pl.ds(of_scales, words)],
                                (k_scales_s, v_scales_s)[which].at[
                                    slot, pl.ds(i * section.rows, words)
                                ],
                                filled.at[slot],
                            )
                for _ in range(pages * (max(copies) - copies[number])):
                    plgpu.barrier_arrive(filled.at[slot])
                return n + 1

            n = lax.fori_loop(first_item, end_item, fetch_item, jnp.int32(0))
            # No barrier may end with arrivals unseen.
            lax.fori_loop(
                jnp.maximum(n - STAGES, 0), n,
                lambda n, _: plgpu.barrier_wait(read.at[slot_of(n)]), None,
            )  # fmt: skip
            lax.fori_loop(
                jnp.maximum(end_item - QUERY_SLOTS, first_item), end_item,
                lambda item, _: plgpu.barrier_wait(q_read.at[query_slot(item)]), None,
            )  # fmt: skip

        @pl.when(jnp.logical_not(fetches))
        def compute():
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            q_s, values_s, p_s, out_s, scratch = (x.at[lane] for x in of_lanes)

            def run_item(item, n):
                row, place, slot = items_ref[item, 0], items_ref[item, 3], query_slot(item)
                plgpu.barrier_wait(q_filled.at[slot])
                queries = plgpu.load(
                    queries_s.at[slot].transpose((1, 0)), layout=LAYOUT, optimized=False
                )
                q_s.transpose((1, 0))[...] = queries
                plgpu.commit_smem()
                plgpu.barrier_arrive(q_read.at[slot])
                sums = reduced_rows("add", queries.astype(jnp.float32), scratch)
                zeros = constant(0, (CHUNK, N))
                n, acc, top, total, rest = over_tiles(
                    item, functools.partial(step, row, sums),
                    (n, *split_kv.softmax_start(D, N), zeros),
                )  # fmt: skip
                acc += columns(reduced_rows("add", rest, scratch), acc.shape)
                # The copy of the item before may still read.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                write = functools.partial(split_kv.write_row, out_s, out_ref)
                state = acc, top, reduced_rows("add", total, scratch)
                split_kv.end_item(state, row, place, write, lse_ref, partials_ref, lses_ref)
                return n

            def step(row, sums, number, count, tile, carry):
                n, acc, top, total, rest = carry
                section, slot = sections[number], slot_of(n)
                (keys, values), shape = section.formats, (CHUNK, N)
                k_s, v_s = (codes_s[buffer].at[slot] for buffer in buffers_of[number])
                first = schedules.first_token(count, sliding_window)
                chunks = range(0, pages * section.rows, CHUNK)

                def held(at, shape):
                    return _held(section, at, tile * pages, shape, first, count, sliding_window)

                plgpu.barrier_wait(filled.at[slot])
                scores = []
                for at in chunks:
                    words = plgpu.load(k_s.at[pl.ds(at, CHUNK)], layout=LAYOUT, optimized=False)
                    codes = registers.operand(words, keys, dtype, hidden_zero)
                    products = product_of_registers(shape, codes, q_s.transpose((1, 0)))
                    if keys.scaled:
                        unit, zero = _scales(k_scales_s.at[slot], at)
                        # Taken out before anything is rounded, for it may be larger than codes.
                        products -= columns(sums * registers.offset(keys, dtype), shape)
                        products *= rows(unit, shape)
                        products += rows(zero, shape) * columns(sums, shape)
                    of_chunk = split_kv.scores_of(products, scale, soft_cap)
                    if returns_scores:
                        page, of_page = divmod(at, section.rows)
                        place = scores_refs[number].at[row, tile * pages + page]
                        store(place.at[pl.ds(of_page, CHUNK)], of_chunk)
                    scores.append(jnp.where(held(at, shape), of_chunk * LOG2_E, NEG_INF))
                largest = reduced_rows("max", functools.reduce(jnp.maximum, scores), scratch)
                new_top = jnp.maximum(top, largest)
                decay = jnp.exp2(top - new_top)
                total, rest, acc = (x * columns(decay, x.shape) for x in (total, rest, acc))
                weights_of = []
                for at, of_chunk in zip(chunks, scores):
                    probs = jnp.exp2(of_chunk - columns(new_top, shape))
                    total += probs
                    weights = probs
                    if values.scaled:
                        unit, zero = _scales(v_scales_s.at[slot], at)
                        seen, middle = held(at, shape), 2 ** (values.bits - 1)
                        weights = jnp.where(seen, probs * rows(unit, shape), 0.0)
                        zero = jnp.where(seen, probs * rows(zero + middle * unit, shape), 0.0)
                        rest += zero
                    weights = weights.astype(dtype)
                    if values.scaled and (more := registers.offset(values, dtype) + middle):
                        # What has been rounded is taken out as it is.
                        rest -= weights.astype(jnp.float32) * more
                    weights_of.append(weights)
                for at, weights in zip(chunks, weights_of):
                    words = plgpu.load(v_s.at[pl.ds(at, CHUNK)], layout=LAYOUT, optimized=False)
                    codes = registers.operand(words, values, dtype, hidden_zero)
                    if not values.scaled:  # What a former owner has left may be no number.
                        codes = jnp.where(held(at, codes.shape), codes, jnp.zeros_like(codes))
                    values_s[...] = codes
                    p_s.transpose((1, 0))[...] = weights
                    plgpu.commit_smem()
                    if at == chunks[-1]:
                        plgpu.barrier_arrive(read.at[slot])
                    acc += whole_product((D, N), values_s.transpose((1, 0)), p_s.transpose((1, 0)))
                return n + 1, acc, new_top, total, rest

            lax.fori_loop(first_item, end_item, run_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def write_merged(out_ref, row, attention, out_s):
        split_kv.write_row(out_s, out_ref, row, attention)
        plgpu.wait_smem_to_gmem(0)

    stages, query_slots = LANES * STAGES, LANES * QUERY_SLOTS
    rows_of_tile = quantized_tiles.rows_copied_together(sections, buffers_of, (k_words, v_words))
    codes = [
        plgpu.SMEM((stages, count, C), jnp.uint32, transforms=swizzled(min(C, 32), rows, 4))
        for (C, count), rows in zip(sizes, rows_of_tile, strict=True)
    ]
    scales_s = plgpu.SMEM((stages, most_rows), jnp.uint32)
    queries, read = plgpu.Barrier(num_barriers=query_slots), plgpu.Barrier(num_barriers=stages)
    out, lse, scores = split_kv.launch(
        paged_decode_of_words, write_merged, schedule,
        q, (k_words, v_words, *views), tables, page_offset=page_offset, scores=shapes,
        write_scratch=(plgpu.SMEM((N, D), dtype),), lanes=LANES,
        scratch_types=(
            plgpu.SMEM((query_slots, N, D), dtype), scales_s, scales_s,
            plgpu.SMEM((LANES, N, D), dtype, transforms=swizzled(64)),
            plgpu.SMEM((LANES, CHUNK, D), dtype, transforms=swizzled(64)),
            plgpu.SMEM((LANES, N, CHUNK), dtype, transforms=swizzled(64)),
            plgpu.SMEM((LANES, N, D), dtype), reduction_scratch(N, LANES),
            queries, queries,
            plgpu.Barrier(num_arrivals=pages * max(copies), num_barriers=stages), read,
            *codes,
        ),
        num_threads=2 * LANES, thread_name="warpgroup",
    )  # fmt: skip
    return out.reshape(S, H, D), lse, [x.reshape(S, K, *x.shape[1:]) for x in scores]


def _held(section: Section, at: int, first_page, shape, first, count, sliding_window):
    """Which of an array's rows from row `at` of a tile on are tokens that are attended to."""
    P, R = section.tokens, section.rows
    offset = tiles.index_of(0, shape, at % R)
    token = (first_page + at // R) * P + offset
    held = token < count
    if P % CHUNK:
        held &= offset < P
    if sliding_window is not None:
        held &= token >= first
    return held


def _scales(words_ref, at: int):
    words = plgpu.load(words_ref.at[pl.ds(at, CHUNK)], layout=_ROWS, optimized=False)
    return registers.scale_and_zero(words)


def decode_pages(q, k_pages, v_pages, tables, lengths, *, returns_scores=False, **options):
    """As `decode_sm90.decode`, over `QuantizedPages`."""
    (S, H, _), (K, M), P = q.shape, tables.shape[1:], k_pages.page_size
    section = quantized_tiles.section_of(k_pages.format, P, v_pages.format)
    out, lse, scores = decode(
        q, k_pages.words, v_pages.words, tables, (lengths,), [section],
        returns_scores=returns_scores, **options,
    )  # fmt: skip
    if not returns_scores:
        return out, lse
    scores_SxKxGxt = scores[0][:, :, :M, :P, : H // K].reshape(S, K, M * P, -1).swapaxes(2, 3)
    token, window = jnp.arange(M * P), options.get("sliding_window")
    first = schedules.first_token(lengths, window)
    read = (token >= first[..., None]) & (token < lengths[..., None])
    kept = jnp.where(read[:, :, None], scores_SxKxGxt, -jnp.inf)
    return out, lse, kept.reshape(S, H, M * P)
