"""Beam search: selection of live beams and of finished hypotheses (vLLM §4.4).

The rules equal transformers' `generate(num_beams=width)`. A step continues each live beam by one
more token, and ranks all continuations. An ended continuation becomes a finished hypothesis if it
is among the best `width`. The best `width` continuations without an end become the live beams.
Scores are added in float32 as in transformers, so that near ties have the same outcome.
transformers does not define the order of exact ties; here the better beam comes first, and within
a beam its better token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Hypothesis:
    """An output.

    tokens: [n] int32, including an end-of-sequence token.
    score: the sum of the tokens' natural log-probabilities, divided by n ** length_penalty.
    finish_reason: 'eos', 'length' or 'abort'.
    """

    tokens: np.ndarray
    score: float
    finish_reason: str


class BeamSearch:
    """The search for one prompt. It begins with one live beam, whose output is empty.

    width: the number of live beams, and of finished hypotheses that are kept.
    max_tokens: the most tokens of an output.
    length_penalty: values above 0 favour long outputs, values below 0 short ones.
    early_stopping: when the search ends, once `width` hypotheses are finished.
        True: at once.
        False: when the best live beam, if it ended now, would not beat the worst hypothesis.
        "never": when no live beam can still beat the worst hypothesis, even if its remaining
            tokens were certain and their number the best for length_penalty. Only "never" rules
            out that a live beam could still lead to a better output when the search ends.
    eos_token_ids: the tokens that end an output. Without any, all outputs grow to max_tokens.

    scores: the live beams' sums of natural log-probabilities, float32 values, best first. Empty
        when the search is over.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        length_penalty: float,
        early_stopping: bool | str,
        eos_token_ids: Sequence[int],
    ):
        self._width, self._max_tokens = width, max_tokens
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._eos = frozenset(eos_token_ids)
        self._finished: list[Hypothesis] = []  # The best comes first.
        self.scores: list[float] = [0.0]

    @property
    def num_candidates(self) -> int:
        """Number of each beam's best next tokens that `advance` needs."""
        return self._width + len(self._eos)

    def advance(
        self, outputs: Sequence[np.ndarray], top_tokens: np.ndarray, top: np.ndarray
    ) -> list[tuple[int, int]]:
        """The new live beams as (parent, token), best first; none when the search is over.

        outputs: the output tokens [n] of each live beam.
        top_tokens: [B, A] int32, the best next tokens of each live beam, best first.
        top: [B, A] float32, their natural log-probabilities; -inf for a token that cannot follow.

        A must be at least `num_candidates`, which is `width` plus the number of end-of-sequence
        tokens. A beam's best A next tokens then include its best `width` tokens, and its best
        `width` tokens other than end tokens. No other continuation can finish or live on.
        """
        B, A = top.shape
        assert 0 < B == len(self.scores) == len(outputs), "one row for each live beam"
        assert self.num_candidates <= A, "too few next tokens"
        length = len(outputs[0]) + 1
        scores = np.asarray(self.scores, np.float32)[:, None] + top.astype(np.float32)
        # Each beam has one continuation per end-of-sequence token, so at least `width` of the
        # candidates do not end.
        num_candidates = self._width * (1 + len(self._eos))
        best = np.argsort(-scores, axis=None, kind="stable")[:num_candidates]
        live: list[tuple[int, int]] = []
        live_scores: list[float] = []
        finished = self._finished.copy()
        for rank, (parent, column) in enumerate(divmod(i, A) for i in best.tolist()):
            token, score = int(top_tokens[parent, column]), float(scores[parent, column])
            if score == -np.inf:
                break
            if token in self._eos or length == self._max_tokens:
                if rank < self._width:
                    tokens = np.append(outputs[parent], token).astype(np.int32)
                    reason = "eos" if token in self._eos else "length"
                    finished.append(Hypothesis(tokens, self._normalised(score, length), reason))
            elif len(live) < self._width:
                live.append((parent, token))
                live_scores.append(score)
        self._finished = sorted(finished, key=lambda h: -h.score)[: self._width]
        if live and self._is_decided(live_scores[0], length):
            live, live_scores = [], []
        self.scores = live_scores
        return live

    def best(self, n: int, outputs: Sequence[np.ndarray] = ()) -> list[Hypothesis]:
        """The best n hypotheses, best first.

        outputs: the output tokens of each live beam, if the search is stopped early. The live beams
            follow the finished hypotheses.
        """
        live = [
            Hypothesis(np.asarray(tokens, np.int32), self._normalised(score, len(tokens)), "abort")
            for tokens, score in zip(outputs, self.scores)
        ]
        return [*self._finished, *live][:n]

    def _is_decided(self, best_live: float, length: int) -> bool:
        """Whether the search is over, given the best live beam's score and number of tokens."""
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self._normalised(best_live, length) <= self._finished[-1].score

    def _normalised(self, score: float, length: int) -> float:
        divisor = max(length, 1) ** self._length_penalty  # The score of an empty output is 0.
        return float(np.float32(score) / np.float32(divisor))
