"""Every field of transformers' config classes is read or refused, or changes no logits.

The first test fails on a new version of transformers with further fields.
"""

import dataclasses
import re

import pytest
from transformers import CONFIG_MAPPING

from models.hf_config import ARCHITECTURES, from_hf
from tests.models.test_config import hf

# These fields concern training, other tasks than language modelling, or the form of results.
IRRELEVANT = {
    "transformers_version", "output_hidden_states", "return_dict", "dtype", "id2label", "label2id",
    "problem_type", "initializer_range", "init_std", "use_cache", "pad_token_id",
    "attention_dropout", "dropout", "layerdrop", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout",
    "chunk_size_feed_forward",  # for models that cut their MLP's input into chunks: not these
    "pretraining_tp",  # the same sums in another order, until transformers 4
    "reorder_and_upcast_attn",  # scores in float32, as they always are here
}  # fmt: skip
FIELDS = [
    (kind, field.name, field.default)
    for kind in ARCHITECTURES
    for field in dataclasses.fields(CONFIG_MAPPING[kind])
]
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
LONGROPE = {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}
ORIGINAL = "original_max_position_embeddings"  # only LongRoPE uses it
# Changed values of the fields whose default plus one would not do.
OTHER = {
    "architectures": ["Other"],
    "head_dim": 16,
    "max_window_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "n_head": 2,
    "n_inner": 3,
    "word_embed_proj_dim": 3,
    "rope_parameters": {"rope_theta": 3.0},
    "layer_types": ["full_attention"] * 2,
    "is_encoder_decoder": True,
}


def _changed(value):
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "other"


@pytest.mark.parametrize(("kind", "field", "default"), FIELDS)
def test_a_field_that_changes_the_computation_is_read_or_refused(kind, field, default):
    base = hf(kind, **(WINDOWS if kind in ("qwen2", "qwen3") else {}))
    base |= {ORIGINAL: 64, **LONGROPE} if field == ORIGINAL else {}
    other = OTHER[field] if field in OTHER else _changed(base.get(field, default))
    try:
        noticed = from_hf(base | {field: other}) != from_hf(base)
    except ValueError as error:
        noticed = field in str(error)
    assert noticed == (field not in IRRELEVANT)


def test_the_list_of_what_is_irrelevant_names_nothing_else():
    assert {name for _, name, _ in FIELDS} >= IRRELEVANT


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_causal", False),
        ("is_causal", "no"),
        ("per_layer_config", {"0": {"intermediate_size": 8}}),
        ("attention_chunk_size", 8),
        ("kv_sharing_modes", ["reuse", "reuse"]),
        ("transformers_weights", "other.safetensors"),
        ("tie_word_embeddings", None),
    ],
)
def test_what_transformers_reads_of_any_config_is_refused(kind, field, value):
    with pytest.raises(ValueError, match=field):
        from_hf(hf(kind, **{field: value}))


def test_defaults_are_those_of_transformers():
    assert from_hf(hf("qwen2", use_sliding_window=True, max_window_layers=0)).sliding_window == 4096
    assert from_hf(hf("qwen3", use_sliding_window=True, max_window_layers=0)).sliding_window == 4096
    silent = hf("qwen2", num_attention_heads=64, hidden_size=128)
    del silent["num_key_value_heads"]
    assert from_hf(silent).num_kv_heads == 32
    assert from_hf(silent | {"num_key_value_heads": None}).num_kv_heads == 64


ALIASES = [
    (kind, alias, field)
    for kind in ARCHITECTURES
    for alias, field in CONFIG_MAPPING[kind].attribute_map.items()
]


@pytest.mark.parametrize(("kind", "alias", "field"), ALIASES)
def test_a_field_of_two_names_has_one_value(kind, alias, field):
    base = hf(kind)
    value = base.pop(field, 1024)
    assert from_hf(base | {alias: value}) == from_hf(base | {field: value, alias: value})
    message = f"{field} {value} and {alias} 7 name one field and differ"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_hf(base | {field: value, alias: 7})
