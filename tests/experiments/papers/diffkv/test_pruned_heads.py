import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers import masked
from experiments.papers.diffkv import pruned_heads as study
from models import llama, params
from models.config import ModelConfig
from paged import Engine, EngineConfig, SamplingParams
from paged.kv_cache.diffkv.compression import Rules

MODEL = ModelConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, qk_norm=True,
)  # fmt: skip
L, K, T = MODEL.num_layers, MODEL.num_kv_heads, 200
RETRIEVAL = np.array([[True, False], [False, False], [False, True]])
OLD = T - study.WINDOW


@pytest.fixture(scope="module")
def weights():
    return params.init(llama.declare(MODEL), jax.random.key(3))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(0).integers(3, MODEL.vocab_size, T).tolist()


def asked(weights, tokens, answer):
    return study.asked(weights, MODEL, masked.Question(tokens, answer))


@pytest.fixture(scope="module")
def sums(weights, tokens):
    """Of both rules [L, T, K], from a prompt that is padded to 256 rows."""
    return [np.asarray(x)[:, :T] for x in asked(weights, tokens, [5, 6]).found[1]]


def test_significance_is_the_mean_of_the_models_probabilities(weights, tokens, sums):
    """The probabilities of all layers, computed without the op."""

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, found):
        logits = jnp.einsum("tkgd,skd->kgts", q_TxHxD.reshape(T, K, -1, 16), k_TxKxD) / 4
        probs = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), logits, -jnp.inf))
        out = jnp.einsum("kgts,skd->tkgd", probs, v_TxKxD).reshape(q_TxHxD.shape)
        return out, found.at[layer].set(probs)

    empty = jnp.zeros((L, K, MODEL.num_heads // K, T, T))
    probs = llama.forward(weights, MODEL, jnp.array(tokens), jnp.arange(T), attend, empty)[1]
    of_later = np.tril(probs, -1).max(2).sum(2).transpose(0, 2, 1)
    of_last = np.array(probs)[:, :, :, -64:].sum(3).max(2).transpose(0, 2, 1)
    np.testing.assert_allclose(sums[0], of_later, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sums[1], of_last, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["dynamic", "dynamic_last"])
def test_dynamic_pruning_is_the_engines_at_some_alpha(weights, tokens, sums, name):
    """The engine drops the tokens below alpha, and generates what the mask makes likeliest."""
    system = study.SYSTEMS[name]
    rules = study.RULES[system.rules]
    mask = study.pruned(system, sums[system.rules], 0.6, RETRIEVAL)
    mean, base = rules.prompt_significance(sums[system.rules], np.arange(T)[:, None], T)
    ratio = np.asarray(mean * base).transpose(0, 2, 1)[:, :, :OLD]
    alpha = float(ratio[mask].max() + ratio[~mask].min()) / 2
    np.testing.assert_array_equal(ratio < alpha, mask)
    outputs = {}
    for chosen in (0.0, alpha):
        options = {
            "high": "K16V16", "low": "K16V16", "alpha_h": chosen, "alpha_l": chosen,
            "prompt_rule": rules.prompt, "generation_rule": "keep",
        }  # fmt: skip
        config = EngineConfig(
            policy="diffkv", policy_options=options, page_size=16, max_model_len=256,
            kv_cache_tokens=512, max_num_seqs=1, max_num_batched_tokens=256,
        )  # fmt: skip
        engine = Engine.from_model(weights, MODEL, config)
        [output] = engine.generate([tokens], SamplingParams(max_tokens=40, ignore_eos=True))
        outputs[chosen] = output.tokens
    assert outputs[0.0] != outputs[alpha], "pruning changes no token"
    kept = np.ones((L, K, 320), bool)
    kept[:, :, :OLD] = ~mask
    found = asked(weights, tokens, outputs[alpha])
    assert (
        found.likeliest(study.kept_only, kept[:, :, : found.places]).tolist() == outputs[alpha][1:]
    )


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_systems_prune_as_many_tokens_in_the_heads_that_they_name(sums, share):
    masks = {
        name: study.pruned(system, sums[system.rules], share, RETRIEVAL)
        for name, system in study.SYSTEMS.items()
    }
    for name, system in study.SYSTEMS.items():
        if system.heads == "all":
            assert masks[name].sum() == round(share * OLD) * L * K
        if system.equal:
            assert (masks[name].sum(2) == round(share * OLD)).all()
    parts = masks["dynamic_retrieval"], masks["dynamic_others"]
    np.testing.assert_array_equal(parts[0] | parts[1], masks["dynamic"])
    assert not parts[0][~RETRIEVAL].any() and not parts[1][RETRIEVAL].any()
    assert parts[0].any() and parts[1].any()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_pooled_pruning_is_the_rule_of_snapkv(sums, share):
    """The tokens that the engine's prompt rule keeps, with a budget of as many."""
    mask = study.pruned(study.SYSTEMS["equal_pooled"], sums[1], share, RETRIEVAL)
    rules = Rules(prompt="snapkv", generation="keep", budgeted=True)
    alone = study.pruned(study.SYSTEMS["equal_last"], sums[1], share, RETRIEVAL)
    for layer in range(L):
        (kept, *_), _ = rules.of_prompts(
            sums[1][layer], np.arange(T), np.full(T, T), np.zeros(1), T - round(share * OLD)
        )
        np.testing.assert_array_equal(np.asarray(kept)[:OLD].T, ~mask[layer])
    assert (alone != mask).any()


def test_rows_name_each_system_once(weights, tokens):
    question = masked.Question(tokens, [5, 6, 7])
    rows = list(study.rows_of((0.1, 0.5), weights, MODEL, RETRIEVAL, question))
    assert len({row[:2] for row in rows}) == len(rows) == 2 + 2 * len(study.SYSTEMS)
    pruned = {name: (of_all, of_retrieval) for name, share, of_all, of_retrieval, _ in rows}
    assert pruned[study.NOTHING] == (0, 0)
    assert pruned[study.OTHERS] == (pytest.approx(200 / 3), 0)


def test_the_claim_needs_the_loss_in_retrieval_heads_and_none_elsewhere():
    right = {
        "right_nothing": 100, "right_equal_ratio_0.1": 60, "right_dynamic_0.1": 60,
        "right_dynamic_retrieval_0.1": 62, "right_dynamic_others_0.1": 97,
    }  # fmt: skip
    assert study.holds(right)
    assert not study.holds(right | {"right_dynamic_retrieval_0.1": 70})
    assert not study.holds(right | {"right_dynamic_others_0.1": 90})
    with pytest.raises(ValueError, match="nothing to explain"):
        study.holds(right | {"right_dynamic_0.1": 95})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"shares": (0.1, 0.1)}, "--shares names a value twice: 0.1, 0.1"),
        ({"tasks": ("chain", "chain")}, "--tasks names a value twice"),
        ({"context": 9000}, "a context is at most the model's 8192 positions"),
        ({"context": 256, "shares": (0.001,)}, "is less than a token"),
        ({"gates": "models/bundled/duo_gates.json"}, "is for weights of SHA-256"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.HeadFlags(**{"num_prompts": 1} | fields))


def test_gates_of_another_shape_are_refused(tmp_path):
    (tmp_path / "gates.tsv").write_text("0.1\t0.9\n0.2\t0.3\n")
    with pytest.raises(ValueError, match="gates are of 2 layers of 2 KV heads"):
        study.check(study.HeadFlags(num_prompts=1, gates=str(tmp_path / "gates.tsv")))
