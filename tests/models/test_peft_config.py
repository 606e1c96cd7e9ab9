"""Which modules an adapter_config.json adapts, and how, by PEFT's rules."""

import json
from typing import Any

import numpy as np
import pytest

from models import peft, peft_config
from tests.models import peft_folders
from tests.models.peft_folders import edit
from tests.models.test_peft import ATTENTION, LLAMA, Q1


@pytest.mark.parametrize(
    "given",
    [
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": r"(?i)model\.\w{5,6}\.\d{,}.*\.(?!k_|o_)[A-Z]_PROJ"},
        {"target_modules": ["self_attn.q_proj", "v_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*(k|o|gate|up|down)_proj"},
        {"target_modules": [*ATTENTION, "k_proj"], "exclude_modules": ["k_proj"]},
    ],
)
def test_ways_to_name_the_same_modules(given, tmp_path):
    folder = peft_folders.write(tmp_path, LLAMA, targets=ATTENTION, **given)
    adapter, _ = peft.load(folder, LLAMA)
    assert adapter.weights.keys() == {"wq", "wv"}


@pytest.mark.parametrize(
    "given",
    [
        {"layers_to_transform": 1},
        {"layers_to_transform": [1, 7], "layers_pattern": "layers"},
        {"layers_to_transform": [1], "layers_pattern": ["h", "lay.*"]},
        {"layers_to_transform": [0], "target_modules": [Q1]},  # whole names ignore the layers
    ],
)
def test_ways_to_name_the_same_layers(given, tmp_path):
    folder = peft_folders.write(tmp_path, LLAMA, targets=["q_proj"], **given)
    edit(folder, lambda tensors: [tensors.pop(n) for n in [*tensors] if ".layers.0." in n])
    adapter, _ = peft.load(folder, LLAMA)
    assert [pair is None for pair in adapter.weights["wq"]] == [True, False]


@pytest.mark.parametrize("alpha", [0, -3.5])
def test_an_adapter_may_be_weighed_by_nothing_or_less(alpha, tmp_path):
    found = [
        peft.load(peft_folders.write(tmp_path, LLAMA, targets=["q_proj"], **how), LLAMA)[0]
        for how in ({"lora_alpha": 1}, {"lora_alpha": alpha}, {"alpha_pattern": {"q_proj": alpha}})
    ]
    (unit, *weighed) = (adapter.weights["wq"][0] for adapter in found)
    assert unit is not None
    for pair in weighed:
        assert pair is not None
        np.testing.assert_array_equal(pair[1], np.float32(alpha) * unit[1])


ENDLESS = "(a|[a-z.0-9_]|.)*[!?]"
HUGE = "(((a{1000}){1000}){1000}){1000}"  # `regex` would expand it


@pytest.mark.parametrize(
    "field, given",
    [
        ("target_modules", ENDLESS),
        ("exclude_modules", ENDLESS),
        ("rank_pattern", {ENDLESS: 3}),
        ("layers_pattern", ENDLESS),
    ],
)
def test_an_expression_that_takes_for_ever_is_refused(field, given, tmp_path, monkeypatch):
    monkeypatch.setattr(peft_config, "MATCHING_S", 0.1)
    more = {"layers_to_transform": 1} if field == "layers_pattern" else {}
    folder = peft_folders.write(tmp_path, LLAMA, **{field: given}, **more)
    with pytest.raises(
        ValueError, match=r"expressions take more than 0\.1 seconds; the last one: '"
    ):
        peft.load(folder, LLAMA)


def test_layers_may_be_left_out(tmp_path):
    folder = peft_folders.write(tmp_path, LLAMA, targets=ATTENTION, layers_to_transform=1)
    edit(folder, lambda tensors: [tensors.pop(n) for n in [*tensors] if ".layers.0." in n])
    adapter, _ = peft.load(folder, LLAMA)
    assert adapter.weights["wq"][0] is None
    assert adapter.rank_of("wq") == adapter.rank == 8
    assert adapter.rank_of("wo") == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"layers_pattern": "h"}, "layers_pattern 'h' needs layers_to_transform"),
        ({"layers_pattern": "h", "layers_to_transform": 1}, "leave nothing to adapt"),
        ({"layers_pattern": "(", "layers_to_transform": 1}, "'[(]' is no regular expression"),
        ({"layers_pattern": [1], "layers_to_transform": 1}, "layers_pattern must be a text or a"),
        ({"target_modules": ".*q_proj", "layers_to_transform": 1}, "go with a list of target_mod"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"from_next_year": 1}, "from_next_year 1 is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"target_modules": ["q_proj", "qproj"]}, "target_modules 'qproj' is no projection"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' names lm_head, which is no"),
        ({"target_modules": ".*(q_proj|embed_tokens)"}, "names model.embed_tokens, which is no"),
        ({"target_modules": "("}, "is no regular expression"),
        ({"target_modules": None}, "target_modules must be a text or a list of texts, not None"),
        ({"exclude_modules": ATTENTION}, "leave nothing to adapt"),
        ({"layers_to_transform": [7]}, "leave nothing to adapt"),
        ({"r": 0}, "must be at least 1, not 0"),
        ({"r": "8"}, "r must be an integer"),
        ({"lora_alpha": None}, "lora_alpha is missing or null"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number that float32 holds, not '8'"),
        ({"alpha_pattern": {"q_proj": 1e39}}, "alpha_pattern: q_proj must be a number that"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern: q_proj must be an integer"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must map names to numbers"),
        ({"alpha_pattern": {"*": 2}}, "alpha_pattern .*is no regular expression"),
        ({"rank_pattern": {"(?i)Q_PROJ": 2}}, "rank_pattern .*is no regular expression"),
        ({"target_modules": ".*(?:q_prxj){e<=1}"}, "has another meaning in the package regex"),
        ({"target_modules": ".*[[:alpha:]]_proj"}, "has another meaning in the package regex"),
        ({"target_modules": HUGE}, "repeats too much: at most 100000 times in all"),
        ({"target_modules": "q{99999999999999999999}"}, "is no regular expression: the repetition"),
        ({"target_modules": "q{" + 5000 * "9" + "}"}, "target_modules .*is no regular expression"),
        ({"target_modules": 5000 * "(" + 5000 * ")"}, "target_modules .*is no regular expression"),
        ({"r": 10**400}, r"needs? \(10000"),
        ({"r": 4}, r"q_proj.lora_A.weight has shape \(8, 24\), but the model and .* \(4, 24\)"),
        ({"target_modules": ["q_proj"]}, "v_proj.lora_A.weight belongs to no module that"),
        ({"target_modules": [*ATTENTION, "k_proj"]}, r"k_proj.lora_A.weight of shape .* is missin"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fields, error, tmp_path):
    folder = peft_folders.write(tmp_path, LLAMA, targets=ATTENTION, **fields)
    with pytest.raises(ValueError, match=error) as raised:
        peft.load(folder, LLAMA)
    assert str(tmp_path) in str(raised.value)


def test_adapter_config_is_what_peft_writes(tmp_path):
    """The reader accepts the fields of a real file, not only those that peft_folders writes."""
    folder = peft_folders.write(tmp_path, LLAMA, targets=ATTENTION)
    path = folder / "adapter_config.json"
    written: dict[str, Any] = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
        "auto_mapping": None, "base_model_name_or_path": "x", "bias": "none",
        "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
        "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "layer_replication": None, "layers_pattern": None,
        "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16, "lora_bias": False,
        "lora_dropout": 0.05, "megatron_config": None, "megatron_core": "megatron.core",
        "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.18.0",
        "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None,
        "target_modules": ["q_proj", "v_proj"], "target_parameters": None,
        "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
        "use_qalora": False, "use_rslora": False,
    }  # fmt: skip
    path.write_text(json.dumps(written))
    adapter, _ = peft.load(folder, LLAMA)
    assert adapter.rank == 8
