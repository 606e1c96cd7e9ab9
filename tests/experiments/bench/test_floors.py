"""The floors' counts against the model's own traced products, its arrays, and a plain recount."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from experiments.bench.floors import Rates, Work, floor_s, measure, step_work
from models import params as parameters
from models.config import ModelConfig
from models.families import family

LLAMA = ModelConfig(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=10,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "llama_tied": LLAMA.replace(tie_word_embeddings=True),
    "qwen2": LLAMA.replace(model_type="qwen2", qkv_bias=True),
    "qwen3": LLAMA.replace(model_type="qwen3", qk_norm=True),
    "opt": LLAMA.replace(
        model_type="opt", num_kv_heads=6, head_dim=4, embedding_size=16, activation="relu"
    ),
    "gpt2": LLAMA.replace(
        model_type="gpt2", num_kv_heads=6, head_dim=4, tie_word_embeddings=True, activation="relu"
    ),
}


def traced_flops(model: ModelConfig, batch: int, context: int) -> int:
    """2 × the multiplications of all matrix products in a traced decode step, loops unrolled."""
    H, K, D = model.num_heads, model.num_kv_heads, model.head_dim
    cache = jnp.zeros((batch, context, K, D))

    def attend(layer, q, k, v, carried):
        q = q.reshape(batch, K, H // K, D)
        probs = jax.nn.softmax(jnp.einsum("bkgd,btkd->bkgt", q, cache))
        return jnp.einsum("bkgt,btkd->bkgd", probs, cache).reshape(batch, H, D), carried

    def step(params, tokens, positions):
        hidden, _ = family(model).forward(params, model, tokens, positions, attend)
        return family(model).logits(params, model, hidden)

    abstract = parameters.abstract(family(model).declare(model))
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def count(jaxpr) -> int:
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                out = int(np.prod(equation.outvars[0].aval.shape))
                total += 2 * out * int(np.prod([shape[axis] for axis in contracted]))
            times = equation.params.get("length", 1)
            total += times * sum(count(inner) for inner in jaxprs_in_params(equation.params))
        return total

    return count(jax.make_jaxpr(step)(abstract, row, row).jaxpr)


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_the_traced_step(name):
    model = MODELS[name]
    assert step_work(model, [17] * 5).flops == traced_flops(model, 5, 17)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_the_arrays_and_the_cache(name):
    model, contexts = MODELS[name], [3, 9, 30]
    params = parameters.abstract(family(model).declare(model))
    weights = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    for table in ("positions", *(() if model.tie_word_embeddings else ("embed",))):
        if table in params:
            weights += 4 * (len(contexts) * params[table].shape[1] - params[table].size)
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    assert step_work(model, contexts).bytes == weights + per_token * sum(contexts)
    assert step_work(model, contexts, bytes_per_number=2).bytes == (
        step_work(model, contexts).bytes / 2
    )


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_a_prompt_is_its_tokens_one_by_one_but_for_the_weights(window):
    model = LLAMA.replace(sliding_window=window)
    whole = step_work(model, [20], [12])
    alone = [step_work(model, [context]) for context in range(9, 21)]
    head = 2 * model.vocab_size * model.hidden_size  # once for the prompt, not for each token
    assert whole.flops == sum(work.flops for work in alone) - 11 * head
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    # The cache: 8 tokens were there, of which a window keeps the last; 12 are written.
    kept = min(8, (window or 100) - 1)
    without = alone[0].bytes - per_token * min(9, window or 100) - 4 * model.hidden_size
    assert whole.bytes == without + per_token * (kept + 12) + 12 * 4 * model.hidden_size


def test_the_floor_is_the_slower_of_arithmetic_and_memory_plus_dispatch():
    rates = Rates(100.0, 50.0, 10.0, 20.0, 0.5)
    assert floor_s(Work(1000.0, 20.0), rates) == 10.5
    assert floor_s(Work(10.0, 400.0), rates) == 20.5
    assert floor_s(Work(10.0, 400.0), rates, dispatches=0.25) == 20.125


def test_impossible_steps_are_refused():
    with pytest.raises(ValueError, match="0 contexts"):
        step_work(LLAMA, [])
    with pytest.raises(ValueError, match="2 contexts with 1 numbers"):
        step_work(LLAMA, [3, 4], [1])
    with pytest.raises(ValueError, match="5 new tokens in a context of 4"):
        step_work(LLAMA, [3, 4], [1, 5])
    with pytest.raises(ValueError, match="0 new tokens"):
        step_work(LLAMA, [3], [0])


def test_rates_are_measured():
    rates = measure(LLAMA, batch=2, seconds=0.0, streamed_bytes=2**20)
    for name, rate in vars(rates).items():
        assert 0 < rate < np.inf, name
    assert rates.flops_per_s == max(rates.step_flops_per_s, rates.square_flops_per_s)
