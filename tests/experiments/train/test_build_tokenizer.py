import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from experiments.tasks import stories
from experiments.train import build_tokenizer
from experiments.train.build_tokenizer import BOS, EOS, PAD, SPECIALS, UNK, Vocabulary
from models.hub import BUNDLED

PRINTABLE = "".join(chr(c) for c in range(32, 127)) + "\n"
VOCABULARY = Vocabulary()
TEXTS = (
    st.lists(
        st.text(PRINTABLE, max_size=12) | st.sampled_from(VOCABULARY.pieces[100:]), max_size=12
    )
    .map("".join)
    .filter(lambda text: not any(special in text for special in SPECIALS))
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer.build(folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_hugging_face_tokenizer_equals_its_twin_and_decodes_to_the_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == [BOS, *VOCABULARY.encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text == VOCABULARY.decode(ids)


def test_vocabulary_is_512_tokens_with_specials_first(tokenizer):
    assert len(VOCABULARY) == len(tokenizer) == 512
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (PAD, BOS)
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (EOS, UNK)
    assert all(len(piece) == 1 or piece[0] == " " for piece in VOCABULARY.pieces[4:])


def test_words_of_stories_are_one_token_and_keys_one_token_a_character(tokenizer):
    assert len(VOCABULARY.encode(" Once upon a time, the grandmother")) == 7
    record = f"#Gr{string.digits};~k3;@a=0+4:00+4=a4!a."
    assert len(VOCABULARY.encode(record)) == len(record)
    assert UNK not in VOCABULARY.encode(stories.text(50_000, seed=3))


def test_long_words_and_other_characters(tokenizer):
    assert tokenizer("x" * 3000)["input_ids"] == [BOS] + [VOCABULARY.ids["x"]] * 3000
    word = " upon" * 20 + "upon" * 50 + "."
    assert tokenizer(word)["input_ids"] == [BOS, *VOCABULARY.encode(word)]
    assert tokenizer("é")["input_ids"] == [BOS, UNK] == [BOS, *VOCABULARY.encode("é")]


def test_the_bundled_tokenizer_is_this_one(tmp_path):
    build_tokenizer.build(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (BUNDLED / path.name).read_text(), path.name
