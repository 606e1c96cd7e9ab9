import re
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiments.tasks import stories
from experiments.train.build_tokenizer import BOS, EOS
from experiments.train.data import TrainingData

TASKS = ("needles", "chain", "values", "count", "vote", "cot", "copy", "story", "passkeys")
DATA = TrainingData(seed=3, corpus_characters=50_000)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [128, 300])
def test_batches_have_the_asked_shape_and_learn_answers_only(task, length):
    batch = DATA.batch(step=5, length=length, size=8, mix={task: 1.0}, max_position=1000, share=1.0)
    assert batch.tokens.shape == batch.weights.shape == batch.positions.shape == (8, length + 1)
    assert (batch.tokens[:, 0] == BOS).all() and (batch.weights[:, 0] == 0).all()
    assert batch.tokens.min() >= BOS and batch.tokens.max() < 512
    steps = np.diff(batch.positions, axis=1)
    assert (batch.positions[:, 0] == 0).all() and steps.min() >= 1
    assert batch.positions.max() <= 1000 and ((steps > 1).sum(1) <= 3).all()
    assert batch.tasks == (task,) * 8
    for tokens, weights in zip(batch.tokens, batch.weights):
        answers = DATA.vocabulary.decode(tokens[weights >= 1])
        assert " " not in answers
        assert (answers == "") == (task == "story")
        if task in ("needles", "chain", "values", "passkeys"):
            text = DATA.vocabulary.decode(tokens)
            assert answers.count(";") == text.count("?") + text.count("&")


def test_a_batch_is_a_function_of_seed_and_step():
    arguments: dict[str, Any] = dict(length=128, size=4, mix=dict.fromkeys(TASKS, 1.0))
    again = TrainingData(seed=3, corpus_characters=50_000)
    one, two = DATA.batch(7, **arguments), again.batch(7, **arguments)
    assert (one.tokens == two.tokens).all() and (one.positions == two.positions).all()
    assert (one.tokens != DATA.batch(8, **arguments).tokens).any()
    other = TrainingData(seed=4, corpus_characters=50_000)
    assert (one.tokens != other.batch(7, **arguments).tokens).any()


def test_positions_are_plain_without_jumps_and_the_rest_is_end_of_sequence():
    batch = DATA.batch(0, length=400, size=8, mix={"copy": 1.0}, max_position=4000, share=0.0)
    assert (batch.positions == np.arange(401)).all()
    batch = DATA.batch(0, length=401, size=8, mix={"copy": 1.0})
    assert (batch.tokens[:, -1] == EOS).sum() + (batch.weights[:, -1] >= 1).sum() == 8


@pytest.mark.parametrize("task", TASKS)
def test_problems_fit_whatever_is_drawn(task):
    for step in range(60):
        for length in (64, 128, 255):
            batch = DATA.batch(step, length, size=4, mix={task: 1.0})
            assert task == "story" or (batch.weights >= 1).any(1).all()


def byte_tokenizer(eos: str | None = "<|end|>"):
    """A byte-level tokenizer with merges, as of Llama-3, trained on stories."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator([stories.text(20_000, 0)], trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=alphabet,
        show_progress=False,
    ))  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<|begin|>", **{"eos_token": eos} if eos else {}
    )


def test_another_models_sequences_are_of_its_own_tokens():
    tokenizer = byte_tokenizer()
    data = TrainingData(3, corpus_characters=50_000, tokenizer=tokenizer)
    for step in range(8):
        batch = data.batch(step, length=300, size=2, mix={"passkeys": 1.0})
        assert (batch.tokens[:, 0] == tokenizer.bos_token_id).all()
        for tokens, weights in zip(batch.tokens, batch.weights):
            text, answers = (tokenizer.decode(x) for x in (tokens, tokens[weights >= 1]))
            questions = re.findall(r"\?(\w+?)(?=\w{32};)", text)
            assert len(questions) == answers.count(";") >= 1
            for question, answer in zip(questions, answers.split(";"), strict=False):
                assert f"#{question}{answer};" in text and f"?{question}{answer};" in text
    with pytest.raises(ValueError, match="story needs the bundled model's tokenizer"):
        data.batch(0, length=300, size=1, mix={"story": 1.0})
    with pytest.raises(ValueError, match="a token that ends a sequence"):
        TrainingData(3, tokenizer=byte_tokenizer(eos=None))


def test_the_bundled_tokenizer_changes_no_batch(tokenizer):
    data = TrainingData(seed=3, corpus_characters=50_000, tokenizer=tokenizer)
    mix = dict.fromkeys(TASKS, 1.0)
    assert (data.batch(1, 128, 8, mix).tokens == DATA.batch(1, 128, 8, mix).tokens).all()


def test_answers_can_be_rewritten():
    data = TrainingData(3, 0.0, 50_000, rewrite=lambda question, answer: f"{question[1:]}={answer}")
    batch = data.batch(0, length=128, size=4, mix={"needles": 1.0})
    for tokens, weights in zip(batch.tokens, batch.weights):
        text = data.vocabulary.decode(tokens)
        for answer in data.vocabulary.decode(tokens[weights > 0]).split(";")[:-1]:
            key, value = answer.split("=")
            assert f"#{key}{value};" in text and f"?{key}{answer};" in text
