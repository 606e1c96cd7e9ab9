"""Differences between runs of the same requests, and whether they are near ties.

Programs of different shapes sum a logit in different orders. If two tokens' logits differ by less
than the rounding error of such sums, either token is right, and the following tokens may differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput

NEAR_TIE = 1e-4  # largest lead of a logit or beam that another summation order can reverse


def nearly_tied(
    engine: Engine, prompt: list[int], tokens: list[int], how: SamplingParams, place: int = 0,
    adapter: str | None = None, lead: float = NEAR_TIE,
) -> bool:  # fmt: skip
    """Whether sequence `place` of the request, served alone, begins with `tokens` if the logit of
    the last of these tokens is raised by `lead`."""
    bias = dict(how.logit_bias)
    bias[tokens[-1]] = bias.get(tokens[-1], 0.0) + lead
    output = engine.generate([prompt], replace(how, logit_bias=bias), [adapter])[0]
    return output.sequences[place].tokens[: len(tokens)] == tokens


def num_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)


@dataclass(frozen=True)
class Difference:
    """Two greedy outputs of a request whose tokens differ from index `at` on."""

    ours: RequestOutput
    theirs: RequestOutput
    at: int
    near_tie: bool

    def __str__(self) -> str:
        name, ours, theirs = self.ours.request_id, self.ours.tokens, self.theirs.tokens
        if self.at == min(len(ours), len(theirs)):
            return f"{name} gave {len(ours)} tokens, then {len(theirs)}"
        return f"{name} gave token {ours[self.at]} at {self.at}, then {theirs[self.at]}"


def differences(
    engine: Engine, ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]
) -> list[Difference]:
    """The differences between greedy outputs of the same requests in two runs.

    engine: an idle engine. It computes whether a difference is a near tie, in which either token
        is right.
    """
    found = []
    how = SamplingParams(max_tokens=1, ignore_eos=True)
    for a, b in zip(ours, theirs, strict=True):
        if a.tokens == b.tokens:
            continue
        at = num_common(a.tokens, b.tokens)
        prompt, pair = a.prompt_tokens + a.tokens[:at], (a.tokens[at:], b.tokens[at:])
        near_tie = all(
            tokens != [] and nearly_tied(engine, prompt, tokens[:1], how) for tokens in pair
        )
        found.append(Difference(a, b, at, near_tie))
    return found
