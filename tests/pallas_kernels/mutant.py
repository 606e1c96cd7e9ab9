"""A kernel without one of its waits and commits, in a process of its own: it may never end.

    python -m tests.pallas_kernels.mutant OP NUMBER

leaves out the call of that number and exits with 0 if the op still gives, without a race, what
`reference` gives.
"""

import os
import sys
import threading
import time
from dataclasses import replace

import jax
import numpy as np

from pallas_kernels.kv_write import specs as kv_write
from pallas_kernels.lora import specs as lora
from pallas_kernels.mosaic import plgpu
from pallas_kernels.page_selection import specs as page_selection
from pallas_kernels.paged_attention import specs as paged_attention
from pallas_kernels.quantized_attention import specs as quantized_attention
from pallas_kernels.specs import Attention, Heads
from tests.pallas_kernels.interpreted import run_spec

HEADS = Heads(2, 1, 128)
# A window, and more tiles than a block has stages: slots are filled again.
ATTENTION = Attention(
    HEADS, sequences=2, context=600, page_size=64, sliding_window=450, ragged=True
)
SPECS = {
    # Some thread blocks have more items than places for queries.
    "paged_attention": paged_attention.decode(replace(ATTENTION, sequences=8)),
    "paged_prefill_attention": paged_attention.prefill(replace(ATTENTION, chunk=200)),
    # Lanes with several items, and more tiles than stages: 11 tiles for 4 lanes. A page is a tile.
    "quantised_paged_attention": paged_attention.decode(
        replace(ATTENTION, sequences=4, sliding_window=None, kv_bits=8, context=700, page_size=128)
    ),
    # As many, of both precisions.
    "mixed_precision_attention": quantized_attention.make(
        quantized_attention.Mixed(
            HEADS, sequences=5, tokens=1200, kept=(0.4, 0.6), page_size=128, ragged=True
        )
    ),
    # As many tiles, and more rows of a thread block than places for queries.
    "select_pages": page_selection.select(
        page_selection.Selection(Heads(2, 1), 8, 4096, page_size=128, budget=512, selecting=1)
    ),
    "write_kv": kv_write.write(HEADS, 5, num_pages=12),
    "copy_pages": kv_write.copy(64, 4, num_pages=20),
    # More steps than a block has stages, segments of one token and of several, and mixed ranks.
    "sgmv": lora.make(lora.Lora(2048, 128, (1, 70, 1, 3, 1, 5), ranks=(16, 32, 0))),
}
WAITS = (
    "barrier_wait", "barrier_arrive", "commit_smem", "wait_smem_to_gmem", "wait_gmem_to_smem",
)  # fmt: skip


NEVER_ENDS = 3
# A process that has used less time of a processor than this for so long waits for itself.
STILL, STILL_SECONDS = 0.1, 5.0


class LeaveOut:
    """Replaces the calls that wait, arrive and commit; counts them, and leaves out that of
    `number`."""

    def __init__(self, number: int = -1):
        self.calls = 0
        self.number = number

    def replace(self, real):
        def call(*arguments, **options):
            self.calls += 1
            if self.calls - 1 != self.number:
                real(*arguments, **options)

        return call


def end_if_nothing_moves() -> None:
    """A kernel without one of its waits may wait for ever."""
    before = -1.0
    while time.process_time() > before + STILL:
        before = time.process_time()
        time.sleep(STILL_SECONDS)
    os._exit(NEVER_ENDS)


def main(op: str, number: int) -> None:
    spec = SPECS[op]
    arguments = spec.arguments(jax.random.key(0))
    expected = run_spec(spec, arguments, "reference")
    mutation = LeaveOut(number)
    for name in WAITS:
        setattr(plgpu, name, mutation.replace(getattr(plgpu, name)))
    found = run_spec(spec, arguments, "mosaic_gpu")
    rows = slice(arguments["query_starts"][-1]) if "query_starts" in arguments else slice(None)
    if op == "mixed_precision_attention":  # Scores hold anything where there is no token.
        found, expected = found[:1], expected[:1]
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        f, e = (np.asarray(x, np.float32)[rows] for x in (f, e))
        np.testing.assert_allclose(f, e, atol=2e-2, rtol=0)


if __name__ == "__main__":
    threading.Thread(target=end_if_nothing_moves, daemon=True).start()
    main(sys.argv[1], int(sys.argv[2]))
