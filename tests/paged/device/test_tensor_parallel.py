"""The engine on 2, 4 and 8 devices against itself on one.

A process counts its devices only once, so this file also runs as a program with eight devices,
which prints the values that the tests check.
"""

import dataclasses
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import lora
from models.config import ModelConfig
from models.families import family
from models.full_attention import causal_attend
from models.params import Param
from paged import kv_cache
from paged.device import executor, step
from paged.engine import Engine, EngineConfig
from paged.kv_cache.vllm import VLLM
from paged.requests.sampling_params import SamplingParams
from paged.tensor_parallel import REPLICATED, Shards
from tests.paged.devices import collectives, printed_with_devices
from tests.paged.tiny import TINY

pytestmark = pytest.mark.slow  # Its second process compiles for minutes.

MODELS = {
    "grouped": ModelConfig("qwen3", 61, 32, 48, 3, 8, 2, 8, 48, qk_norm=True, qkv_bias=True),
    "llama": ModelConfig("llama", 61, 32, 48, 3, 8, 8, 8, 48, sliding_window=9),
    "opt": ModelConfig(
        "opt", 61, 48, 40, 3, 8, 8, 6, 48, 1e-5, tie_word_embeddings=True, activation="relu"
    ),
}  # fmt: skip
MODELS["reordered"] = MODELS["grouped"]
HEAD_ORDER = np.array([[1, 0], [0, 1], [1, 0]])  # of each layer
POLICIES = {"reordered": dataclasses.replace(VLLM, head_order=lambda config, model: HEAD_ORDER)}
SIZES = {"reordered": (1, 4), "grouped": (1, 4), "llama": (1, 2), "opt": (1, 8)}
CASES = [(name, size) for name, sizes in SIZES.items() for size in sizes if size > 1]
ALONE = EngineConfig(
    max_num_seqs=1, max_num_batched_tokens=16, max_prefills_per_step=1, max_model_len=48,
    page_size=4, kv_cache_tokens=96, watermark=0.0,
)  # fmt: skip
# One block less than two whole sequences that share a prefix of three blocks.
CROWDED = dataclasses.replace(
    ALONE, max_num_seqs=2, max_prefills_per_step=2, kv_cache_tokens=80, prefix_caching=True
)
CONFIGS = {"reordered": CROWDED, "grouped": CROWDED, "llama": ALONE, "opt": ALONE}
UNSTACKED = ("llama",)


def random_params(model: ModelConfig):
    """Biases are not zero, so that adding a bias once per shard would show."""
    rng = np.random.default_rng(1)
    # Larger embeddings give varied continuations instead of one token forever.
    scales = {"embed": 0.12, "ones": 0.1, "zeros": 0.1}

    def draw(param):
        scale = scales[param.init] if param.init in scales else param.shape[-1] ** -0.5
        noise = scale * rng.standard_normal(param.shape)
        return jnp.asarray((param.init == "ones") + noise, jnp.float32)

    return jax.tree.map(draw, family(model).declare(model))


def prompts_and_sampling():
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 61, 12).tolist()
    prompts = [shared + rng.integers(3, 61, n).tolist() for n in (9, 1, 5)] + [[7]]
    # The penalty keeps small models from repeating themselves.
    greedy = SamplingParams(max_tokens=26, frequency_penalty=1.0, ignore_eos=True)
    sampled = dataclasses.replace(greedy, temperature=1.0, top_p=0.9, seed=3)
    return prompts, [greedy, sampled, greedy, sampled]


