"""Stop strings and text, with a byte-level tokenizer in which anything can straddle tokens."""

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


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token; 'ab' and 'b;' are, too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ab", "b;"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", ";")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


BYTES = _bytes_tokenizer()


def _push_all(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    stream, tokens = TextStream(BYTES, stop), BYTES.encode(text)
    for i, token in enumerate(tokens):
        if stream.push(token):
            return final_text(BYTES, tokens[: i + 1], stop), True
    return stream.text, False


@settings(deadline=None)
@given(st.text(st.sampled_from("ab; \n.'é€😀"), max_size=30))
def test_streamed_text_is_the_decoded_text(text):
    assert _push_all(text, ()) == (text, False)
    assert decode(BYTES, BYTES.encode(text)) == text


@settings(deadline=None)
@given(
    st.text(st.sampled_from("ab;é"), max_size=30),
    st.lists(st.text(st.sampled_from("ab;é"), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_is_cut_before_the_first_stop_string(text, stop):
    """First: complete first as tokens come; of those complete at once, the furthest left."""
    cut, stopped = _push_all(text, tuple(stop))
    assert stopped == any(s in text for s in stop)
    if stopped:
        assert text.startswith(cut)
        assert any(text.startswith(s, len(cut)) for s in stop)
        assert not any(s in cut for s in stop)
    else:
        assert cut == text


def test_tokens_that_decode_to_nothing_whole_do_not_disturb_the_others():
    """Lone continuation bytes, as a sampling model may produce them."""
    stream = TextStream(BYTES, ("z",))
    tokens = BYTES.encode("é")[1:] * 3 + BYTES.encode("a😀")[:-1] + BYTES.encode("bz")
    assert [stream.push(token) for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert final_text(BYTES, tokens, ("z",)) == "\ufffd\ufffd\ufffda\ufffdb"


def test_a_stop_string_ends_its_request_and_no_other():
    """The same tokens with and without: the text is cut before the stop string."""
    tokenizer = load_tokenizer(BUNDLED)
    model = TINY.replace(vocab_size=len(tokenizer), eos_token_ids=())
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128)

    def engine() -> Engine:
        executor = SimulatedExecutor(vocab_size=len(tokenizer), first_token=4)
        return Engine(model, config, executor, tokenizer)

    free = engine().generate(["abc"], SamplingParams(max_tokens=60, seed=1))[0]
    stop = free.text[20:23]
    both = engine().generate(
        ["abc", "abc"],
        [
            SamplingParams(max_tokens=60, seed=1, stop=(stop,)),
            SamplingParams(max_tokens=60, seed=1),
        ],
    )
    assert both[0].finish_reason == "stop"
    assert both[0].text == free.text[: free.text.index(stop)]
    assert both[0].tokens == free.tokens[: len(both[0].tokens)]
    assert both[1] == free.__class__(**{**free.__dict__, "request_id": both[1].request_id})


def test_a_stop_token_is_in_the_tokens_but_not_in_the_text():
    tokenizer = load_tokenizer(BUNDLED)
    model = TINY.replace(vocab_size=len(tokenizer), eos_token_ids=())
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128)
    executor = SimulatedExecutor(vocab_size=len(tokenizer), first_token=4)
    engine = Engine(model, config, executor, tokenizer)
    free = engine.generate(["abc"], SamplingParams(max_tokens=60, seed=1))[0]
    token = free.tokens[10]
    how = SamplingParams(max_tokens=60, seed=1, stop_token_ids=(token,), stop=("never there",))
    at = free.tokens.index(token)
    for output in (engine.generate(["abc"], how)[0], list(engine.stream("abc", how))[-1]):
        assert output.finish_reason == "stop"
        assert output.tokens == free.tokens[: at + 1]
        assert output.text == decode(tokenizer, free.tokens[:at])


def test_a_special_token_as_stop_string_is_refused():
    tokenizer = load_tokenizer(BUNDLED)
    executor = SimulatedExecutor(vocab_size=len(tokenizer))
    engine = Engine(TINY.replace(vocab_size=len(tokenizer)), EngineConfig(max_model_len=99),
                    executor, tokenizer)  # fmt: skip
    with pytest.raises(ValueError, match="is a special token"):
        engine.add_request("abc", SamplingParams(stop=(tokenizer.eos_token,)))
