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
    for name, dense in [*((each, 0) for each in study.PAGES), ("flat_16", 1)]:
        page, logical = study.PAGES[name]
        options = {"budget": BUDGET, "reuse": 1, "logical_page": logical, "dense_layers": dense}
        config = EngineConfig(
            policy="lserve", policy_options=options, page_size=page, max_model_len=448,
            kv_cache_tokens=1024, max_num_seqs=1,
        )  # fmt: skip
        engine = Engine.from_model(weights, MODEL, config)
        [output] = engine.generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True))
        answers.append(tuple(output.tokens))
        asked = Asked(weights, MODEL, Question(prompt, output.tokens))
        assert study.likeliest(asked, name, BUDGET, dense).tolist() == output.tokens[1:]
    assert len(set(answers)) == len(answers), "pages and layers change no token"


FLAGS = study.BudgetFlags(budgets=(512, 64, 128, 256, 1024))


def test_systems_read_three_pages_or_more():
    budgets = [budget for name, budget in FLAGS.systems if name == "flat_64"]
    assert budgets == [256, 512, 1024]
    assert ("flat_16", 64) in FLAGS.systems
    assert ("flat_32", 64) not in FLAGS.systems


def _numbers(wrong: dict[tuple[str, int], int]) -> dict[str, float]:
    """Of twenty prompts for each system, of which so many are wrong; others are right."""
    rows = [
        study.Row(i, name, budget, 2 if i < wrong.get((name, budget), 0) else -1)
        for name, budget in [(study.EVERYTHING, 0), *FLAGS.systems]
        for i in range(20)
    ]
    return {name: x for name, x in study.values(FLAGS, rows).items() if x is not None}


def test_the_claim_needs_a_loss_at_small_budgets_and_none_at_large_ones():
    wrong = {("flat_64", 256): 8, ("flat_16", 64): 2, ("flat_64", 512): 1}
    numbers = _numbers(wrong)
    assert numbers["right_flat_64_256"] == 60
    assert study.grown(numbers) == {64: 30, 128: 5, 256: 0}
    assert study.holds(numbers)
    for change in (
        {("flat_64", 256): 3}, {("flat_64", 1024): 1}, {("exact_64", 512): 1},
        {("flat_64", 1024): 1, ("flat_16", 256): 1},
    ):  # fmt: skip
        assert not study.holds(_numbers(wrong | change))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"budgets": (100,)}, r"--budgets must be multiples of 64, not \[100\]"),
        ({"budgets": (64, 64)}, "--budgets names a value twice: 64, 64"),
        ({"budgets": (4096,)}, "has 7 whole pages of 64 tokens, fewer than a budget of"),
        ({"dense_layers": 8}, "--dense_layers must be below the model's 8 layers"),
        ({"context": 9000}, "a context is at most the model's 8192 positions"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.BudgetFlags(**{"context": 512, "num_prompts": 1} | fields))