def facts(name: str, size: int) -> dict:
    """The values that the tests check, from one engine that has served."""
    policy = name if name in POLICIES else "vllm"
    config = dataclasses.replace(CONFIGS[name], tensor_parallel=size, policy=policy)
    engine = Engine.from_model(random_params(MODELS[name]), MODELS[name], config)
    engine.warm_up(progress=False)
    outputs = engine.generate(*prompts_and_sampling())
    device = engine.executor
    assert isinstance(device, executor.DeviceExecutor)
    layers = device.params["layers"]
    layer = layers[0] if name in UNSTACKED else layers
    bytes_of: Counter[int] = Counter()
    for leaf in jax.tree.leaves(device._cache):
        for shard in leaf.addressable_shards:
            bytes_of[shard.device.id] += shard.data.nbytes
    return {
        "tokens": [output.tokens for output in outputs],
        "preemptions": sum(r.preemptions for r in engine.metrics.requests),
        "cached_tokens": sum(r.cached_tokens for r in engine.metrics.requests),
        "compilations_after_warmup": engine.metrics.compilations_after_warmup,
        "collectives": collectives(engine),
        "cache_bytes": list(bytes_of.values()),
        "keys": np.asarray(jax.device_get(layer["wk"]))[..., 0].ravel().tolist(),
        "wo_bytes": layer["wo"].addressable_shards[0].data.nbytes,
        "adapters_split_otherwise": adapters_split_otherwise(name, device.program.shards),
        "hidden_with_adapters": hidden_states(name, size, merged=False),
        "hidden_merged": hidden_states(name, 1, merged=True) if size == 1 else None,
    }


def adapters_split_otherwise(name: str, shards: Shards) -> list[str]:
    """Projections whose adapter pages are not split, copied and ordered as their base weights are.
    Each number encodes its layer and its place in the axis of the base weights."""
    model, wrong = MODELS[name], []
    for projection, page in lora.declare(model).items():
        for key, declared in page.items():
            places = np.arange(declared.shape[-1], dtype=np.float32)
            numbers = places + 1000 * np.arange(model.num_layers, dtype=np.float32)[:, None]
            params = random_params(model)
            for layer, row in zip(params["layers"], numbers, strict=True):
                row = row if key == "a" else row[:, None]
                layer[projection] = jnp.broadcast_to(row, layer[projection].shape)
            content = np.broadcast_to(numbers[:, None], declared.shape).copy()
            placed = shards.place_layers(declared, content).addressable_shards
            for number, layer in enumerate(shards.place(params)["layers"]):
                for shard, base in zip(placed, layer[projection].addressable_shards, strict=True):
                    w = np.asarray(base.data)
                    expected = w[0] if key == "a" else w[:, 0]
                    if not np.array_equal(np.asarray(shard.data)[number, 0], expected):
                        wrong.append(f"{projection} {key}")
    return wrong


def hidden_states(name: str, size: int, merged: bool) -> list:
    """[T, E] of a sequence, with an adapter on each projection or with the adapters merged.

    A [L, R, in] and B [out, L, R] are split over the shards as the weights' axes are.
    """
    model, shards = MODELS[name], Shards(MODELS[name], size)
    declared, params = family(model).declare(model), random_params(model)
    rng = np.random.default_rng(2)
    stacks: dict[str, tuple[jax.Array, jax.Array]] = {}
    for projection in family(model).PROJECTIONS:
        base: Param = declared["layers"][0][projection]
        out, width = base.shape
        A = rng.normal(size=(model.num_layers, 3, width)).astype(np.float32) / np.sqrt(width)
        B = 0.3 * rng.normal(size=(out, model.num_layers, 3)).astype(np.float32)
        for layer, p in enumerate(params["layers"]):
            p[projection] += merged * B[:, layer] @ A[layer]
        stacks[projection] = (
            shards.place_one(Param(A.shape, ("layers", "rank", base.axes[1]), "normal", ""), A),
            shards.place_one(Param(B.shape, (base.axes[0], "layers", "rank"), "normal", ""), B),
        )

    def run(params, stacks, tokens):
        def adapters(projection, layer, x, y):
            A, B = stacks[projection]
            return y + x @ A[layer].T @ B[:, layer].T

        hidden, _ = family(model).forward(
            params, shards.model, tokens, jnp.arange(len(tokens)), causal_attend(shards.model),
            adapters=None if merged else adapters, reduce=shards.reduce,
        )  # fmt: skip
        return hidden

    placed = shards.place(params)
    specs = shards.specs(placed), shards.specs(stacks), REPLICATED
    return shards.jit(run, specs, REPLICATED)(placed, stacks, jnp.arange(3, 15)).tolist()


