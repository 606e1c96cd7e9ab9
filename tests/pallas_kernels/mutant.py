"""A kernel without one of its waits or commits, in a process of its own, as it may never end.

    python -m tests.pallas_kernels.mutant OP NUMBER

The program leaves out the call of that number, and exits with 0 if the op still gives the result of
`reference` without a race.
"""

import math
import os
import sys
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import specs as kv_write
from pallas_kernels.lora import specs as lora
from pallas_kernels.mosaic import plgpu
from pallas_kernels.page_selection import specs as page_selection
from pallas_kernels.paged_attention import specs as paged_attention
from pallas_kernels.prompt_attention import prompt_sm90
from pallas_kernels.prompt_attention import specs as prompt_attention
from pallas_kernels.quantized_attention import specs as quantized_attention
from pallas_kernels.specs import Attention, Heads
from tests.pallas_kernels.interpreted import run_spec

HEADS = Heads(2, 1, 128)
# With a window, and with more tiles than a block has stages, slots are filled again.
ATTENTION = Attention(
    HEADS, sequences=2, context=600, page_size=64, sliding_window=450, ragged=True
)


def prompt_scores(
    q_TxHxD, k_TxKxD, v_TxKxD, query_starts, *, implementation, last_rows, own, by_head
):
    """The sums of `prompt_attention`, by a kernel that receives the log-sum-exp of scores."""
    (T, H, D), K = q_TxHxD.shape, k_TxKxD.shape[1]
    if implementation == "reference":
        return prompt_attention.prompt_attention(
            q_TxHxD, k_TxKxD, v_TxKxD, query_starts, last_rows=last_rows, own=own,
            by_head=by_head, implementation=implementation,
        )[1]  # fmt: skip
    schedule = prompt_sm90.schedule_of(query_starts, T, H, K, last_rows, own, by_head)
    q, k = (jnp.pad(x, ((0, len(schedule.ends) - T), (0, 0), (0, 0))) for x in (q_TxHxD, k_TxKxD))
    row = jnp.arange(len(q))
    prompt = jnp.searchsorted(query_starts, row, side="right")
    seen = (prompt[:, None] == prompt) & (row <= row[:, None])
    scores = jnp.einsum("thd,uhd->htu", q, jnp.repeat(k, H // K, 1)).astype(jnp.float32) * D**-0.5
    lse = jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), axis=-1)
    sums = prompt_sm90.received(
        q, k, lse * math.log2(math.e), schedule, H if by_head else K, D**-0.5, last_rows, own
    )
    return jnp.where(schedule.ends > 0, sums.reshape(K, -1, len(q)).max(1), 0)[:, :T].T


SPECS = {
    # Some thread blocks have more items than places for queries.
    "paged_attention": paged_attention.decode(replace(ATTENTION, sequences=8)),
    "paged_prefill_attention": paged_attention.prefill(replace(ATTENTION, chunk=200)),
    # Lanes with several items, and more tiles than stages: 11 tiles for 4 lanes. A page is a tile.
    "quantised_paged_attention": paged_attention.decode(
        replace(ATTENTION, sequences=4, sliding_window=None, kv_bits=8, context=700, page_size=128)
    ),
    # As many tiles, in both precisions.
    "mixed_precision_attention": quantized_attention.make(
        quantized_attention.Mixed(
            HEADS, sequences=5, tokens=1200, kept=(0.4, 0.6), page_size=128, ragged=True
        )
    ),
    # Only the second of its two kernels runs, as the first is that of prefill.
    "prompt_attention": replace(
        prompt_attention.prompts(
            prompt_attention.Prompts(Heads(4, 2, 64), (290, 1, 60), padding=30)
        ),
        op=prompt_scores,
    ),
    # As many tiles, and more rows in a thread block than places for queries.
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
# A process that uses less processor time than STILL in STILL_SECONDS waits for itself.
STILL, STILL_SECONDS = 0.1, 5.0


class LeaveOut:
    """Replaces the calls that wait, arrive or commit: counts them, and leaves out call `number`."""

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
    """End the process if it stands still: a kernel without one of its waits may wait for ever."""
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
    if op == "mixed_precision_attention":  # Scores of absent tokens hold anything.
        found, expected = found[:1], expected[:1]
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        f, e = (np.asarray(x, np.float32)[rows] for x in (f, e))
        np.testing.assert_allclose(f, e, atol=2e-2, rtol=0)


if __name__ == "__main__":
    threading.Thread(target=end_if_nothing_moves, daemon=True).start()
    main(sys.argv[1], int(sys.argv[2]))
