"""Gates of a random model: the attention that they mix, their training, and their file."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers.lserve import duo_gates
from experiments.papers.lserve.duo_gates import STUDY, GateFlags
from experiments.papers.lserve.gates import RETRIEVAL_GATE, gates_of
from experiments.train.attention import Window, batched_attend
from experiments.train.data import TrainingData
from models import checkpoint, hub, llama
from models import params as parameters
from models.config import ModelConfig
from paged.kv_cache.gates import read_gates
from tests.experiments.train.test_data import byte_tokenizer

MODEL = ModelConfig(
    vocab_size=512, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, qk_norm=True, model_type="qwen3",
)  # fmt: skip
WINDOW = Window(16, 16, 16)


@pytest.fixture(scope="module")
def params():
    return parameters.init(llama.declare(MODEL), jax.random.key(0))


@pytest.fixture(scope="module")
def data():
    return TrainingData(0, corpus_characters=20_000)


def test_gates_of_one_and_zero_are_full_and_streaming_attention():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((128, n, 8)), jnp.float32) for n in (4, 2, 2))
    gates = jnp.array([[0.5, 0.5], [1.0, 0.0]])
    mixed, _ = duo_gates.mixed_attend(MODEL, 128, WINDOW, gates)(1, q, k, v, None)
    full, _ = batched_attend(MODEL, 128)(1, q, k, v, None)
    near, _ = batched_attend(MODEL, 128, window=WINDOW)(1, q, k, v, None)
    np.testing.assert_allclose(mixed[:, :2], full[:, :2], atol=1e-6)
    np.testing.assert_allclose(mixed[:, 2:], near[:, 2:], atol=1e-6)
    assert np.abs(full - near).max() > 0.1


@pytest.mark.slow
def test_heads_that_need_no_more_than_the_window_lose_their_gates(params, data):
    """Training is also reproducible: a second run from the same seed gives the same gates."""
    train = partial(
        duo_gates.train, MODEL, params, data, steps=15, lengths=[96], mix={"needles": 1.0},
        rate=0.1, progress=False,
    )  # fmt: skip
    wide, rows = train(window=Window(64, 64, 64))  # a window over all tokens
    assert wide.max() < 0.2 and rows[-1].moved < 1e-6
    narrow, rows = train(window=WINDOW)
    assert rows[-1].moved > 1e-5
    assert ((narrow >= 0) & (narrow <= 1)).all() and narrow.min() > wide.max()
    again, _ = train(window=WINDOW)
    np.testing.assert_array_equal(narrow, again)


@pytest.mark.slow
def test_gates_that_were_stopped_are_resumed_if_asked_the_same(params, data, tmp_path, monkeypatch):
    train = partial(
        duo_gates.train, MODEL, params, data, lengths=[96], mix={"needles": 1.0}, rate=0.1,
        window=WINDOW, progress=False, asked={"seed": 0},
    )  # fmt: skip
    kept = tmp_path / "checkpoint.npz"
    whole, rows = train(steps=60, kept=kept)
    assert [row.step for row in rows] == [25, 50, 60]

    batch = data.batch

    def stopped(number, *args):
        if number == 40:
            raise KeyboardInterrupt
        return batch(number, *args)

    kept.unlink()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "batch", stopped)
        train(steps=60, kept=kept)
    resumed, rows = train(steps=60, kept=kept)
    np.testing.assert_array_equal(resumed, whole)
    assert [row.step for row in rows] == [25, 50, 60]
    other, _ = train(steps=60, kept=kept, asked={"seed": 1}, rate=0.01)
    assert (other != whole).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sink": 100}, "--sink must be whole pages of 64 tokens"),
        ({"lengths": (448,)}, r"longer than the window \(448 tokens\), not \(448,\)"),
        ({"mix": ("needles",)}, "--mix must be task=share"),
        ({"mix": ("needles=-1",)}, "shares above 0"),
    ],
)
def test_bad_flags_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GateFlags(**change)


@pytest.mark.slow
def test_the_study_writes_the_gates_of_any_model(params, tmp_path):
    """The model has a tokenizer of its own."""
    folder = tmp_path / "model"
    checkpoint.save(folder, MODEL, params)
    byte_tokenizer().save_pretrained(folder)
    flags = GateFlags(
        model=str(folder), steps=2, lengths=(512,), mix=("passkeys=1",), sink=64, local=64, seed=3,
    )  # fmt: skip
    assert STUDY.write(flags, tmp_path) == 0
    gates = read_gates(str(tmp_path / "gates.json"), lambda: checkpoint.weights_hash(folder))
    assert np.array(gates).shape == (2, 2)
    assert (tmp_path / "gates.png").stat().st_size > 5000


def test_gates_beside_the_judge_are_of_its_weights_and_let_half_of_its_heads_stream():
    """`gates_of` refuses gates of other weights, or of another shape."""
    folder = hub.BUNDLED.with_name("judge")
    gates = np.array(gates_of(str(folder), str(folder / "duo_gates.json")))
    assert gates.size == 64 and (gates < RETRIEVAL_GATE).mean() >= 0.5
