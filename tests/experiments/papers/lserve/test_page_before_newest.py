import jax
import numpy as np

from experiments.papers.lserve import page_before_newest as study
from models import llama, params
from models.config import ModelConfig
from paged import Engine, EngineConfig, SamplingParams

MODEL = ModelConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, qk_norm=True,
)  # fmt: skip
FLAGS = study.PageFlags(budget=192, intervals=(1, 2, 4))


def test_the_masks_give_the_tokens_of_the_engine():
    """Each system's right answer is the engine's output, which reads 3 of up to 7 pages."""
    weights = params.init(llama.declare(MODEL), jax.random.key(3))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, 330).tolist()
    answers = []
    for interval in FLAGS.intervals:
        config = EngineConfig(
            policy="lserve", policy_options={"budget": FLAGS.budget, "reuse": interval},
            page_size=study.PAGE_SIZE, max_model_len=448, kv_cache_tokens=1024, max_num_seqs=1,
        )  # fmt: skip
        engine = Engine.from_model(weights, MODEL, config)
        [output] = engine.generate([prompt], SamplingParams(max_tokens=110, ignore_eos=True))
        answers.append(output.tokens)
        found = {
            (n, page): tokens.tolist()
            for n, page, tokens in study.answers(FLAGS, weights, MODEL, prompt, output.tokens)
        }
        assert found[interval, False] == output.tokens[1:]
        assert found[2, True] != found[2, False]
    assert answers[0] != answers[1] != answers[2] != answers[0], "the interval changes no token"


def test_rows_use_the_selection_of_the_last_multiple_or_of_the_first_row():
    assert study.sources(6, 7, 4).tolist() == [0, 0, 2, 2, 2, 2, 6]
    assert study.sources(5, 3, 1).tolist() == [0, 1, 2]


def test_values_are_of_each_system():
    rows = [
        study.Row(0, 2, False, 86), study.Row(1, 2, False, 86), study.Row(2, 2, False, 5),
        study.Row(3, 2, False, -1), study.Row(0, 2, True, -1),
    ]  # fmt: skip
    assert study.values(FLAGS, rows) == {
        "right_2": 25, "often_2": 86, "right_2_with_page": 100, "often_2_with_page": None,
    }  # fmt: skip
