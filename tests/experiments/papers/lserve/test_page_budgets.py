import jax
import numpy as np
import pytest

from experiments.papers.lserve import page_budgets as study
from experiments.papers.masked import Asked, Question
from models import llama, params
from models.config import ModelConfig
from paged import Engine, EngineConfig, SamplingParams

MODEL = ModelConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, qk_norm=True,
)  # fmt: skip
BUDGET = 192


def test_the_masks_give_the_tokens_of_the_engine():
    """Of prompts of 330 tokens, with and without a dense layer."""
    weights = params.init(llama.declare(MODEL), jax.random.key(3))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, 330).tolist()
    answers = []
    for name, dense in (("flat_16", 0), ("flat_16", 1), ("flat_32", 0), ("hierarchical_64", 0)):
        page, logical = study.PAGES[name]
        options = {"budget": BUDGET, "reuse": 1, "logical_page": logical, "dense_layers": dense}
        config = EngineConfig(
            policy="lserve", policy_options=options, page_size=page, max_model_len=448,
            kv_cache_tokens=1024, max_num_seqs=1,
        )  # fmt: skip
        engine = Engine.from_model(weights, MODEL, config)
        [output] = engine.generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True))
        answers.append(tuple(output.tokens))
        likeliest = Asked(weights, MODEL, Question(prompt, output.tokens)).likeliest(
            study.seen, page=page, logical=logical, count=BUDGET // page, dense=dense
        )
        assert likeliest.tolist() == output.tokens[1:]
    assert len(set(answers)) == len(answers), "pages and layers change no token"


RIGHT = {
    "right_everything": 100, "right_flat_16_64": 90, "right_flat_64_64": 10,
    "right_flat_16_128": 95, "right_flat_64_128": 30, "right_flat_16_256": 100,
    "right_flat_64_256": 60, "right_flat_16_512": 100, "right_flat_64_512": 94,
}  # fmt: skip


def test_the_claim_needs_a_loss_at_the_smallest_budget_and_none_at_the_largest():
    assert study.grown(RIGHT) == {64: 30, 128: 1}
    assert study.holds(RIGHT)
    assert not study.holds(RIGHT | {"right_flat_64_256": 85})
    assert not study.holds(RIGHT | {"right_flat_64_512": 92})
    with pytest.raises(ValueError, match="two budgets and 4 times each of them"):
        study.holds({name: x for name, x in RIGHT.items() if "512" not in name})


def test_values_are_shares_of_right_answers():
    rows = [study.Row(i, "flat_16", 64, wrong) for i, wrong in enumerate((-1, 2, -1, -1))]
    rows += [study.Row(i, study.EVERYTHING, 0, -1) for i in range(4)]
    numbers = study.values(study.BudgetFlags(), rows)
    assert numbers == {"right_flat_16_64": 75, "right_everything": 100}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"budgets": (100,)}, r"--budgets must be multiples of 64, not \[100\]"),
        ({"budgets": (64, 64)}, "--budgets names a value twice: 64, 64"),
        ({"budgets": (4096,)}, "have 7 whole pages of 64 tokens, fewer than a budget of"),
        ({"dense_layers": 8}, "--dense_layers must be below the model's 8 layers"),
        ({"context": 9000}, "a context is at most the model's 8192 positions"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.BudgetFlags(**{"context": 512, "num_prompts": 1} | fields))
