"""The text of a stream of tokens, against decoding all tokens again after each token."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models import load_tokenizer
from models.hub import BUNDLED
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.requests.stopping import TextStream, decode, final_text
from paged.simulator.executor import SimulatedExecutor
from tests.paged.tiny import TINY

SPECIAL = ["<unk>", "<s>", "</s>"]


@dataclass(frozen=True)
class Case:
    """A tokenizer under test.

    tokens: ids to draw from.
    special: ids of special tokens.
    byte_of: the byte of each token that stands for one byte.
    """

    tokenizer: PreTrainedTokenizerFast
    tokens: list[int]
    special: frozenset[int]
    byte_of: dict[int, int] = field(default_factory=dict)


def _finish(tokenizer, pieces, byte_of=None) -> Case:
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    drawn = [tokenizer.token_to_id(piece) for piece in (*pieces, *SPECIAL)]
    assert None not in drawn
    return Case(fast, drawn, frozenset(fast.all_special_ids), byte_of or {})


def _byte_level() -> Case:
    """Pieces may begin or end within a character, as merges of bytes can."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable}
    letter |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert sorted(letter.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = [
        b"a", b" b", b"a\xf0", b"\x9f\x98\x80", b"\x98", b"\x80\xf0", b"\x9f", b"\xc3", b"\xa9",
        b"\xa9\xc3", b"\xff", b"\xe0\x80", b"\xef\xbf\xbd", b"\xef\xbf", b"\xbd", "é😀".encode(),
    ]  # fmt: skip
    pieces = ["".join(letter[byte] for byte in part) for part in parts]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, pieces)


def _byte_fallback() -> Case:
    """As in Llama 2, text without a piece is spelt in bytes, and decoding drops the first space."""
    drawn = [0x20, 0x41, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x96, 0x81, 0xEF, 0xBF, 0xBD]
    drawn.append(0xFF)
    pieces = ["▁", "a", "▁a", "\ufffd", "b"]
    spelt = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *spelt, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    byte_of = {vocabulary[piece]: byte for byte, piece in enumerate(spelt)}
    return _finish(tokenizer, [*pieces, *(spelt[byte] for byte in drawn)], byte_of)


def _metaspace() -> Case:
    pieces = ["▁", "▁a", "a", "é", "\ufffd", "▁▁b", "<0x41>"]
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return _finish(tokenizer, pieces)


def _word_piece() -> Case:
    pieces = ["a", "##b", "do", "n't", "'", "s", "##.", ".", "?", "é", "\ufffd"]
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return _finish(tokenizer, pieces)


def _bundled() -> Case:
    tokenizer = load_tokenizer(BUNDLED)
    special = frozenset(tokenizer.all_special_ids)
    return Case(tokenizer, list(range(len(tokenizer))), special)


CASES = {
    "byte level": _byte_level(),
    "byte fallback": _byte_fallback(),
    "metaspace": _metaspace(),
    "word piece": _word_piece(),
    "bundled": _bundled(),
}
each_tokenizer = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
STOPS = ["a", " a", "aa", "b", "é", "\ufffd", "a\ufffd", "😀", "A", " ", "\ufffd\ufffd", "éé", "."]


@st.composite
def sequences(draw, case: Case):
    """Sequences of tokens, some with repeats longer than the window that a stream keeps."""
    parts = st.tuples(
        st.lists(st.sampled_from(case.tokens), min_size=1, max_size=6), st.sampled_from([1, 1, 8])
    )
    return [
        token for tokens, times in draw(st.lists(parts, max_size=5)) for token in tokens * times
    ]


def _row(case: Case, tokens) -> bytes:
    """The bytes of the byte tokens at the end, without special tokens, which a decoder skips."""
    visible = [t for t in reversed(tokens) if t not in case.special]
    row = itertools.takewhile(case.byte_of.__contains__, visible)
    return bytes(case.byte_of[token] for token in row)[::-1]


def _shown(case: Case, tokens: list[int]) -> str:
    """The specified value of `TextStream.text`, from `decode` alone."""
    visible = [t for t in tokens if t not in case.special]
    try:
        _row(case, tokens).decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            visible = visible[: error.start - len(_row(case, tokens)) or None]
    return decode(case.tokenizer, visible).removesuffix("\ufffd")


@each_tokenizer
@settings(deadline=None)
@given(data=st.data())
def test_each_text_is_that_of_the_tokens_so_far(case, data):
    tokens = data.draw(sequences(case))
    stream, before = TextStream(case.tokenizer, ()), ""
    for i, token in enumerate(tokens):
        stream.push(token)
        assert stream.text == _shown(case, tokens[: i + 1])
        # The text only grows, except that a bad byte replaces the characters of its row.
        if not stream.text.startswith(before):
            row = _row(case, tokens[: i + 1]) or _row(case, tokens[:i])
            assert "\ufffd" in row.decode(errors="replace")
        before = stream.text
    whole = final_text(case.tokenizer, tokens, ())
    assert whole == decode(case.tokenizer, tokens)
    if not case.byte_of:
        assert whole in (before, before + "\ufffd")


