"""The outputs of requests: tokens, text and log-probabilities."""

import math

import numpy as np

from models.sampling import Logprobs
from paged.requests.sequence import (
    RequestOutput,
    Sequence,
    SequenceGroup,
    SequenceOutput,
    Status,
    TokenLogprob,
)
from paged.requests.stopping import decode, final_text
from paged.scheduling.scheduled_step import ScheduledStep
from paged.scheduling.slots import Slots


def request_output(group: SequenceGroup, tokenizer) -> RequestOutput:
    """The current output of a request.

    A running sequence with a text stream has the stream's text so far. Other text is decoded anew;
    without a tokenizer it is empty.
    """
    how = group.sampling
    prompt = group.sequences[0].tokens[: group.num_prompt_tokens]
    if group.search is not None:
        outputs = _hypotheses(group, tokenizer)
    else:
        outputs = [_sequence_output(s, tokenizer) for s in group.sequences]
        if how.ranks and group.finished:
            # Failed sequences come last, because their scores sum fewer log-probabilities.
            outputs.sort(key=lambda out: (out.finish_reason == "error", -(out.score or 0.0)))
    return RequestOutput(
        request_id=group.request_id,
        prompt_tokens=prompt.tolist(),
        sequences=outputs[: how.n] if group.finished else outputs,
        finished=group.finished,
        prompt_logprobs=None if how.prompt_logprobs is None else list(group.prompt_logprobs),
        cached_tokens=min(group.num_cached_tokens, group.num_prompt_tokens),
    )


def _sequence_output(sequence: Sequence, tokenizer) -> SequenceOutput:
    how, reason, stream = sequence.group.sampling, sequence.finish_reason, sequence.text_stream
    output, text = sequence.tokens[sequence.num_prompt_tokens :], ""
    if stream and sequence.status is not Status.FINISHED:
        text = stream.text
    elif tokenizer is not None:
        stopped = reason == "stop" and output[-1] in how.stop_token_ids
        text = final_text(tokenizer, output[:-1] if stopped else output, how.stop)
    return SequenceOutput(
        tokens=output.tolist(),
        text=text,
        finish_reason=reason,
        logprobs=None if how.logprobs is None else list(sequence.logprobs),
        score=sequence.cumulative_logprob if how.ranks else None,
    )


def _hypotheses(group: SequenceGroup, tokenizer) -> list[SequenceOutput]:
    """The best hypotheses of a beam search, with live beams if the search was ended early."""
    assert group.search is not None
    cut_short = group.sequences[0].finish_reason in ("abort", "error")
    live = [s.tokens[group.num_prompt_tokens :] for s in group.sequences]
    outputs = []
    for hypothesis in group.search.best(group.sampling.n, live):
        text = decode(tokenizer, hypothesis.tokens) if tokenizer is not None else ""
        reason = group.sequences[0].finish_reason if cut_short else hypothesis.finish_reason
        tokens = hypothesis.tokens.tolist()
        outputs.append(SequenceOutput(tokens, text, reason, score=hypothesis.score))
    return outputs


def _token_logprob(token: int, all_: Logprobs, at, alternatives: int) -> TokenLogprob:
    best = all_.top_tokens[at][:alternatives].tolist(), all_.top[at][:alternatives].tolist()
    return TokenLogprob(token, float(all_.chosen[at]), dict(zip(*best)))


def record_logprobs(
    sequences: list[Sequence], tokens: np.ndarray, logprobs: Logprobs, at: list[tuple[int, int]]
) -> None:
    """Record the log-probabilities of sampled tokens, except NaN.

    at: (iteration, row) of each sequence's token in the arrays of `logprobs`.

    A simulated device computes only the log-probabilities of beams' candidates. In its steps with
    beams, sampled tokens have NaN. Its other steps have no `logprobs`.
    """
    for sequence, token, where in zip(sequences, tokens.tolist(), at, strict=True):
        if math.isnan(logprobs.chosen[where]):
            continue
        count = sequence.group.sampling.logprobs
        if sequence.group.sampling.ranks:
            sequence.cumulative_logprob += float(logprobs.chosen[where])
        if count is not None:
            sequence.logprobs.append(_token_logprob(token, logprobs, where, count))


def record_prompt_logprobs(step: ScheduledStep, slots: Slots, logprobs: Logprobs | None) -> None:
    """Record log-probabilities of prompt tokens; each comes from the logits of the token before.

    If the device computes none, NaN is recorded. None instead would keep a preempted prompt from
    using the prefix cache, and caching must not depend on the device.
    """
    at = 0
    for row in range(step.num_prefills):
        slot, start, count = int(step.slots[row]), int(step.starts[row]), int(step.counts[row])
        owner = slots.owner[slot] if slots.generation[slot] == step.generations[row] else None
        if owner and slots.prompt_logprobs[slot]:
            group, alternatives = owner.group, owner.group.sampling.prompt_logprobs
            for i in range(start, min(start + count, group.num_prompt_tokens - 1)):
                token = int(slots.tokens[slot, i + 1])
                group.prompt_logprobs[i + 1] = (
                    TokenLogprob(token, math.nan, {})
                    if logprobs is None
                    else _token_logprob(token, logprobs, at + i - start, alternatives or 0)
                )
        at += count
