"""The roofline's counts against a model's own traced products, its arrays, and a plain recount."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from models import params as parameters
from models.config import ModelConfig
from models.families import family
from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.simulator.roofline import layer_bytes, measure, step_cost
from pallas_kernels.specs import Cost, Rates

LLAMA = ModelConfig(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=10,
)  # fmt: skip
OPT = LLAMA.replace(
    model_type="opt", num_kv_heads=6, head_dim=4, embedding_size=16, activation="relu"
)
MODELS = {
    "llama": LLAMA,
    "llama_tied": LLAMA.replace(tie_word_embeddings=True),
    "qwen2": LLAMA.replace(model_type="qwen2", qkv_bias=True),
    "qwen3": LLAMA.replace(model_type="qwen3", qk_norm=True),
    "opt": OPT,
    "opt_350m": OPT.replace(norm_first=False, final_norm=False, tie_word_embeddings=True),
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
    assert step_cost(model, [17] * 5).flops == traced_flops(model, 5, 17)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_the_arrays_and_the_cache(name):
    model, contexts = MODELS[name], [3, 9, 30]
    params = parameters.abstract(family(model).declare(model))
    weights = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    for table in ("positions", *(() if model.tie_word_embeddings else ("embed",))):
        if table in params:
            weights += 4 * (len(contexts) * params[table].shape[1] - params[table].size)
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    assert step_cost(model, contexts).bytes == weights + per_token * sum(contexts)
    assert step_cost(model, contexts, dtype="bfloat16").bytes == (
        step_cost(model, contexts).bytes / 2
    )


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_a_prompt_is_its_tokens_one_by_one_but_for_the_weights(window):
    model = LLAMA.replace(sliding_window=window)
    whole = step_cost(model, [20], [12])
    alone = [step_cost(model, [context]) for context in range(9, 21)]
    head = 2 * model.vocab_size * model.hidden_size  # runs once for the prompt, not for each token
    assert whole.flops == sum(cost.flops for cost in alone) - 11 * head
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    # The KV cache has 8 tokens, of which a window keeps the last, and 12 are written.
    kept = min(8, (window or 100) - 1)
    without = alone[0].bytes - per_token * min(9, window or 100) - 4 * model.hidden_size
    assert whole.bytes == without + per_token * (kept + 12) + 12 * 4 * model.hidden_size


def test_attention_is_the_policys_own():
    """One of two KV heads streams: it reads the sink page, the newest page and the one before."""
    gates = {"gates": ((1.0, 0.0),) * LLAMA.num_layers, "sink": 16, "local": 16}

    def cost(context, **options):
        config = EngineConfig(
            policy="lserve", page_size=16, max_model_len=256, policy_options=options
        )
        make_layout = policy_of("lserve").layout
        assert make_layout is not None
        return step_cost(LLAMA, [context], layout=make_layout(config, ShardedModel.split(LLAMA)))

    assert cost(100, budget=256) == step_cost(LLAMA, [100])
    spared, per_head = 100 - (16 + 16 + 100 % 16), LLAMA.num_layers * 2 * 10 * 4
    whole, streaming = cost(100, budget=256), cost(100, budget=256, **gates)
    assert whole.bytes - streaming.bytes == spared * per_head
    assert whole.flops - streaming.flops == spared * LLAMA.num_layers * 3 * 4 * 10


@pytest.mark.parametrize("name", ["opt", "opt_350m"])
def test_the_logits_head_is_as_wide_as_the_token_embeddings(name):
    small = MODELS[name]
    costs = [
        step_cost(model, [20, 9], [12, 1])
        for model in (small, small.replace(vocab_size=small.vocab_size + 1))
    ]
    assert small.embedding_size == 16 < small.hidden_size
    assert costs[1].flops - costs[0].flops == 2 * 2 * 16
    assert costs[1].bytes - costs[0].bytes == 4 * 16


def test_bytes_of_a_layer_are_those_of_its_arrays():
    layer = family(LLAMA).declare(LLAMA)["layers"][0]
    found = layer_bytes(LLAMA, [20, 9, 7], [1, 1, 7], "bfloat16")
    assert found["weights"] == sum(2 * int(np.prod(param.shape)) for param in layer.values())
    assert found["KV read"] == (20 + 9 + 7) * 2 * 2 * 10 * 2
    assert found["KV written"] == (1 + 1 + 7) * 2 * 2 * 10 * 2
    # Inputs and outputs of q, k and v; of o; of gate and up; of down.
    assert found["activations"] == 9 * 2 * ((24 + 100) + (60 + 24) + (24 + 80) + (40 + 24))


def test_the_floor_is_the_slower_of_arithmetic_and_memory_plus_dispatch():
    rates = Rates(bytes_per_s=20.0, flops_per_s=100.0, dispatch_s=0.5)
    assert rates.floor_s(Cost(bytes=20, flops=1000)) == 10.5
    assert rates.floor_s(Cost(bytes=400, flops=10)) == 20.5
    assert rates.floor_s(Cost(bytes=400, flops=10), dispatches=0.25) == 20.125
    assert Rates(20.0, 100.0).floor_s(Cost(bytes=20, flops=1000)) == 10.0


def test_impossible_steps_are_refused():
    with pytest.raises(ValueError, match="0 contexts"):
        step_cost(LLAMA, [])
    with pytest.raises(ValueError, match="2 contexts with 1 numbers"):
        step_cost(LLAMA, [3, 4], [1])
    with pytest.raises(ValueError, match="5 new tokens in a context of 4"):
        step_cost(LLAMA, [3, 4], [1, 5])
    with pytest.raises(ValueError, match="0 new tokens"):
        step_cost(LLAMA, [3], [0])


def test_rates_are_the_best_of_what_is_measured():
    measured = measure(LLAMA, batch=2, seconds=0.0, streamed_bytes=2**20)
    for name, rate in measured.items():
        assert 0 < rate < np.inf, name
    rates = Rates.best(measured)
    assert rates.flops_per_s == max(measured["step_flops_per_s"], measured["square_flops_per_s"])
    assert rates.bytes_per_s == max(measured["read_bytes_per_s"], measured["copy_bytes_per_s"])
    assert rates.dispatch_s == measured["dispatch_s"]
    assert Rates.best({"read_bytes_per_s": 5.0, "dot_flops_per_s": 7.0}) == Rates(5.0, 7.0, 0.0)
