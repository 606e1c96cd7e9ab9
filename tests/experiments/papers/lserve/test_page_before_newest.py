import jax
import numpy as np
import pytest

from experiments.papers.lserve import page_before_newest as study
from experiments.papers.masked import Question
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
        question = Question(prompt, output.tokens)
        found = {
            (n, always): tokens.tolist()
            for n, always, tokens in study.answers(FLAGS, weights, MODEL, question)
        }
        assert found[interval, 0] == output.tokens[1:]
    assert answers[0] != answers[1] != answers[2] != answers[0], "the interval changes no token"


def test_a_page_that_is_always_read_replaces_the_selected_page_of_lowest_score():
    rng, count = np.random.default_rng(0), 4
    scores, newest = rng.normal(size=(30, 2, 9)).astype(np.float32), rng.integers(4, 9, 30)
    plain, *forced = (np.asarray(study.pages_read(scores, newest, count, n)) for n in study.READ)
    for row, head in np.ndindex(plain.shape[:2]):
        older = np.argsort(-scores[row, head, : newest[row]])
        assert set(np.flatnonzero(plain[row, head])) == {newest[row], *older[: count - 1]}
        for always, read in enumerate(forced, start=1):
            page = newest[row] - always
            others = [x for x in older if x != page]
            expected = {newest[row], page, *others[: count - 2]}
            assert set(np.flatnonzero(read[row, head])) == expected


def test_rows_use_the_selection_of_the_last_multiple_or_of_the_first_row():
    assert study.sources(6, 7, 4).tolist() == [0, 0, 2, 2, 2, 2, 6]
    assert study.sources(5, 3, 1).tolist() == [0, 1, 2]


def _rows(interval: int, always: int, first_wrong: list[int]) -> list[study.Row]:
    return [study.Row(2048, i, interval, always, at) for i, at in enumerate(first_wrong)]


def test_the_claim_needs_the_page_and_not_the_control():
    rows = _rows(1, 0, [-1] * 4) + _rows(2, 0, [86, 86, 5, -1])
    page, control = _rows(2, 1, [-1] * 4), _rows(2, 2, [86, 86, -1, -1])
    numbers = study.values(FLAGS, rows + page + control)
    assert numbers == {
        "right_2048_1": 100, "often_2048_1": None, "at_2048_1": None,
        "right_2048_2": 25, "often_2048_2": pytest.approx(200 / 3), "at_2048_2": 86,
        "right_2048_2_with_page": 100, "right_2048_2_with_control": 50,
        "pooled_1": 100, "pooled_2": 25, "pooled_2_with_page": 100, "pooled_2_with_control": 50,
    }  # fmt: skip
    right = {name: x for name, x in numbers.items() if x is not None}
    assert study.holds(right)
    assert not study.holds(right | {"right_2048_2_with_page": 90})
    assert not study.holds(right | {"right_2048_2_with_control": 98})
    with pytest.raises(ValueError, match="nothing to explain"):
        study.holds(right | {"right_2048_2": 95})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"intervals": (1, 3)}, "--intervals must divide 64"),
        ({"intervals": (2, 2)}, "--intervals names a value twice: 2, 2"),
        ({"budget": 4096}, "a context of 512 has 5 whole pages of 64 tokens, fewer than"),
        ({"contexts": (9000,)}, "a context is at most the model's 8192 positions"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.PageFlags(**{"contexts": (512,), "num_prompts": 1} | fields))
