"""Streamed text, log-probabilities of tokens that are no whole characters, and offsets of tokens in
the text."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.config import EngineConfig
from paged.requests.sequence import TokenLogprob
from paged.requests.stopping import decode, final_text
from paged.requests.text_deltas import TextDeltas
from paged.requests.token_texts import TokenTexts
from paged.server.generation import Delta
from paged.server.responses import ChatFormat, CompletionFormat
from tests.paged.requests.test_text_streams import CASES, STOPS, Case, each_tokenizer, sequences
from tests.paged.server.serving import joined, scripted, served, simulated

BYTE_LEVEL = CASES["byte level"]


def ids_of(case, pieces: list[str]) -> list[int]:
    return [case.tokenizer.convert_tokens_to_ids(piece) for piece in pieces]


def told(case, tokens: list[int], logprobs: list[TokenLogprob]) -> dict[str, Any]:
    format = CompletionFormat(TokenTexts(case.tokenizer), "cmpl-0", "bundled")
    text, offsets = decode(case.tokenizer, tokens), TextDeltas(case.tokenizer).push(tokens)
    return format.choice(Delta(0, text, tokens, logprobs, "length", offsets, True))["logprobs"]


@each_tokenizer
def test_no_token_hides_another(case):
    """Tokens with equal texts have one entry each; the best entry belongs to the best token."""
    best, *others = dict.fromkeys(case.tokens)
    top = {token: -1.0 - i for i, token in enumerate([best, *others])}
    for chosen in (best, others[-1]):
        choice = told(case, [chosen], [TokenLogprob(chosen, top[chosen], top)])
        (named,) = choice["top_logprobs"]
        assert list(named.values()) == list(top.values())
        assert named[choice["tokens"][0]] == top[chosen]
        assert (max(named, key=named.__getitem__) == choice["tokens"][0]) == (chosen == best)


def test_bytes_are_written_as_openai_does():
    first, second = ids_of(BYTE_LEVEL, ["Ã", "að"])
    top = {first: -0.5, second: -1.0}
    choice = told(BYTE_LEVEL, [first], [TokenLogprob(first, -0.5, top)])
    assert choice["tokens"] == [r"bytes:\xc3"]
    assert choice["top_logprobs"] == [{r"bytes:\xc3": -0.5, r"bytes:a\xf0": -1.0}]
    chat = ChatFormat(TokenTexts(BYTE_LEVEL.tokenizer), "chatcmpl-0", "bundled")
    one = chat.token(TokenLogprob(first, -0.5, top))
    assert (one["token"], one["bytes"]) == (r"\xc3", [0xC3])
    assert one["top_logprobs"][1] == {"token": r"a\xf0", "bytes": [97, 0xF0], "logprob": -1.0}


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_offsets_count_characters(data):
    """All tokens of a character have the character's offset."""
    texts = TokenTexts(BYTE_LEVEL.tokenizer)
    by_bytes = {texts.bytes(token): token for token in BYTE_LEVEL.tokens}
    characters = [
        [b"a"], [b" b"], [b"\xc3", b"\xa9"], [b"a\xf0", b"\x9f\x98\x80"],
        [b"a\xf0", b"\x9f", b"\x98", b"\x80\xf0", b"\x9f\x98\x80"], ["é😀".encode()],
    ]  # fmt: skip
    drawn = data.draw(st.lists(st.sampled_from(characters), max_size=12))
    spelt = list(itertools.chain(*drawn))
    tokens = [by_bytes[piece] for piece in spelt]
    offsets = told(BYTE_LEVEL, tokens, [TokenLogprob(t, -1.0, {}) for t in tokens])["text_offset"]
    before = [b"".join(spelt[:i]).decode(errors="ignore") for i in range(len(spelt))]
    assert offsets == [len(text) for text in before]