@each_tokenizer
@settings(deadline=None)
@given(data=st.data(), stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_a_stop_string_is_found_with_the_first_token_whose_text_holds_it(case, data, stop):
    tokens = data.draw(sequences(case))
    stream = TextStream(case.tokenizer, tuple(stop))
    for i, token in enumerate(tokens):
        text = _shown(case, tokens[: i + 1])
        found = any(string in text for string in stop)
        assert stream.push(token) == found
        if found:
            break
    text = final_text(case.tokenizer, tokens[: i + 1], tuple(stop)) if tokens else ""
    assert not any(string in text for string in stop)
    assert decode(case.tokenizer, tokens[: i + 1] if tokens else []).startswith(text)


@each_tokenizer
def test_a_token_costs_the_same_however_long_the_text(case, monkeypatch):
    """Each text repeats one token, which may be special; the last text repeats all in turn."""
    lengths = []

    def noted(tokens, **kwargs):
        lengths.append(len(tokens))
        return type(case.tokenizer).decode(case.tokenizer, tokens, **kwargs)

    monkeypatch.setattr(case.tokenizer, "decode", noted)
    tokens = case.tokens[:25]
    for sequence in [*([token] * 200 for token in tokens), tokens * 20]:
        stream = TextStream(case.tokenizer, ("never there",))
        for token in sequence:
            stream.push(token)
    assert max(lengths) <= 64


@pytest.mark.parametrize(
    ("name", "pieces", "stop", "text"),
    [
        ("byte level", ["að"], "a", ""),
        ("byte level", ["a", "ï¿½", "a"], "\ufffd", "a"),
        ("byte level", ["Ã", "©", "ÿ", "Ã"], None, "é\ufffd\ufffd"),
        ("byte fallback", ["b", "\ufffd", "a"], "b\ufffd", ""),
        ("byte fallback", ["b", "<0xC3>", "<0xA9>", "<0xFF>"], None, "b" + 3 * "\ufffd"),
    ],
)
def test_texts_that_end_in_half_a_character(name, pieces, stop, text):
    tokenizer = CASES[name].tokenizer
    tokens = [tokenizer.get_vocab()[piece] for piece in pieces]
    stop = () if stop is None else (stop,)
    stream = TextStream(tokenizer, stop)
    assert [stream.push(token) for token in tokens][-1] == bool(stop)
    assert final_text(tokenizer, tokens, stop) == text


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_the_last_text_of_a_stream_is_that_of_its_tokens(name):
    """An engine generates random tokens, which seldom form valid UTF-8."""
    case = CASES[name]
    size = len(case.tokenizer)
    model = TINY.replace(vocab_size=size, eos_token_ids=(case.tokenizer.eos_token_id,))
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128)
    engine = Engine(model, config, SimulatedExecutor(vocab_size=size), case.tokenizer)
    reasons = set()
    for seed in range(20):
        stop = tuple(STOPS[seed % 13 : seed % 13 + 2])
        how = SamplingParams(max_tokens=40, seed=seed, stop=stop, ignore_eos=seed % 2 == 0)
        *_, last = engine.stream([5], how)
        reasons.add(last.finish_reason)
        text = decode(case.tokenizer, last.tokens)
        at = [i for s in stop if (i := text.find(s)) >= 0]
        assert last.text == text[: min(at, default=None)]
        assert bool(at) == (last.finish_reason == "stop") or "\ufffd" in "".join(stop)
    assert "stop" in reasons and len(reasons) > 1


# Stop strings and stop tokens through an engine

TOKENIZER = CASES["bundled"].tokenizer


def bundled_text() -> Engine:
    """A simulated engine with the bundled tokenizer, which generates no special token."""
    model = TINY.replace(vocab_size=len(TOKENIZER), eos_token_ids=())
    limits = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128)
    executor = SimulatedExecutor(vocab_size=len(TOKENIZER), first_token=4)
    return Engine(model, limits, executor, TOKENIZER)


def test_a_stop_string_ends_its_request_and_no_other():
    """The stop string changes no token before it, and the text ends before it."""
    plain = SamplingParams(max_tokens=60, seed=1)
    free = bundled_text().generate(["abc"], plain)[0]
    stop = free.text[20:23]
    both = bundled_text().generate(["abc", "abc"], [replace(plain, stop=(stop,)), plain])
    assert both[0].finish_reason == "stop"
    assert both[0].text == free.text[: free.text.index(stop)]
    assert both[0].tokens == free.tokens[: len(both[0].tokens)]
    assert both[1] == replace(free, request_id=both[1].request_id)


def test_a_stop_token_is_in_the_tokens_but_not_in_the_text():
    engine = bundled_text()
    free = engine.generate(["abc"], SamplingParams(max_tokens=60, seed=1))[0]
    token = free.tokens[10]
    how = SamplingParams(max_tokens=60, seed=1, stop_token_ids=(token,), stop=("never there",))
    at = free.tokens.index(token)
    for output in (engine.generate(["abc"], how)[0], list(engine.stream("abc", how))[-1]):
        assert output.finish_reason == "stop"
        assert output.tokens == free.tokens[: at + 1]
        assert output.text == decode(TOKENIZER, free.tokens[:at])


def test_a_special_token_as_stop_string_is_refused():
    with pytest.raises(ValueError, match="is a special token"):
        bundled_text().add_request("abc", SamplingParams(stop=(TOKENIZER.eos_token,)))
