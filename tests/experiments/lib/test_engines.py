"""Engines for notebooks: plain values configure them, and no flag is defined."""

import pytest

from experiments.lib.engines import GPU_PAGE_SIZE, engine_config, load_engine
from models import load_tokenizer
from models.config import ModelConfig
from paged.engine import EngineConfig
from paged.requests.sampling_params import SamplingParams
from pallas_kernels import backend
from pallas_kernels.tools.targets import TARGETS
from tests.experiments.conftest import SERVED


@pytest.mark.parametrize("executor", ["device", "simulated"])
def test_an_engine_takes_text_with_the_models_own_tokenizer(tiny_folder, executor):
    engine = load_engine(SERVED, model=str(tiny_folder), executor=executor)
    how = SamplingParams(max_tokens=3, ignore_eos=True)
    (output,) = engine.generate(["The old sailor"], how)
    tokenizer = load_tokenizer(tiny_folder)
    assert output.prompt_tokens == tokenizer.encode("The old sailor")
    assert len(output.tokens) == 3


def test_a_simulated_engine_counts_memory_in_its_dtype(tiny_folder):
    used = []
    for dtype in ("float32", "bfloat16"):
        engine = load_engine(SERVED, model=str(tiny_folder), dtype=dtype, executor="simulated")
        engine.add_request([5] * 20)
        engine.step()
        used.append(engine.host_policy.usage().bytes["blocks"])
        assert engine.events[0]["dtype"] == dtype
    assert used[0] == 2 * used[1] > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"executor": "simulate"}, "executor must be 'device' or 'simulated', not 'simulate'"),
        ({"dtype": "tiny"}, "dtype 'tiny' is not among float32, bfloat16, float16"),
        ({"attention_implementation": "cuda"}, "has no implementation 'cuda'; allowed: mosaic_gpu"),
    ],
)
def test_an_engine_of_another_kind_is_refused(tiny_folder, wrong, message):
    with pytest.raises(ValueError, match=message):
        load_engine(SERVED, model=str(tiny_folder), **wrong)


def test_the_longest_sequence_is_the_models_up_to_the_default():
    assert engine_config(ModelConfig(max_position_embeddings=300)).max_model_len == 300
    default = EngineConfig().max_model_len
    assert engine_config(ModelConfig(max_position_embeddings=10**6)).max_model_len == default
    with pytest.raises(ValueError, match=r"max_model_len \(301\) exceeds the model's"):
        engine_config(ModelConfig(max_position_embeddings=300), max_model_len=301)


def test_pages_are_larger_on_a_gpu_unless_a_size_is_given():
    model = ModelConfig()
    assert engine_config(model).page_size == EngineConfig.page_size
    with backend.compiling_for(TARGETS["h100"].gpu):
        assert engine_config(model).page_size == GPU_PAGE_SIZE
        assert engine_config(model, page_size=8).page_size == 8
