import jax
import numpy as np
import pytest

from experiments.papers.lserve import long_chain_losses as study
from experiments.papers.lserve.selection_masks import PAGE_SIZE
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
# test_shared_selections.py compares selection without streaming heads.
OF_ENGINE = {
    "streaming": LSERVE | {"budget": 1024},
    "lserve": LSERVE,
    "lserve_exact": LSERVE | {"logical_page": 1},
}


def test_the_masks_give_the_tokens_of_the_engine():
    """A right answer of each system, and of no other, is the engine's output."""
    weights = params.init(llama.declare(MODEL), jax.random.key(3))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, 600).tolist()
    streams = study.streams_of(MODEL, GATES)
    for name, options in OF_ENGINE.items():
        config = EngineConfig(
            policy="lserve", policy_options=options, page_size=PAGE_SIZE, max_model_len=768,
            kv_cache_tokens=1536, max_num_seqs=1,
        )  # fmt: skip
        engine = Engine.from_model(weights, MODEL, config)
        [output] = engine.generate([prompt], SamplingParams(max_tokens=100, ignore_eos=True))
        question = Question(prompt, output.tokens)
        found = study.answers(BUDGET, weights, MODEL, streams, question)
        right = {each for each, tokens in found if tokens.tolist() == output.tokens[1:]}
        # In the tiny model, the gates of half of the heads are below those of retrieval heads.
        assert right == {name} | ({"lserve_gated"} if name == "lserve" else set())


def test_a_query_sees_its_heads_window_or_the_pages_read():
    rng, (R, K, S, count) = np.random.default_rng(0), (5, 2, 640, 4)
    q, keys = rng.normal(size=(R, K, 2, 16)), rng.normal(size=(S, K, 16))
    at, streams = np.array([500, 511, 512, 575, 639]), np.array([[True, False]])
    for always in 0, 1, 2:
        mask = np.asarray(study.seen(
            0, q, keys, at, streams, np.arange(R), selects=True, count=count, logical=1,
            always=always,
        ))  # fmt: skip
        for row, position in enumerate(at):
            newest = position // PAGE_SIZE
            first = (newest - 4) * PAGE_SIZE
            window = [s for s in range(position + 1) if s < 128 or s >= first]
            assert np.flatnonzero(mask[row, 0, : position + 1]).tolist() == window
            scores = (keys[:, 1] @ q[row, 1].T).max(1).reshape(-1, PAGE_SIZE).max(1)
            older = sorted(range(newest), key=lambda page: -scores[page])
            chosen = [newest - always] if always else []
            chosen += [page for page in older if page not in chosen][: count - 1 - len(chosen)]
            read = [s for s in range(S) if s // PAGE_SIZE in (*chosen, newest)]
            assert np.flatnonzero(mask[row, 1]).tolist() == read


RIGHT = {
    "right_dense": 99.0, "right_streaming": 98.0, "right_selected": 10.0, "right_lserve": 10.0,
    "right_lserve_1": 94.0, "right_lserve_exact": 89.0, "right_lserve_gated": 50.0,
    "right_lserve_with_page": 94.0, "right_lserve_with_control": 52.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"right_lserve_1": 93.9},
        {"right_lserve_exact": 89.1},
        {"right_lserve_with_page": 93.9},
        {"right_lserve_with_control": 52.1},
        {"right_lserve": 89.0, "right_lserve_with_control": 89.0},
    ],
)
def test_the_claim_needs_every_part(changed):
    assert study.holds(RIGHT)
    assert not study.holds(RIGHT | changed)


def test_without_a_loss_there_is_nothing_to_explain():
    rows = [
        study.Row(c, i, name, -1) for c in (1023, 1024) for name in study.SYSTEMS for i in (0, 1)
    ]
    assert study.values(study.LossFlags(), rows).items() >= dict.fromkeys(RIGHT, 100).items()
    with pytest.raises(ValueError, match="nothing to explain"):
        study.holds(RIGHT | {"right_lserve": 90.0})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"budget": 4096}, "a context of 1023 has 10 whole pages of 64 tokens, fewer"),
        ({"contexts": (9000,)}, "a context is at most the model's 8192 positions"),
        ({"task": "cot", "contexts": (512,), "budget": 192}, "streaming heads read all tokens of"),
        ({"gates": "models/bundled/duo_gates.json"}, "duo_gates.json"),
    ],
)
def test_a_bad_flag_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        study.check(study.LossFlags(**{"num_prompts": 1} | fields))


def test_gates_of_another_shape_are_refused(tmp_path):
    (tmp_path / "gates.tsv").write_text("0.1\t0.9\n")
    with pytest.raises(ValueError, match="gates are of 1 layers of 2 KV heads"):
        study.check(study.LossFlags(num_prompts=1, gates=str(tmp_path / "gates.tsv")))
