"""What streams tell while tokens come, and the texts of single tokens."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.config import EngineConfig
from paged.requests.stopping import decode, final_text
from paged.requests.text_deltas import TextDeltas
from paged.server.engine_client import EngineClient
from paged.server.responses import TokenTexts
from tests.paged.requests.test_text_streams import CASES, STOPS, Case, each_tokenizer, sequences
from tests.paged.server.serving import served, simulated


@each_tokenizer
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_was_told_is_how_the_final_text_begins(case: Case, data):
    """However tokens are cut into pieces, and whatever a later token or stop string changes."""
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
    engine, executor = simulated(config, case.tokenizer)
    spelt = np.array([token for token in case.tokens if token not in case.special], np.int32)
    tokens = np.resize(spelt, 100)
    made_up = lambda seed, position: tokens[(position - 10) % 100]  # noqa: E731
    executor._made_up = made_up  # type: ignore[method-assign]
    with served(EngineClient(engine), config, tokenizer=case.tokenizer) as server:
        how: dict[str, Any] = {"model": "bundled", "prompt": [4] * 10, "max_tokens": 100}
        how["extra_body"] = {"ignore_eos": True}
        whole = server.client.completions.create(**how).choices[0].text
        assert whole == decode(case.tokenizer, tokens)
        chunks = [
            chunk.choices[0].text for chunk in server.client.completions.create(**how, stream=True)
        ]
        assert "".join(chunks) == whole and len(chunks) > 20
