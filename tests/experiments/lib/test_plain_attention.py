"""Programs outside the engine refuse models whose attention they would not compute."""

import pytest
from transformers import Gemma2Config, MistralConfig

from experiments.lib.plain_attention import check_model


def test_windows_soft_caps_and_scales_are_refused(tmp_path):
    for name, config in {
        "window": MistralConfig(sliding_window=63),
        "cap": Gemma2Config(query_pre_attn_scalar=256, head_dim=256),
        "scale": Gemma2Config(query_pre_attn_scalar=64, head_dim=256, attn_logit_softcapping=None),
    }.items():
        config.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match="--model must have attention without windows"):
            check_model(str(tmp_path / name), [64])
    MistralConfig(sliding_window=64).save_pretrained(tmp_path)
    assert check_model(str(tmp_path), [64]).model_type == "mistral"


def test_contexts_longer_than_the_positions_are_refused(tmp_path):
    config = MistralConfig(sliding_window=None, max_position_embeddings=128)
    config.save_pretrained(tmp_path)
    assert check_model(str(tmp_path), [64, 128]).num_layers == config.num_hidden_layers
    with pytest.raises(ValueError, match="at most the model's 128 positions, not 129"):
        check_model(str(tmp_path), [64, 129])
