"""Gates of LServe's policy: the heads that stream, their order on shards, and files of gates."""

import json

import numpy as np
import pytest

from paged.kv_cache import lserve
from paged.kv_cache.gates import dense_first, read_gates, streaming_heads


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
    # Among heads with equal gates, the first ones stream.
    assert names[:3] == [[], [[0, 0], [0, 2], [1, 1]], [[0, 0], [1, 1]]]
    assert len(names[3]) == 6


def test_gates_may_be_an_array():
    rows = ((0.5, 1.0), (0.0, 0.25))
    for gates in (np.array(rows), np.array(rows, np.float32), list(map(list, rows))):
        options = lserve.Options(gates=gates)  # type: ignore[arg-type]
        assert options == lserve.Options(gates=rows) and options.streaming_share == 0.5
        assert hash(options) == hash(lserve.Options(gates=rows))
    assert lserve.Options().streaming_share is None


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (((0.5, 2.0), (0.1, 0.1)), "from 0 to 1, not 2.0 of layer 0, head 1"),
        (((0.5, "0.5"), (0.1, 0.1)), "from 0 to 1, not '0.5' of layer 0, head 1"),
        (((0.5, True), (0.1, 0.1)), "from 0 to 1, not True of layer 0, head 1"),
        (((0.5,), (0.1, 0.1)), "gates must be a row of numbers for each layer, not"),
        (("01", "10"), "a row of numbers for each layer, from 0 to 1, not '01' of layer 0"),
        (np.array([0.5, 0.1]), r"a row of numbers for each layer, not array\(\[0.5, 0.1"),
        (np.zeros((0, 2)), "gates must be a row of numbers for each layer, not array"),
        ([[]], r"gates must be a row of numbers for each layer, not \[\[\]\]"),
        (3, "gates must be a row of numbers for each layer, not 3"),
    ],
)
def test_what_are_no_gates_is_refused(gates, message):
    with pytest.raises(ValueError, match=message):
        lserve.Options(gates=gates)


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
    table.write_text("# full attention heads\n1.004\t0.25\n\n-0.004\t0.5  # of layer 1\n \n")
    assert read_gates(str(table), lambda: "") == ((1.0, 0.25), (0.0, 0.5))
    for text, message in (
        ("0.5\tx\n", "could not convert"), ("0.5\n0.5\t1\n", "number of columns changed"),
        ("", "a row of numbers"), ("# none\n", "a row of numbers"), ("nan\n", "not nan of layer 0"),
        ("0.5\n17\n", "from 0 to 1, not 17.0 of layer 1, head 0"), ("inf\n", "not inf of layer 0"),
        ("0.5\t-0.1\n", "from 0 to 1, not -0.1 of layer 0, head 1"),
    ):  # fmt: skip
        table.write_text(text)
        with pytest.raises(ValueError, match=rf"full_attention_heads.tsv: .*{message}"):
            read_gates(str(table), lambda: "")
    empty, texts = (
        json.dumps({"weights_sha256": "ab", "gates": gates}) for gates in ([], ["01", "10"])
    )
    for text, message in (
        ("[" * 100_000, "recursion"), (huge, "not 10000"),
        (empty, r"a row of numbers for each layer, not \[\]"), (texts, "not '01' of layer 0"),
    ):  # fmt: skip
        ours.write_text(text)
        with pytest.raises(ValueError, match=rf"gates.json: .*{message}"):
            read_gates(str(ours), lambda: "ab")
    for path in (table, ours):
        path.write_bytes(b"\xef\xbb\xbf" + good[path])
        assert read_gates(str(path), lambda: "ab") == ((1.0, 0.25), (0.0, 0.5))
    shouted = ours.with_name("GATES.JSON")
    shouted.write_bytes(good[ours])
    assert read_gates(str(shouted), lambda: "ab") == ((1.0, 0.25), (0.0, 0.5))
    ours.write_text('{"gates": []}')
    with pytest.raises(ValueError, match='needs "weights_sha256" and "gates"'):
        read_gates(str(ours), lambda: "ab")
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        read_gates(str(tmp_path / "none.json"), lambda: "ab")
