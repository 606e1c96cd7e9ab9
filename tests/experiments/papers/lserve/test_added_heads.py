"""Heads that were added in growing, off and on, in a model whose added heads write nothing."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers import masked
from experiments.papers.lserve import added_heads
from experiments.train import grow, trainer
from models.config import ModelConfig
from models.families import family
from models.full_attention import causal_attend

SMALL = ModelConfig(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, qk_norm=True,
)  # fmt: skip
LARGE = SMALL.replace(num_layers=4, num_heads=10, num_kv_heads=5)


@pytest.fixture(scope="module")
def grown():
    p, random = (
        trainer.initialise(c, jax.random.key(i), 1.5) for i, c in enumerate((SMALL, LARGE))
    )
    return grow.grow(p, SMALL, LARGE, random, jax.random.key(2))


def _question(params) -> masked.Question:
    """A prompt, and the answer that the whole model gives."""
    tokens, forward = list(range(1, 31)), family(LARGE).forward
    for _ in range(3):
        rows = jnp.array(tokens), jnp.arange(len(tokens))
        hidden, _ = forward(params, LARGE, *rows, causal_attend(LARGE))
        tokens.append(int(family(LARGE).logits(params, LARGE, hidden)[-1].argmax()))
    return masked.Question(tokens[:30], tokens[30:])


def test_inherited_heads_are_those_whose_outputs_were_copied(grown):
    inherited = grow.inherited(SMALL, LARGE)
    assert inherited.tolist() == [[True] * 2 + [False] * 3, [False] * 5] * 2
    for layer, heads in zip(grown["layers"], inherited, strict=True):
        writes = np.asarray(layer["wo"]).reshape(LARGE.hidden_size, 5, -1)
        assert (np.abs(writes).sum((0, 2)) > 0).tolist() == heads.tolist()


def test_answers_stay_without_heads_that_write_nothing(grown):
    question, inherited = _question(grown), grow.inherited(SMALL, LARGE)
    rows = {
        off: added_heads.row_of(grown, LARGE, question, off, inherited) for off in added_heads.OFF
    }
    added, ours, wrong = rows["nothing"]
    assert (added, wrong) == (0, -1) and ours > 0
    assert rows["added"][2] == -1 and rows["added"][1] == pytest.approx(ours)
    assert rows["inherited"][:2] == (0, 0)
    random = trainer.initialise(LARGE, jax.random.key(3), 1.5)  # all heads write
    question = _question(random)
    for off, (added, ours) in {"nothing": (1, 1), "added": (0, 1), "inherited": (1, 0)}.items():
        row = added_heads.row_of(random, LARGE, question, off, inherited)
        assert (row[0] > 0, row[1] > 0) == (added, ours)
    with pytest.raises(ValueError, match="has no more heads than"):
        added_heads.heads_of(added_heads.HeadFlags(grown_from="models/judge_grown"))


def test_norms_are_of_what_each_head_adds(grown):
    """With all heads but one off, the attention of a layer adds what this head writes."""
    tokens = np.arange(1, 17)
    params = grown | {"layers": grown["layers"][:1]}
    one = LARGE.replace(num_layers=1)
    on = np.array([[False, True, False, False, False]])
    _, norms = added_heads._forward(params, one, tokens, on)
    exact = causal_attend(one)
    outs = []

    def attend(layer, q, k, v, cache):
        out, _ = exact(layer, q, k, v, None)
        outs.append(np.asarray(out)[:, 2:4].reshape(16, -1) @ np.asarray(wo)[:, 16:32].T)
        return out, cache

    wo = grown["layers"][0]["wo"]
    with jax.disable_jit():
        family(one).forward(params, one, jnp.array(tokens), jnp.arange(16), attend)
    expected = np.linalg.norm(outs[0], axis=-1)
    np.testing.assert_allclose(norms[0, :, 1], expected, rtol=1e-4)
    assert not np.asarray(norms)[0, :, [0, 2, 3, 4]].any()


@pytest.mark.slow
def test_the_judges_answers_do_not_need_its_added_heads(tmp_path):
    flags = added_heads.HeadFlags(tasks=("multikey",), context=256, num_prompts=2)
    assert added_heads.STUDY.write(flags, tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    numbers = {value["name"]: value["here"] for value in report["values"]}
    assert numbers["right_nothing"] == numbers["right_added"] == 100
    assert numbers["right_inherited"] == 0 and report["holds"] is False
    assert (numbers["added_heads"], numbers["local_added_heads"]) == (48, 48)
    assert (numbers["inherited_heads"], numbers["local_inherited_heads"]) == (16, 5)
    assert numbers["norm_added"] < numbers["norm_inherited"] / 10
    assert numbers["gate_added"] < 0.3 < numbers["gate_inherited"]
    assert len(report["rows"]) == 2 * len(added_heads.OFF)
