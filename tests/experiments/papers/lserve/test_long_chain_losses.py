import jax
import numpy as np
import pytest

from experiments.papers.lserve import long_chain_losses as study
from experiments.papers.lserve.page_before_newest import PAGE_SIZE
from experiments.papers.masked import Question
from models import llama, params
from models.config import ModelConfig
from paged import Engine, EngineConfig, SamplingParams

MODEL = ModelConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, qk_norm=True,
)  # fmt: skip
GATES = (0.9, 0.1), (0.2, 0.8)
BUDGET = 192
LSERVE = {"budget": BUDGET, "gates": GATES}
# test_page_before_newest.py compares selection without streaming heads.
OF_ENGINE = {
    "streaming": LSERVE | {"budget": 1024},
    "exact_4": {"budget": BUDGET, "logical_page": 1},
    "lserve": LSERVE,
}


def test_the_masks_give_the_tokens_of_the_engine():
    """Each system's right answer is the engine's output. Prompts are longer than the window of a
    streaming head."""
    weights = params.init(llama.declare(MODEL), jax.random.key(3))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, 600).tolist()
    streams = np.array(GATES) < 0.5
    answers = []
    for name, options in OF_ENGINE.items():
        config = EngineConfig(
            policy="lserve", policy_options=options, page_size=PAGE_SIZE, max_model_len=768,
            kv_cache_tokens=1536, max_num_seqs=1,
        )  # fmt: skip
        engine = Engine.from_model(weights, MODEL, config)
        [output] = engine.generate([prompt], SamplingParams(max_tokens=100, ignore_eos=True))
        answers.append(tuple(output.tokens))
        question = Question(prompt, output.tokens)
        found = dict(study.answers(BUDGET, weights, MODEL, streams, question))
        assert found[name].tolist() == output.tokens[1:], name
    assert len(set(answers)) == len(OF_ENGINE), "two systems have the same tokens"


RIGHT = {
    "right_dense": 99.0, "right_streaming": 98.0, "right_selected_1": 97.0,
    "right_selected_4": 10.0, "right_exact_4": 5.0, "right_lserve": 10.0,
    "right_lserve_with_page": 98.0, "right_lserve_with_control": 30.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"right_streaming": 90.0},
        {"right_selected_1": 90.0},
        {"right_lserve_with_page": 90.0},
        {"right_lserve_with_control": 95.0},
    ],
)
def test_the_claim_needs_every_part(changed):
    assert study.holds(RIGHT)
    assert not study.holds(RIGHT | changed)


def test_without_a_loss_there_is_nothing_to_explain():
    rows = [study.Row(i, name, -1) for name in study.SYSTEMS for i in range(3)]
    numbers = study.values(study.LossFlags(), rows)
    assert numbers == dict.fromkeys(RIGHT, 100)
    with pytest.raises(ValueError, match="nothing to explain"):
        study.holds({name: 100.0 for name in numbers})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"budget": 4096}, "prompts of 1024 tokens have 10 whole pages of 64 tokens, fewer than"),
        ({"context": 9000}, "a context is at most the model's 8192 positions"),
        ({"gates": "models/bundled/duo_gates.json"}, "gates"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.LossFlags(**{"num_prompts": 1} | fields))