@pytest.fixture(scope="module")
def served() -> dict:
    """`facts` by model and number of devices."""
    return printed_with_devices("tests.paged.device.test_tensor_parallel", 8)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_tokens_are_those_of_one_device(served, name, size):
    """Shards add float32 in another order, which changes no token here, greedy or sampled."""
    one, several = served[name]["1"], served[name][str(size)]
    assert several["tokens"] == one["tokens"]
    assert min(len(set(tokens)) for tokens in one["tokens"]) > 10
    assert several["compilations_after_warmup"] == 0
    if CONFIGS[name] is CROWDED:
        assert several["preemptions"] == one["preemptions"] > 0
        assert several["cached_tokens"] == one["cached_tokens"] > 0


@pytest.mark.parametrize("size", SIZES["reordered"])
def test_the_order_of_heads_changes_no_token(served, size):
    """A policy may order the KV heads of each layer; query heads and outputs follow them."""
    ordered, plain = served["reordered"][str(size)], served["grouped"][str(size)]
    assert ordered["tokens"] == plain["tokens"]
    L, K = HEAD_ORDER.shape
    keys, expected = (np.array(facts["keys"]).reshape(L, K, -1) for facts in (ordered, plain))
    for layer, order in enumerate(HEAD_ORDER):
        assert (keys[layer] == expected[layer][order]).all()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_two_all_reduces_a_layer_are_all_that_travels(served, name, size):
    """A program that scans over stacked layers contains the all-reduces of one layer."""
    layers = MODELS[name].num_layers if name in UNSTACKED else 1
    for counts in served[name][str(size)]["collectives"]:
        assert counts == {"all-reduce": 2 * layers}
    assert all(counts == {} for counts in served[name]["1"]["collectives"])


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_shard_holds_the_pages_of_its_heads(served, name, size):
    """A shard holds its share of the KV heads, or one head if there are more shards than heads."""
    one, several = served[name]["1"], served[name][str(size)]
    (whole,) = one["cache_bytes"]
    share = whole // min(size, MODELS[name].num_kv_heads)
    assert several["cache_bytes"] == [share] * size
    assert several["wo_bytes"] == one["wo_bytes"] // size


@pytest.mark.parametrize(("name", "size"), [(name, 1) for name in SIZES] + CASES)
def test_adapters_are_split_as_their_base_weights(served, name, size):
    assert served[name][str(size)]["adapters_split_otherwise"] == []


@pytest.mark.parametrize(("name", "size"), [(name, 1) for name in SIZES] + CASES)
def test_adapters_are_summed_over_the_shards_once(served, name, size):
    """Split adapters beside split weights equal merged weights on one device."""
    got = np.array(served[name][str(size)]["hidden_with_adapters"])
    expected = np.array(served[name]["1"]["hidden_merged"])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_heads": 6}, 4, r"tensor_parallel \(4\) must divide num_heads \(6\)"),
        ({"intermediate_size": 50}, 4, r"\(4\) must divide intermediate_size \(50\)"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, r"\(4\) must divide num_kv_heads \(6\) or be a"),
        ({}, 4, r"tensor_parallel \(4\) needs as many devices; JAX sees \d"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(changes, size, message):
    with pytest.raises(ValueError, match=message):
        Shards(TINY.replace(**changes), size)


def test_fewer_than_one_device_is_refused():
    with pytest.raises(ValueError, match="tensor_parallel must be at least 1"):
        EngineConfig(tensor_parallel=0)


if __name__ == "__main__":
    kv_cache.POLICIES.update(POLICIES)
    result: dict[str, dict[int, dict]] = {}
    for name, sizes in SIZES.items():
        step.CACHED_LAYER_BYTES = 0 if name in UNSTACKED else 2**30
        result[name] = {size: facts(name, size) for size in sizes}
    print(json.dumps(result))
