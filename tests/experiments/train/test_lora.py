"""Finetuned adapters of a tiny random model, whose answers match nothing."""

import json
from functools import partial

import jax
import pytest

from experiments.lib.typed_flags import Output
from experiments.tasks import answer_formats
from experiments.train import lora as program
from experiments.train.data import TrainingData
from experiments.train.trainer import loss_fn
from models import checkpoint, lora, peft
from tests.experiments.conftest import TINY
from tests.models.goldens import GOLDEN

OPTIONS = program.Options(
    steps=3, length=128, batch_size=2, evaluate_every=2, evaluation_prompts=1,
    corpus_characters=20_000,
)  # fmt: skip


def batch_of(step: int):
    rewrite = partial(answer_formats.answer, "outer")
    drawn = TrainingData(3, 0.0, 20_000, rewrite).batch(step, 128, 4, {"needles": 1.0})
    return drawn.tokens, drawn.weights, drawn.positions


@pytest.mark.slow
def test_training_begins_from_the_model_and_what_it_learns_can_be_merged(tiny_folder, tmp_path):
    p, batch = checkpoint.load(tiny_folder)[1], batch_of(0)
    tokens, label_weights, positions = batch

    def loss(p, seam=None) -> float:
        return float(loss_fn(p, TINY, tokens, label_weights, positions, seam)[0])

    weights = program.initialise(TINY, 4, jax.random.key(1))
    before = loss(p)
    assert loss(p, program.seam(weights)) == pytest.approx(before, abs=1e-6)
    optimizer = program.make_optimizer(0.01, 60)
    state = optimizer.init(weights)
    for _ in range(60):
        weights, state, after, _ = program.train_step(TINY, optimizer, p, weights, state, *batch)
    assert after < before - 1
    last = loss(p, program.seam(weights))
    peft.save(tmp_path, program.to_lora(weights), TINY, dtype="float32")
    merged = lora.merge(p, peft.load(tmp_path, TINY)[0])
    assert loss(merged) == pytest.approx(last, abs=1e-4)


@pytest.mark.sweep  # it trains twice
def test_the_program_writes_adapters_and_can_be_repeated(tiny_folder, tmp_path, capsys):
    def run(name: str, *adapters: str):
        folder = tmp_path / name
        flags = program.LoraFlags(adapters, str(tiny_folder), OPTIONS)
        program.main(flags, Output(str(folder)))
        return folder

    first, again = run("first", "outer:4", "twice:2"), run("again", "outer:4")
    hashes = {peft.load(folder / "adapters" / "outer", TINY)[1] for folder in (first, again)}
    assert len(hashes) == 1
    for name, rank in (("outer", 4), ("twice", 2)):
        assert peft.load(first / "adapters" / name, TINY)[0].rank == rank
        record = json.loads((first / "adapters" / name / "training.json").read_text())
        assert (record["answer_format"], record["rank"], record["steps"]) == (name, rank, 3)
        assert record["base_weights_sha256"] == checkpoint.weights_hash(tiny_folder)
        assert [row["step"] for row in record["log"]] == [2, 3]
    assert json.loads((first / "summary.json").read_text())["exact_match_outer"] == 0
    assert "twice, rank 2: 0.0 % of unseen prompts" in capsys.readouterr().out


@pytest.mark.parametrize("spec", ["reversed", "reversed:0", "reversed:x", "upside:8", ""])
def test_bad_adapters_are_refused(spec):
    with pytest.raises(ValueError, match="must be format:rank, with a rank from 1 to 128"):
        program.ranks(["named:4", spec])


def test_a_model_of_another_family_is_refused(tmp_path):
    flags = program.LoraFlags(("outer:4",), str(GOLDEN / "opt"), OPTIONS)
    with pytest.raises(ValueError, match="is opt: not of Llama's family"):
        program.main(flags, Output(str(tmp_path)))


@pytest.mark.parametrize(
    "name, least", [("steps", 1), ("learning_rate", 0), ("length", 128), ("seed", 0)]
)
def test_bad_options_are_refused(name, least):
    with pytest.raises(ValueError, match=f"{name} must be at least {least}"):
        program.Options(**{name: least - 1})
