import jax
import numpy as np
import pytest

from experiments.papers import masked
from experiments.papers.diffkv import pruned_heads as study
from models import llama, params
from models.config import ModelConfig
from paged import Engine, EngineConfig, SamplingParams

MODEL = ModelConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, qk_norm=True,
)  # fmt: skip
L, K = MODEL.num_layers, MODEL.num_kv_heads
RETRIEVAL = np.array([[True, False], [False, False]])


@pytest.fixture(scope="module")
def asked():
    """A random prompt's significance and ratio [2, T, K] by both rules."""
    weights = params.init(llama.declare(MODEL), jax.random.key(3))
    tokens = np.random.default_rng(0).integers(3, MODEL.vocab_size, 230).tolist()
    question = masked.Question(tokens[:200], tokens[200:])
    found = {}
    for rules in (study.RULES, study.LAST):
        sums = np.asarray(study.asked(weights, MODEL, question, rules).found)[:, :200]
        found[rules] = sums, study.to_threshold(rules, sums)
    return found


@pytest.mark.parametrize("rules", [study.RULES, study.LAST])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_dynamic_pruning_is_diffkvs_at_some_alpha(asked, rules, share):
    sums, (significance, ratio) = asked[rules]
    old = sums.shape[1] - study.RULES.window
    mask = study.pruned("dynamic", significance[:, :old], ratio[:, :old], share, RETRIEVAL)
    alpha = (ratio[:, :old][mask].max() + ratio[:, :old][~mask].min()) / 2
    at, lengths = np.arange(sums.shape[1]), np.full(sums.shape[1], sums.shape[1])
    for layer in range(L):
        (kept,), _ = rules.of_prompts(sums[layer], at, lengths, [alpha], 0.0)
        np.testing.assert_array_equal(np.asarray(kept)[:old], ~mask[layer])
        assert np.asarray(kept)[old:].all()


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_all_systems_prune_as_many_tokens(asked, share):
    for system in study.SYSTEMS:
        _, (significance, ratio) = asked[study.LAST if "last" in system else study.RULES]
        mask = study.pruned(system, significance, ratio, share, RETRIEVAL)
        assert mask.sum() == round(share * 200) * L * K
        of_heads = mask.sum(1)
        if system.startswith("equal"):
            assert (of_heads == round(share * 200)).all()
        if system.endswith("whole"):
            assert (of_heads[RETRIEVAL] == 0).all() and (of_heads[~RETRIEVAL] > 0).all()


def test_without_pruning_the_right_tokens_are_the_engines():
    weights = params.init(llama.declare(MODEL), jax.random.key(3))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, 130).tolist()
    engine = Engine.from_model(
        weights, MODEL, EngineConfig(max_model_len=256, kv_cache_tokens=512, max_num_seqs=1)
    )
    [output] = engine.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))
    question = masked.Question(prompt, output.tokens)
    flags = study.HeadFlags(shares=(0.7,))
    whole, *rows = study.rows_of(flags, weights, MODEL, np.eye(2), "values", 0, question)
    assert (whole.system, whole.first_wrong) == (study.WHOLE, -1)
    assert [row.system for row in rows] == list(study.SYSTEMS)
    assert any(row.first_wrong >= 0 for row in rows), "pruning changes no token"


def test_the_claim_needs_retrieval_heads_and_not_the_control():
    right = {
        "right_none": 100, "right_dynamic_0.1": 60, "right_dynamic_last_0.1": 70,
        "right_dynamic_retrieval_whole_0.1": 97, "right_dynamic_random_whole_0.1": 65,
    }  # fmt: skip
    assert study.holds(right)
    assert not study.holds(right | {"right_dynamic_0.1": 95})
    assert not study.holds(right | {"right_dynamic_retrieval_whole_0.1": 90})
    assert not study.holds(right | {"right_dynamic_random_whole_0.1": 96})
