"""The table of bytes by format, against the formulas."""

import pytest

from experiments.papers.lserve import kv_memory


def test_bytes_are_those_of_the_formulas():
    """Llama-3-8B at 64k: of a token and head 4 D bytes in 16 bits, and else codes and two 16-bit
    numbers for keys and for values; keys' extremes are a token's keys and values for 16 tokens."""
    flags = kv_memory.KVFlags()
    rows = {(row.bits, row.share): row for row in kv_memory.measure(flags, None)}
    for bits, token in ((16, 512), (8, 264), (4, 136)):
        whole, half = rows[bits, 0.0], rows[bits, 0.5]
        assert whole.dense_token_bytes == half.dense_token_bytes == token + 512 / 16
        assert (whole.streaming_token_bytes, half.streaming_token_bytes) == (0, token)
        heads = 32 * 8
        assert whole.sequence_bytes == heads * 65536 * (token + 32)
        # Sink of 128 tokens, local of 256, and the query's own page.
        window = 128 + 256 + 64
        assert half.sequence_bytes == heads // 2 * (65536 * (token + 32) + window * token)
        assert whole.over_16_bits == pytest.approx((token + 32) / 512)
    assert rows[4, 0.5].over_16_bits < 0.17
    assert kv_memory.STUDY.report(flags, list(rows.values()))["holds"]
