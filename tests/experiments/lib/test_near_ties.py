"""Near ties are distinguished from other differences, on a model with a near tie."""

from dataclasses import replace

import jax
import pytest

from experiments.lib.near_ties import Difference, differences
from models import llama
from models import params as parameters
from models.params import stack
from paged.device.executor import DeviceExecutor
from paged.engine import Engine, EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput
from tests.paged.tiny import TINY

CONFIG = EngineConfig(
    max_num_seqs=1, max_num_batched_tokens=32, max_prefills_per_step=1, max_model_len=32,
    kv_cache_tokens=64,
)  # fmt: skip
HOW = SamplingParams(max_tokens=6, ignore_eos=True)
AT = 2  # index of the tied token in the output


def with_token(output: RequestOutput, at: int, token: int) -> RequestOutput:
    (sequence,) = output.sequences
    tokens = [*sequence.tokens[:at], token, *sequence.tokens[at + 1 :]]
    return replace(output, sequences=[replace(sequence, tokens=tokens)])


@pytest.fixture(scope="module")
def tied() -> tuple[Engine, RequestOutput, int]:
    """An engine, its output, and a token whose logit always equals that of the output at AT."""
    params = parameters.init(llama.declare(TINY), jax.random.key(1))
    # Larger embeddings give varied continuations instead of one token forever.
    params["embed"] = params["embed"] * 50
    engine = Engine.from_model(params, TINY, CONFIG)
    output = engine.generate([[7, 23, 5]], HOW)[0]
    token = output.tokens[AT]
    twin = next(t for t in range(3, TINY.vocab_size) if t not in [*output.tokens, 7, 23, 5])
    for name in ("embed", "lm_head"):
        params[name] = params[name].at[twin].set(params[name][token])
    assert isinstance(engine.executor, DeviceExecutor)
    engine.executor.params = stack(params)  # compiled programs take the parameters as an argument
    output = engine.generate([[7, 23, 5]], HOW)[0]
    assert output.tokens[AT] in (token, twin)
    return engine, output, token + twin - output.tokens[AT]


def test_equal_outputs_have_no_difference(tied):
    engine, output, _ = tied
    assert differences(engine, [output], [output]) == []


def test_either_of_two_tied_tokens_is_a_near_tie(tied):
    engine, output, twin = tied
    other = with_token(output, AT, twin)
    assert differences(engine, [output], [other]) == [Difference(output, other, AT, near_tie=True)]
    assert differences(engine, [other], [output]) == [Difference(other, output, AT, near_tie=True)]


def test_another_token_is_no_near_tie_and_is_told(tied):
    engine, output, twin = tied
    token = next(t for t in range(3, TINY.vocab_size) if t not in (output.tokens[AT], twin))
    other = with_token(output, AT, token)
    (found,) = differences(engine, [output], [other])
    assert not found.near_tie
    name, tokens = output.request_id, output.tokens
    assert str(found) == f"{name} gave token {tokens[AT]} at {AT}, then {token}"
    assert not differences(engine, [other], [output])[0].near_tie


def test_an_output_that_is_shorter_is_no_near_tie(tied):
    engine, output, _ = tied
    (sequence,) = output.sequences
    shorter = replace(output, sequences=[replace(sequence, tokens=sequence.tokens[:AT])])
    (found,) = differences(engine, [output], [shorter])
    assert (found.at, found.near_tie) == (AT, False)
    assert str(found) == f"{output.request_id} gave 6 tokens, then 2"
