import jax
import numpy as np
import pytest

from experiments.papers.lserve import selection_masks as masks
from experiments.papers.lserve import shared_selections as study
from experiments.papers.masked import Question, questions_of
from models import llama, params
from models.config import ModelConfig
from paged import Engine, EngineConfig, SamplingParams

MODEL = ModelConfig(
    model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, qk_norm=True,
)  # fmt: skip
FLAGS = study.SelectionFlags(budget=192, intervals=(1, 2, 4))


def test_the_masks_give_the_tokens_of_the_engine():
    """Each system's right answer is the engine's output, which reads 3 of up to 7 pages."""
    weights = params.init(llama.declare(MODEL), jax.random.key(3))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, 330).tolist()
    answers = []
    for interval in FLAGS.intervals:
        config = EngineConfig(
            policy="lserve", policy_options={"budget": FLAGS.budget, "reuse": interval},
            page_size=masks.PAGE_SIZE, max_model_len=448, kv_cache_tokens=1024, max_num_seqs=1,
        )  # fmt: skip
        engine = Engine.from_model(weights, MODEL, config)
        [output] = engine.generate([prompt], SamplingParams(max_tokens=110, ignore_eos=True))
        answers.append(output.tokens)
        question = Question(prompt, output.tokens)
        names = np.arange(len(output.tokens)) % 7 == 0
        found = {
            (n, anew): tokens.tolist()
            for n, anew, tokens in study.answers(FLAGS, weights, MODEL, question, names)
        }
        assert found[interval, "none"] == output.tokens[1:]
        if interval > 1:
            systems = {tuple(found[interval, anew]) for anew in study.ANEW}
            assert len(systems) == 3, "what selects anew changes no token"
    assert answers[0] != answers[1] != answers[2] != answers[0], "the interval changes no token"


def test_the_newest_page_and_the_older_pages_of_highest_score_are_read():
    rng, count = np.random.default_rng(0), 4
    scores, newest = rng.normal(size=(30, 2, 9)).astype(np.float32), rng.integers(4, 9, 30)
    read = np.asarray(masks.pages_read(scores, newest, count))
    for row, head in np.ndindex(read.shape[:2]):
        older = np.argsort(-scores[row, head, : newest[row]])
        assert set(np.flatnonzero(read[row, head])) == {newest[row], *older[: count - 1]}


def test_rows_use_the_selection_of_the_last_row_that_selects():
    assert masks.sources(6, 7, 4).tolist() == [0, 0, 2, 2, 2, 2, 6]
    assert masks.sources(5, 3, 1).tolist() == [0, 1, 2]
    found = study.anew_of(np.array([False, False, False, True, True, False, False]))
    assert {name: masks.sources(6, 7, 4, anew).tolist() for name, anew in found.items()} == {
        "none": [0, 0, 2, 2, 2, 2, 6], "names": [0, 0, 2, 3, 4, 4, 6],
        "after": [0, 0, 2, 2, 2, 5, 6],
    }  # fmt: skip


@pytest.mark.parametrize(("task", "places"), [("values", [2, 5]), ("chain", [0, 1])])
def test_names_come_before_the_values_of_their_records(task, places):
    """Three values of two digits, with the key between them; three records, the last a number."""
    flags = study.SelectionFlags(num_prompts=1)
    [question] = questions_of(flags, task, 512)
    assert np.flatnonzero(study.names_of(flags.model, question)).tolist() == places


def _rows(interval: int, anew: str, first_wrong: list[int]) -> list[study.Row]:
    return [study.Row("values", 512, i, interval, anew, at) for i, at in enumerate(first_wrong)]


def test_the_claim_needs_the_names_and_not_the_tokens_after_them():
    rows = _rows(1, "none", [-1] * 4) + _rows(2, "none", [3, 3, 5, -1])
    others = _rows(2, "names", [-1] * 4) + _rows(2, "after", [3, 3, -1, -1])
    numbers = study.values(FLAGS, rows + others)
    assert numbers == {
        "right_values_1": 100, "right_values_2": 25, "right_values_2_at_names": 100,
        "right_values_2_after_names": 50,
    }  # fmt: skip
    right = {name: x for name, x in numbers.items() if x is not None}
    assert study.holds(right)
    assert not study.holds(right | {"right_values_2_at_names": 90})
    assert not study.holds(right | {"right_values_2_after_names": 98})
    with pytest.raises(ValueError, match="nothing to explain"):
        study.holds(right | {"right_values_2": 95})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"intervals": (1, 3)}, "--intervals must divide 64"),
        ({"intervals": (2, 4)}, "with 1 among them"),
        ({"intervals": (1, 2, 2)}, "--intervals names a value twice: 1, 2, 2"),
        ({"budget": 4096}, "a context of 512 has 7 whole pages of 64 tokens, fewer than"),
        (
            {"tasks": ("multikey",), "budget": 192},
            "no answer of multikey has a token that is a letter",
        ),
        ({"contexts": (512, 512)}, "--contexts names a value twice: 512, 512"),
        ({"contexts": (512, 9000)}, "a context is at most the model's 8192 positions"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.SelectionFlags(**{"contexts": (512,), "num_prompts": 1} | fields))
