"""Fresh random checkpoints against transformers' own torch models, which compute beside ours."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.lib import random_adapters
from models import checkpoint, lora, peft
from models.hub import BUNDLED
from tests.models.goldens import GOLDEN, run

pytest.importorskip("torch", reason="needs torch: make test-parity")
pytest.importorskip("peft", reason="needs peft: make test-parity")
from peft import PeftModel

from tests.models import make_goldens, make_peft_goldens

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def llamas(draw):
    """config.json of a small random member of the Llama family, with every switch drawn."""
    model_type = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 10))
    config = make_goldens.SMALL | {
        "model_type": model_type,
        "vocab_size": draw(st.integers(8, 90)),
        "hidden_size": draw(st.integers(4, 10)) * num_kv_heads * group,
        "intermediate_size": draw(st.integers(1, 60)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": num_kv_heads * group,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    theta = draw(st.sampled_from([100.0, 10_000.0, 500_000.0]))
    linear = {"rope_type": "linear", "factor": 4.0}
    llama3 = {"rope_type": "llama3", **make_goldens.LLAMA3}
    scaling = draw(st.sampled_from([None, linear, llama3]))
    if scaling and draw(st.booleans()):  # the form of transformers 5, otherwise that of 4
        config["rope_parameters"] = {"rope_theta": theta, **scaling}
    else:
        config |= {"rope_theta": theta, "rope_scaling": scaling}
    window = draw(st.sampled_from([None, 1, 7, 30, 1000]))
    if model_type == "mistral":
        config["sliding_window"] = window
    elif model_type != "llama":
        config |= {
            "use_sliding_window": window is not None,
            "sliding_window": window or 7,
            "max_window_layers": 0,
        }
    return config


@st.composite
def opts(draw):
    """config.json of a small random OPT."""
    num_heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(4, 12))
    width = num_heads * head_dim
    return make_goldens.OPT | {
        "vocab_size": draw(st.integers(8, 90)),
        "hidden_size": width,
        "ffn_dim": draw(st.integers(1, 60)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": num_heads,
        "word_embed_proj_dim": draw(st.sampled_from([width, 16])),
        "do_layer_norm_before": draw(st.booleans()),
        "_remove_final_layer_norm": draw(st.booleans()),
        "activation_function": draw(st.sampled_from(["relu", "gelu", "gelu_new", "silu"])),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def gpt2s(draw):
    """config.json of a small random GPT-2."""
    num_heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(4, 12))
    return make_goldens.GPT2 | {
        "vocab_size": draw(st.integers(8, 90)),
        "bos_token_id": 1,
        "eos_token_id": 1,
        "n_embd": num_heads * head_dim,
        "n_inner": draw(st.one_of(st.none(), st.integers(1, 60))),
        "n_layer": draw(st.integers(1, 3)),
        "n_head": num_heads,
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-2])),
        "activation_function": draw(
            st.sampled_from(["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu"])
        ),
        "reorder_and_upcast_attn": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }


def compare(folder, seed, vocab_size, length, start=0):
    """Our float32 logits of random tokens, from position `start`, are within 1e-4 of torch's."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)
    config, params = checkpoint.load(folder, "float32")
    got, _ = run(config, params, tokens, offset=start)
    expected = make_goldens.expected(folder, tokens.tolist(), start)
    assert np.ptp(expected) > 0.1  # constant logits would agree whatever is computed
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", make_goldens.CASES)
@settings(max_examples=3, deadline=None)
@given(seed=SEEDS)
def test_golden_configurations_with_fresh_weights(case, seed):
    with tempfile.TemporaryDirectory() as folder:
        make_goldens.write_golden(Path(folder), case, seed)
        compare(folder, seed, make_goldens.CASES[case]["vocab_size"], make_goldens.LENGTH)


@pytest.mark.parametrize("family", [llamas, opts, gpt2s])
@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=SEEDS, length=st.sampled_from([1, 33, 64]))
def test_random_configurations(family, data, seed, length):
    config = data.draw(family())
    with tempfile.TemporaryDirectory() as folder:
        make_goldens.write_checkpoint(Path(folder), config, seed)
        compare(folder, seed, config["vocab_size"], length)


@pytest.mark.parametrize("start", [0, 4000])
def test_the_bundled_model(start):
    config = checkpoint.load_config("bundled")
    compare(BUNDLED, start, config.vocab_size, 64, start)


@st.composite
def loras(draw):
    """Fields of a LoraConfig for a model of the Llama family with two layers."""
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    targets = draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
    keys = st.sampled_from([*targets, r"layers\.1\..*_proj", f"mlp.{targets[0]}", ".*0.*k_proj"])
    fields = {
        "r": draw(st.integers(1, 40)),
        "lora_alpha": draw(st.sampled_from([0.5, 1, 16])),
        "use_rslora": draw(st.booleans()),
        "target_modules": targets,
        "rank_pattern": draw(st.dictionaries(keys, st.integers(1, 40), max_size=2)),
        "alpha_pattern": draw(st.dictionaries(keys, st.sampled_from([2, 7.5]), max_size=2)),
    }
    match draw(st.integers(0, 3)):
        case 0:
            fields["target_modules"] = "all-linear"
        case 1:
            fields["target_modules"] = rf".*\.({'|'.join(targets)})"
        case 2:
            fields["layers_to_transform"] = [1]
    return fields


@settings(max_examples=20, deadline=None)
@given(
    fields=loras(), case=st.sampled_from(["llama_gqa_tied", "qwen2", "mistral_full"]), seed=SEEDS
)
def test_random_adapters(fields, case, seed):
    """PEFT's model on torch against our model with the folder that PEFT saves."""
    source = GOLDEN / case
    with tempfile.TemporaryDirectory() as folder:
        model = make_peft_goldens.adapted(source, fields, seed)
        make_peft_goldens.save(model, Path(folder), case)
        compare_adapter(source, Path(folder), model, seed)


@pytest.mark.parametrize("folder", sorted((BUNDLED / "adapters").glob("*/")), ids=lambda f: f.name)
def test_adapters_that_we_wrote(folder):
    model = PeftModel.from_pretrained(make_peft_goldens.base_model(BUNDLED), folder)
    compare_adapter(BUNDLED, folder, model.eval(), 0)


def test_an_adapter_of_fused_modules_that_we_wrote(tmp_path):
    source = GOLDEN / "gpt2"
    folder = random_adapters.write(tmp_path, checkpoint.load_config(source), seed=0)
    model = PeftModel.from_pretrained(make_peft_goldens.base_model(source), folder)
    compare_adapter(source, folder, model.eval(), 0)


def compare_adapter(checkpoint_folder, folder, model, seed):
    config, params = checkpoint.load(checkpoint_folder, "float32")
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, 33).astype(np.int32)
    expected = make_peft_goldens.logits(model, tokens.tolist())
    got, _ = run(config, lora.merge(params, peft.load(folder, config)[0]), tokens)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
