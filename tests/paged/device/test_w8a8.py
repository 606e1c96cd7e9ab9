"""W8A8 through the engine, against full recomputation with the same quantised products.

A process counts its devices only once, so this file also runs as a program with four devices, which
prints the values that the last test checks.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama, peft, w4a8, w8a8
from models.full_attention import causal_attend
from paged import Engine, EngineConfig, SamplingParams
from paged.tensor_parallel import Shards
from tests.models import peft_folders
from tests.paged.devices import collectives, printed_with_devices
from tests.paged.tiny import TINY, padded, random_params

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=16, max_prefills_per_step=2, max_model_len=64,
    page_size=4, kv_cache_tokens=256, quantization="w8a8",
)  # fmt: skip
HOW = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=1)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, TINY.vocab_size, n).tolist() for n in (1, 9, 30, 20)]


def check(engine: Engine, params, adapter=None, hook=None) -> None:
    """Assert that each token is the likeliest by full recomputation of all tokens before it."""

    @jax.jit
    def logits_of(tokens):
        attend, at = causal_attend(TINY), jnp.arange(64)
        hidden, _ = llama.forward(params, TINY, tokens, at, attend, adapters=hook)
        return llama.logits(params, TINY, hidden)

    asked = prompts()
    outputs = engine.generate(asked, HOW, adapters=[adapter] * len(asked))
    assert len({token for output in outputs for token in output.tokens}) >= 10
    for prompt, output in zip(asked, outputs):
        tokens = [*prompt, *output.tokens]
        logits = np.asarray(logits_of(np.pad(tokens, (0, 64 - len(tokens)))))
        logits = logits[len(prompt) - 1 : len(tokens) - 1]
        chosen = logits[np.arange(len(output.tokens)), output.tokens]
        # Float32 rounding may change an int8 code, which moves logits by this much.
        assert (chosen >= logits.max(-1) - 0.02).all()


@pytest.mark.slow  # an engine
def test_tokens_are_those_of_full_recomputation(tiny_params):
    engine = padded(Engine.from_model(tiny_params, TINY, CONFIG))
    quantised = w8a8.quantize(tiny_params, llama.PROJECTIONS)
    assert quantised["layers"][0]["wq"].codes.dtype == jnp.int8
    assert quantised["embed"] is tiny_params["embed"]
    check(engine, quantised)


@pytest.mark.slow  # another engine
def test_adapters_add_to_the_quantised_products(tiny_params, tmp_path):
    """The adapter's own products are not quantised."""
    peft_folders.write(tmp_path / "a", TINY, 8, seed=3, size=0.7)
    config = replace(CONFIG, adapter_slots=1)
    engine = padded(Engine.from_model(tiny_params, TINY, config))
    engine.add_adapter("a", tmp_path / "a")
    weights = peft.load(tmp_path / "a", TINY)[0].weights
    stacks = {
        name: tuple(jnp.stack([pair[i] for pair in pairs if pair]) for i in (0, 1))
        for name, pairs in weights.items()
    }

    def hook(name, layer, x, y):
        a, b = stacks[name]
        return y + x @ a[layer].T @ b[layer]

    quantised = w8a8.quantize(tiny_params, llama.PROJECTIONS)
    check(engine, quantised, "a", hook)
    with pytest.raises(AssertionError):
        check(engine, quantised, "a")


@pytest.fixture(scope="module")
def four_devices() -> dict:
    return printed_with_devices("tests.paged.device.test_w8a8", 4)


@pytest.mark.slow  # another process
def test_four_devices_have_the_codes_of_one_and_its_logits(four_devices):
    """A token has one scale, even where each shard has a part of the input ('wo', 'w_down')."""
    assert four_devices["same_weights"] and four_devices["same_weights_of_4_bits"]
    assert max(four_devices["logprob_differences"]) < 1e-4
    # A layer, which a scan contains once, has two sums and the maxima of their two inputs.
    assert all(each == {"all-reduce": 4} for each in four_devices["collectives"])


def same_weights(model, quantize) -> bool:
    """Whether two devices have the codes and scales of one."""
    params = random_params(model)
    layers = [
        quantize(Shards(model, size).place(params), llama.PROJECTIONS)["layers"] for size in (1, 2)
    ]
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), *layers)
    return all(jax.tree.leaves(same))


def main() -> None:
    params, wide = (
        random_params(),
        TINY.replace(hidden_size=128, intermediate_size=256, head_dim=64),
    )
    one, four = (
        padded(Engine.from_model(params, TINY, replace(CONFIG, tensor_parallel=size)))
        for size in (1, 4)
    )
    differences = []
    for prompt, output in zip(prompts(), one.generate(prompts(), HOW)):
        forced = replace(HOW, forced_output=tuple(output.tokens))
        (again,) = four.generate([prompt], forced)
        pairs = zip(output.logprobs or (), again.logprobs or (), strict=True)
        differences += [abs(a.logprob - b.logprob) for a, b in pairs]
    facts = {
        "same_weights": same_weights(TINY, w8a8.quantize),
        "same_weights_of_4_bits": same_weights(wide, w4a8.quantize),
        "logprob_differences": differences,
        "collectives": collectives(four),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
