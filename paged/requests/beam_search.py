"""Which beams live on and which are finished, from the best next tokens of each (vLLM §4.4).

The rules are those of transformers' `generate(num_beams=width)`: a step takes the best `width`
continuations of all beams; those among them that end are finished hypotheses, and the best `width`
continuations that do not end live on. Scores are added up in float32 as there, so that near ties
go the same way. Of exact ties, which transformers leaves open, the better beam's and then its
better token's comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Hypothesis:
    """An output. tokens: [n] int32, an end-of-sequence token included; score: the sum of its
    natural log-probabilities / n ** length_penalty; finish_reason: 'eos', 'length' or 'abort'."""

    tokens: np.ndarray
    score: float
    finish_reason: str


class BeamSearch:
    """The search of one prompt; it begins with one live beam, which has no output.

    width: beams that live, and hypotheses that are kept; max_tokens: tokens of an output at most.
    length_penalty: above 0 it favours long outputs, below 0 short ones. eos_token_ids: tokens that
    end an output (none: all grow to max_tokens).

    early_stopping: when to end, once `width` hypotheses are finished. True: at once. False: when
    the best live beam, were it to end now, would not be better than the worst of them. "never":
    when it would not be even if the rest of its tokens were certain, and as many as suit
    length_penalty best. (So all but "never" may miss the best outputs.)

    scores: of live beams, best first: sums of natural log-probabilities, float32 values. Empty when
    the search is over.
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
        self._finished: list[Hypothesis] = []  # best first
        self.scores: list[float] = [0.0]

    @property
    def num_candidates(self) -> int:
        """Next tokens of each beam that decide a step: see `advance`."""
        return self._width + len(self._eos)

    def advance(
        self, outputs: Sequence[np.ndarray], top_tokens: np.ndarray, top: np.ndarray
    ) -> list[tuple[int, int]]:
        """(parent, token) of the new live beams, best first; none when the search is over.

        outputs: each live beam's output tokens [n]. top_tokens: [B, A] int32, each live beam's best
        next tokens, best first, and top: float32, their natural log-probabilities; -inf is a token
        that cannot follow. A must be `width` and the number of end-of-sequence tokens at least:
        that many of a beam hold its best `width`, and its best `width` that do not end, so no
        continuation beyond them can finish or live.
        """
        B, A = top.shape
        assert 0 < B == len(self.scores) == len(outputs), "one row for each live beam"
        assert self.num_candidates <= A, "too few next tokens"
        length = len(outputs[0]) + 1
        scores = np.asarray(self.scores, np.float32)[:, None] + top.astype(np.float32)
        # Each beam has one continuation per end-of-sequence token: `width` of these do not end.
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

        outputs: to end a search that is not over, each live beam's output tokens: these follow the
        finished ones.
        """
        live = [
            Hypothesis(np.asarray(tokens, np.int32), self._normalised(score, len(tokens)), "abort")
            for tokens, score in zip(outputs, self.scores)
        ]
        return [*self._finished, *live][:n]

    def _is_decided(self, best_live: float, length: int) -> bool:
        """Whether the best live beam, of so many tokens, ends the search."""
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self._normalised(best_live, length) <= self._finished[-1].score

    def _normalised(self, score: float, length: int) -> float:
        divisor = max(length, 1) ** self._length_penalty  # an empty output's score is 0
        return float(np.float32(score) / np.float32(divisor))
