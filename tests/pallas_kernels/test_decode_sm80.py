"""The waits of the Ampere kernel, which the interpreter cannot check: its copies end at once."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import schedule, split_kv
from pallas_kernels.paged_attention import decode_sm80, paged_attention
from tests.sweeps import swept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "D", "P"),
    swept([(9, 64, 16), (2, 128, 64), (1, 64, 16), (2, 64, 16), (1, 128, 64), (9, 128, 64)], 2),
)
def test_every_product_finds_its_copies_ended_and_no_copy_overwrites_what_is_yet_to_be_read(
    monkeypatch, D, P, tiles
):
    """The kernel's copies, waits and products are recorded in order, and checked by cp.async's
    rule: wait(n) ends all earlier copies but the latest n."""
    one_block = functools.partial(schedule.decode_schedule, blocks=1)
    monkeypatch.setattr(schedule, "decode_schedule", one_block)
    tile = split_kv.tile_tokens(D, jnp.bfloat16)
    events = []

    def recorded(name):
        run = getattr(decode_sm80, name)

        def record_and_run(*args):
            number = args[0] if name == "wait_copies" else 0
            jax.debug.callback(lambda: events.append((name, number)), ordered=True)
            return run(*args)

        monkeypatch.setattr(decode_sm80, name, record_and_run)

    for name in ("copy_async", "wait_copies", "mma"):
        recorded(name)
    M = tiles * tile // P
    pages = jnp.zeros((M, P, D), jnp.bfloat16)
    paged_attention(
        jnp.zeros((1, 2, D), jnp.bfloat16), pages, pages,
        jnp.arange(M, dtype=jnp.int32)[None, None], jnp.full((1, 1), tiles * tile, jnp.int32),
        implementation="mosaic_gpu_ampere",
    )  # fmt: skip
    jax.effects_barrier()

    stages = decode_sm80.STAGE_BYTES // (2 * tile * D * pages.dtype.itemsize)
    assert sum(name == "mma" for name, _ in events) == 2 * tiles
    assert _in_order(events, tile // P, 2 * stages)
    # Waits for keys and waits for values alternate, and neither can be left out.
    waits = [i for i, (name, _) in enumerate(events) if name == "wait_copies"]
    for left_out in (waits[::2], waits[1::2]):
        fewer = [event for i, event in enumerate(events) if i not in left_out]
        assert not _in_order(fewer, tile // P, 2 * stages)


def _in_order(events, copies: int, slots: int) -> bool:
    """True if the `copies` of each product's operand have ended before it, and no copy begins
    before the product that read its slot (there are `slots`)."""
    begun = ended = products = 0
    for name, newer in events:
        if name == "copy_async":
            begun += 1
            if begun > (products + slots) * copies:
                return False
        elif name == "wait_copies":
            ended = max(ended, begun - newer)
        else:
            products += 1
            if ended < products * copies:
                return False
    return begun == products * copies
