"""Comparison of an output with the output of its request served alone, up to near ties."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.lib.near_ties import NEAR_TIE, nearly_tied, num_common
from experiments.soak.checks import Asked
from paged.engine import Engine
from paged.requests.beam_search import BeamSearch
from paged.requests.sequence import RequestOutput, SequenceOutput, TokenLogprob
from paged.validation import token_limit

LOGPROB_TOLERANCE = 1e-3


def compare(
    output: RequestOutput, asked: Asked, reference: Engine, tolerance: float = LOGPROB_TOLERANCE
) -> tuple[str | None, int]:
    """(difference from the request served alone, or None; number of near ties).

    reference: the engine that serves the request alone.
    tolerance: largest difference of log-probabilities. Two choices are a near tie if the lead of
        the first is below a bound that is proportional to the tolerance.

    An aborted sequence must be a prefix of the sequence served alone. `asked` must not be an
    aborted beam search.
    """
    compared = _compare_beams if asked.how.is_beam_search else _compare_samples
    return compared(output, asked, reference, tolerance)


def _near_tie(tolerance: float) -> float:
    return NEAR_TIE * tolerance / LOGPROB_TOLERANCE


def _compare_samples(output: RequestOutput, asked: Asked, reference: Engine, tolerance: float):
    how = asked.how
    if how.ranks:
        # All samples, in order of sampling, with the log-probabilities that rank them.
        how = replace(how, n=how.num_sequences, logprobs=how.logprobs or 0)
    alone = reference.generate([asked.prompt], how, [asked.adapter])[0]
    if not _close(output.prompt_logprobs, alone.prompt_logprobs, tolerance):
        return f"prompt's {output.prompt_logprobs}, not {alone.prompt_logprobs}", 0
    near_ties, left = 0, dict(enumerate(alone.sequences))
    # An aborted sequence may be a prefix of several samples, so longer sequences are matched first.
    for place, ours in sorted(enumerate(output.sequences), key=lambda item: -len(item[1].tokens)):
        i = (
            max(left, key=lambda i: num_common(ours.tokens, left[i].tokens))
            if asked.how.ranks
            else place
        )
        theirs = left.pop(i)
        if _is_same(ours, theirs, tolerance):
            continue
        beginning = ours.tokens[: num_common(ours.tokens, theirs.tokens) + 1]
        differs = beginning != theirs.tokens[: len(beginning)]
        tied = functools.partial(nearly_tied, reference, asked.prompt, beginning)
        if not differs or not tied(how, i, asked.adapter, _near_tie(tolerance)):
            return _otherwise(output, alone), 0
        near_ties += 1
    # Samples that were not returned must not be better than the returned ones.
    if asked.how.ranks and not asked.aborted and not near_ties:
        worst = output.sequences[-1].score or 0.0
        best = max(_sum_of_logprobs(s) - tolerance * max(1, len(s.tokens)) for s in left.values())
        if best > worst:
            return f"{_otherwise(output, alone)}: the best {len(output.sequences)} are others", 0
    return None, near_ties


def _is_same(ours: SequenceOutput, theirs: SequenceOutput, tolerance: float) -> bool:
    """Whether the sequences are equal, or `ours` was cut short and is a prefix of `theirs`."""
    n, aborted = len(ours.tokens), ours.finish_reason in ("abort", "error")
    if ours.tokens != theirs.tokens[:n] or not (aborted or n == len(theirs.tokens)):
        return False
    if not aborted and (ours.text, ours.finish_reason) != (theirs.text, theirs.finish_reason):
        return False
    apart = 0.0 if ours.score is None else abs(ours.score - _sum_of_logprobs(theirs, n))
    if apart > tolerance * max(1, n):
        return False
    return _close(ours.logprobs, (theirs.logprobs or [])[:n], tolerance)


def _close(
    ours: Sequence[TokenLogprob | None] | None, theirs: Sequence[TokenLogprob | None] | None,
    tolerance: float,
) -> bool:  # fmt: skip
    return all(apart < tolerance for apart in _apart(ours, theirs))


def _apart(
    ours: Sequence[TokenLogprob | None] | None, theirs: Sequence[TokenLogprob | None] | None
) -> list[float]:
    """Absolute differences of log-probabilities, by position."""
    return [abs(a.logprob - b.logprob) for a, b in zip(ours or (), theirs or ()) if a and b]


def _sum_of_logprobs(sequence: SequenceOutput, n: int | None = None) -> float:
    assert sequence.logprobs is not None
    return sum(p.logprob for p in sequence.logprobs[:n])


def _otherwise(output: RequestOutput, alone: RequestOutput) -> str:
    ours, theirs = (
        [(s.tokens, s.finish_reason, s.score) for s in o.sequences] for o in (output, alone)
    )
    if ours == theirs:
        pairs = zip(output.sequences, alone.sequences)
        apart = max((x for a, b in pairs for x in _apart(a.logprobs, b.logprobs)), default=0.0)
        return f"{ours}, and alone the same but for texts or log-probabilities ({apart:.3g} apart)"
    return f"{ours}, but alone {theirs}"


def _compare_beams(output: RequestOutput, asked: Asked, reference: Engine, tolerance: float):
    assert not asked.aborted, "the reference cannot repeat an aborted search"
    first = len(reference.events)
    alone = reference.generate([asked.prompt], asked.how, [asked.adapter])[0]
    ours, theirs = (
        [(s.tokens, s.text, s.finish_reason) for s in o.sequences] for o in (output, alone)
    )
    gaps = [abs((a.score or 0) - (b.score or 0)) for a, b in zip(output.sequences, alone.sequences)]
    if not _close(output.prompt_logprobs, alone.prompt_logprobs, tolerance):
        return f"prompt's {output.prompt_logprobs}, not {alone.prompt_logprobs}", 0
    # A score is a sum of log-probabilities divided by length ** length_penalty. A tolerance above
    # the default is scaled by the same factor.
    powers = [max(1, len(a.tokens)) ** -asked.how.length_penalty for a in output.sequences]
    more = (tolerance - LOGPROB_TOLERANCE) * max(1.0, *powers)
    if ours == theirs and max(gaps) < LOGPROB_TOLERANCE + more:
        return None, 0
    steps = [e for e in reference.events[first:] if e["event"] == "beams"]
    if ours != theirs and smallest_lead(steps, asked, reference) < _near_tie(tolerance):
        return None, 1
    return _otherwise(output, alone), 0


def smallest_lead(steps: Sequence[dict], asked: Asked, engine: Engine) -> float:
    """The smallest margin of a beam search's decisions: a difference of natural log-probabilities
    or scores. Decisions are which beams continue, which beams end, and the order of the outputs.

    steps: the search's events 'beams', in order.
    """
    how, width = asked.how, asked.how.beam_width
    limit = token_limit(np.array(asked.prompt), how, engine.config) - len(asked.prompt)
    eos = () if how.ignore_eos else engine.model.eos_token_ids
    search = BeamSearch(width, limit, how.length_penalty, how.early_stopping, eos)
    leads: list[float] = []
    for length, step in enumerate(steps):
        tokens, logprobs = step["candidates"], step["candidate_logprobs"]
        scores = (np.array(search.scores)[:, None] + logprobs).ravel()
        order = np.argsort(-scores)
        scores, ends = scores[order], np.isin(tokens.ravel()[order], eos)
        living = scores[~ends]
        leads += (living[width - 1 : width] - living[width : width + 1]).tolist()
        leads += (scores[width - 1 : width] - scores[width : width + 1]).tolist()
        search.advance([np.zeros(length, np.int32)] * len(tokens), tokens, logprobs)
    leads += (-np.diff([hypothesis.score for hypothesis in search.best(width)])).tolist()
    return min(leads)
