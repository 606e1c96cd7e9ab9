"""The table of bytes by KV format, against the formulas."""

import pytest

from experiments.papers.lserve import kv_memory


def test_bytes_are_those_of_the_formulas():
    """Llama-3-8B at 64k tokens.

    A token of a head takes 4 D bytes in 16 bits; with fewer bits it takes codes and two 16-bit
    numbers each for keys and for values. The extremes of the keys take 4 D bytes for 16 tokens.
    """
    flags = kv_memory.KVFlags()
    rows = {(row.bits, row.share): row for row in kv_memory.measure(flags, None)}
    for bits, token in ((16, 512), (8, 264), (4, 136)):
        whole, half = rows[bits, 0.0], rows[bits, 0.5]
        assert whole.dense_token_bytes == half.dense_token_bytes == token + 512 / 16
        assert (whole.streaming_token_bytes, half.streaming_token_bytes) == (0, token)
        heads = 32 * 8
        assert whole.sequence_bytes == heads * 65536 * (token + 32)
        # A streaming head keeps 128 tokens of sink, 256 local ones, and the query's own page.
        window = 128 + 256 + 64
        assert half.sequence_bytes == heads // 2 * (65536 * (token + 32) + window * token)
        assert whole.over_16_bits == pytest.approx((token + 32) / 512)
    assert rows[4, 0.5].over_16_bits < 0.17
    assert kv_memory.STUDY.report(flags, list(rows.values()))["holds"]