def test_a_space_that_the_text_loses_is_not_counted():
    case = CASES["byte fallback"]
    tokens = ids_of(case, ["▁a", "▁a", "b"])
    assert decode(case.tokenizer, tokens) == "a ab"
    logprobs = [TokenLogprob(token, -1.0, {}) for token in tokens]
    assert told(case, tokens, logprobs)["text_offset"] == [0, 1, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_an_answer(stream: bool):
    """Offsets count from the start of the choice's text, which has the prompt if it is echoed."""
    ids = ids_of(BYTE_LEVEL, ["a", "Ã", "©", "Ġb", "Ã", "©", "a"])
    engine = scripted(ids, 5, tokenizer=BYTE_LEVEL.tokenizer)
    with served(engine, tokenizer=BYTE_LEVEL.tokenizer) as server:
        how = {"model": "bundled", "prompt": ids[:5], "max_tokens": 7, "logprobs": 0}
        if not stream:
            how |= {"echo": True}
        answer = server.client.completions.create(**how, stream=stream)
        choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    offsets = [at for choice in choices for at in choice.logprobs.text_offset]
    if stream:
        assert text == "aé béa" and offsets == [0, 1, 1, 2, 4, 4, 5]
    else:  # the prompt ends within a character
        assert text == "aé b\ufffdaé béa"
        assert offsets == [0, 1, 1, 2, 4, 5, 6, 6, 7, 9, 9, 10]


@pytest.mark.parametrize("special", [True, False])
def test_offsets_in_a_prompt_that_is_a_text(special: bool):
    """The prompt spells a special token, which outputs omit but an echo keeps."""
    with served(simulated()[0]) as server:
        choice = server.client.completions.create(
            model="bundled", prompt="The</s> old  sailor", max_tokens=3, logprobs=0, echo=True,
            extra_body={"add_special_tokens": special},
        ).choices[0]  # fmt: skip
    begun = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    if special:
        assert begun.pop(0) == ("<s>", 0)
    assert "".join(token for token, _ in begun) == choice.text
    assert all(choice.text.startswith(token, at) for token, at in begun)


@each_tokenizer
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_was_told_is_how_the_final_text_begins(case: Case, data):
    """The deltas are a prefix of the final text after each piece of tokens, whatever a later token
    or stop string changes."""
    tokens = data.draw(sequences(case))
    stop = tuple(data.draw(st.lists(st.sampled_from(STOPS), max_size=2)))
    text = final_text(case.tokenizer, tokens, stop)
    if stop and len(text) < len(decode(case.tokenizer, tokens)):
        # The engine ends a sequence with the token that completes a stop string.
        begun = (tokens[:n] for n in range(len(tokens) + 1))
        cut = (t for t in begun if final_text(case.tokenizer, t, stop) != decode(case.tokenizer, t))
        tokens = next(cut)
        text = final_text(case.tokenizer, tokens, stop)
    deltas, told, at = TextDeltas(case.tokenizer, stop), "", 0
    while at < len(tokens) - 1:  # the last token ends the sequence
        size = data.draw(st.integers(1, 4))
        deltas.push(tokens[at : min(at + size, len(tokens) - 1)])
        told += deltas.take()
        at += size
        assert text.startswith(told)
    assert told + deltas.rest(text) == text


def test_single_tokens_have_their_bytes():
    byte_level = TokenTexts(CASES["byte level"].tokenizer)
    convert: Any = CASES["byte level"].tokenizer.convert_tokens_to_ids
    assert byte_level.bytes(convert("Ġb")) == b" b"
    assert byte_level.bytes(convert("Ã")) == b"\xc3" and byte_level.text(convert("Ã")) == r"\xc3"
    fallback = TokenTexts(CASES["byte fallback"].tokenizer)
    convert = CASES["byte fallback"].tokenizer.convert_tokens_to_ids
    assert fallback.bytes(convert("<0xC3>")) == b"\xc3"
    assert fallback.bytes(convert("▁a")) == b" a"
    assert fallback.bytes(convert("</s>")) == b"</s>"


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_streams_keep_characters_of_several_tokens_whole(name):
    case = CASES[name]
    config = EngineConfig(max_num_seqs=4, max_model_len=256, kv_cache_tokens=1024)
    tokens = np.resize([token for token in case.tokens if token not in case.special], 100)
    engine = scripted(tokens.tolist(), 10, config, case.tokenizer)
    with served(engine, config, tokenizer=case.tokenizer) as server:
        how: dict[str, Any] = {"model": "bundled", "prompt": [4] * 10, "max_tokens": 100}
        how["extra_body"] = {"ignore_eos": True}
        whole = server.client.completions.create(**how).choices[0].text
        assert whole == decode(case.tokenizer, tokens)
        chunks = list(server.client.completions.create(**how, stream=True))
        assert joined(chunks) == [whole] and len(chunks) > 20
