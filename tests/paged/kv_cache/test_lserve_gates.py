"""Which heads stream by the gates of LServe's policy, where shards have them, and gates' files."""

import json

import numpy as np
import pytest

from paged.kv_cache.lserve.gates import dense_first, read_gates, streaming_heads


def test_each_shard_has_its_dense_heads_first():
    rng = np.random.default_rng(0)
    for L, K, groups in ((5, 8, 2), (5, 8, 4), (3, 4, 1), (4, 6, 3)):
        streams = rng.random((L, K)) < 0.5
        order = dense_first(streams, groups)
        assert (np.sort(order, axis=1) == np.arange(K)).all()
        kinds = np.take_along_axis(streams, order, axis=1).reshape(L, groups, -1)
        assert (np.diff(kinds.astype(int), axis=2) >= 0).all()
        counts = (~kinds).sum(2)
        assert np.ptp(counts, axis=1).max() <= 1 and np.ptp(counts.sum(0)) <= 1


def test_gates_are_cut_at_a_quantile():
    gates = ((0.5, 0.9, 0.5), (0.5, 0.1, 1.0))
    names = [np.argwhere(streaming_heads(gates, share)).tolist() for share in (0, 0.5, 0.34, 1)]
    # Of equal gates the first ones stream.
    assert names[:3] == [[], [[0, 0], [0, 2], [1, 1]], [[0, 0], [1, 1]]]
    assert len(names[3]) == 6


def test_gates_are_read_from_both_formats(tmp_path):
    table, ours = tmp_path / "full_attention_heads.tsv", tmp_path / "gates.json"
    table.write_text("1.0000001\t0.25\n-1e-8\t0.5\n")
    assert read_gates(str(table), lambda: "") == ((1.0, 0.25), (0.0, 0.5))
    ours.write_text(json.dumps({"weights_sha256": "ab", "gates": [[1, 0.25], [0, 0.5]]}))
    assert read_gates(str(ours), lambda: "ab") == ((1.0, 0.25), (0.0, 0.5))
    good = {path: path.read_bytes() for path in (table, ours)}
    huge = f'{{"weights_sha256": "ab", "gates": [[{10**400}]]}}'
    with pytest.raises(ValueError, match=r"gates.json: is for weights of SHA-256 'ab', not cd"):
        read_gates(str(ours), lambda: "cd")
    for text, message in (
        ("0.5\tx\n", "could not convert"), ("0.5\n0.5\t1\n", "a row of numbers for each layer"),
        ("", "a row of numbers"), ("nan\n", "must be from 0 to 1"),
    ):  # fmt: skip
        table.write_text(text)
        with pytest.raises(ValueError, match=rf"full_attention_heads.tsv: .*{message}"):
            read_gates(str(table), lambda: "")
    for text, message in (("[" * 100_000, "recursion"), (huge, "a row of numbers for each layer")):
        ours.write_text(text)
        with pytest.raises(ValueError, match=rf"gates.json: .*{message}"):
            read_gates(str(ours), lambda: "ab")
    for path in (table, ours):
        path.write_bytes(b"\xef\xbb\xbf" + good[path])
        assert read_gates(str(path), lambda: "ab") == ((1.0, 0.25), (0.0, 0.5))
    ours.write_text('{"gates": []}')
    with pytest.raises(ValueError, match='needs "weights_sha256" and "gates"'):
        read_gates(str(ours), lambda: "ab")
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        read_gates(str(tmp_path / "none.json"), lambda: "ab")
