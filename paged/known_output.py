"""Known output: a request continues output that another engine has generated (Punica §5.3).

Known output counts as output, not as prompt: for penalties, limits, stop strings and
log-probabilities. Its keys and values are recomputed, as after a preemption.
"""

import math
from collections.abc import Sequence

import numpy as np

from models.config import ModelConfig
from paged.checks import is_real, refusal
from paged.config import EngineConfig
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup, SequenceOutput, Status, TokenLogprob
from paged.requests.stopping import TextStream
from paged.validation import check_sequence, token_ids, token_limit

GOES_ON = (None, "abort")  # finish reasons of sequences that continue
ENDED = ("eos", "length", "stop", "error")


def check_known(
    known: Sequence[SequenceOutput],
    prompt: np.ndarray,
    sampling: SamplingParams,
    tokenizer,
    model: ModelConfig,
    config: EngineConfig,
) -> None:
    """Raise ValueError unless a request with this prompt can continue `known`.

    known: one output for each sequence of the request, in the order of streamed outputs. A final
        output may rank the sequences differently. Sequences with finish_reason None or 'abort'
        continue.
    """
    check_sequence("known", "SequenceOutput", known)
    if not all(isinstance(output, SequenceOutput) for output in known):
        raise ValueError("known output must be of SequenceOutput, one for each sequence")
    if sampling.is_beam_search:
        raise ValueError("a beam search cannot go on from known output: it must begin again")
    if len(known) != sampling.num_sequences:
        raise ValueError(
            f"known output has {len(known)} sequences, and the request has {sampling.num_sequences}"
        )
    if sampling.temperature > 0 and sampling.seed is None:
        raise ValueError("known output that was sampled can go on only with its seed")
    for output in known:
        if output.finish_reason not in GOES_ON + ENDED:
            raise ValueError(f"known output has the unknown finish_reason {output.finish_reason!r}")
    if all(output.finish_reason in ENDED for output in known):
        raise ValueError("all sequences of the known output have ended: nothing is left to do")
    limit = token_limit(prompt, sampling, config)
    for output in known:
        _check_one(output, limit - len(prompt), sampling, tokenizer, model)


def _check_one(
    output: SequenceOutput, most: int, sampling: SamplingParams, tokenizer, model: ModelConfig
) -> None:
    tokens = token_ids("known output", output.tokens, model.vocab_size)
    if output.score is not None and not is_real(output.score):
        raise refusal("score of known output", "a finite number or None", output.score)
    if sampling.ranks and len(tokens) and output.score is None:
        raise ValueError("known output of sequences that are ranked needs their score")
    if output.finish_reason in ("eos", "stop") and not len(tokens):
        raise ValueError(f"known output ended with {output.finish_reason!r} and has no token")
    if output.logprobs and len(output.logprobs) != len(tokens):
        raise ValueError(
            f"known output has {len(tokens)} tokens and {len(output.logprobs)} log-probabilities"
        )
    goes_on = output.finish_reason in GOES_ON
    if len(tokens) > most - goes_on:
        raise ValueError(
            f"known output of {len(tokens)} tokens: the request may have {most}"
            + ", and one is to be generated" * goes_on
        )
    if goes_on and len(tokens) and _has_ended(tokens, sampling, tokenizer, model):
        raise ValueError("known output has come to its end, but its finish_reason does not say so")


def _has_ended(tokens: np.ndarray, sampling: SamplingParams, tokenizer, model: ModelConfig) -> bool:
    ends = set(sampling.stop_token_ids)
    ends |= set() if sampling.ignore_eos else set(model.eos_token_ids)
    if not ends.isdisjoint(tokens.tolist()):
        return True
    text = TextStream(tokenizer, sampling.stop) if sampling.stop else None
    return text is not None and any([text.push(token) for token in tokens.tolist()])


def go_on(group: SequenceGroup, known: Sequence[SequenceOutput]) -> None:
    """Append checked known output to a new group's sequences. Requested log-probabilities that the
    known output lacks are NaN."""
    for sequence, output in zip(group.sequences, known, strict=True):
        tokens = np.array(output.tokens, np.int32)
        sequence.tokens = np.concatenate([sequence.tokens, tokens])
        sequence.cumulative_logprob = output.score or 0.0
        if group.sampling.logprobs is not None:
            unknown = [TokenLogprob(token, math.nan, {}) for token in tokens.tolist()]
            sequence.logprobs = list(output.logprobs or unknown)
        if sequence.text_stream is not None:
            for token in tokens.tolist():
                sequence.text_stream.push(token)
        if output.finish_reason in ENDED:
            sequence.status, sequence.finish_reason = Status.FINISHED, output.finish_reason
