"""DiffKV's policy as its paper prints it (§4), for one head of a sequence, in loops and float64."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

# Rounds a key and a value to the format of a page.
Stored = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(eq=False)
class Token:
    position: int
    key: np.ndarray
    value: np.ndarray
    score: float


@dataclass
class Head:
    """A head of a sequence.

    alpha: threshold of each precision, the highest precision first.
    window: last tokens, which stay in the highest precision.
    stores: rounding of a token's key and value in each precision.
    prompt: rule for prompts: 'paper' or 'repository'; with a budget, 'paper', 'h2o' or 'snapkv'.
    generation: rule for generated tokens: 'paper' or 'repository'; with a budget, 'h2o' or 'keep'.
    budget: tokens that the head keeps, as a share of all tokens if it is at most 1; 0 without one.
    streaming: (sink, last tokens) that a streaming head keeps; its scores mean nothing.
    kept: tokens of each precision.
    """

    alpha: tuple[float, ...]
    window: int
    stores: list[Stored]
    prompt: str = "paper"
    generation: str = "paper"
    budget: float = 0.0
    streaming: tuple[int, int] | None = None
    kept: list[list[Token]] = field(init=False)

    def __post_init__(self):
        self.kept = [[] for _ in self.stores]

    def take_prompt(self, q, k, v) -> np.ndarray:
        """Store a prompt. Return the attention [n, G, D] of its queries [n, G, D]."""
        n, G, D = q.shape
        probs = np.zeros((n, G, n))
        for i in range(n):
            scores = q[i] @ k[: i + 1].T * D**-0.5
            weights = np.exp(scores - scores.max(1, keepdims=True))
            probs[i, :, : i + 1] = weights / weights.sum(1, keepdims=True)
        if self.streaming:
            sink, local = self.streaming
            for j in sorted({*range(min(n, sink)), *range(max(0, n - local), n)}):
                self.kept[0].append(Token(j, *self.stores[0](k[j], v[j]), 0.0))
            return np.einsum("igj,jd->igd", probs, v)
        if self.budget:
            self._take_budget(probs, k, v)
            return np.einsum("igj,jd->igd", probs, v)
        for j in range(n):
            if self.prompt == "paper":
                received = [probs[i, :, j].max() for i in range(j + 1, n)]
                mean = np.mean(received) if received else 0.0
                base = j + 1
            else:
                rows = [i for i in range(j, n) if i >= n - 64]
                mean = max(sum(probs[i, g, j] for i in rows) for g in range(G)) / min(n - j, 64)
                base = n
            later = n - j if self.generation == "repository" else n - j - 1
            level = self._level(mean, [alpha / base for alpha in self.alpha])
            if j >= n - self.window:
                level = 0
            if level is not None:
                self.kept[level].append(Token(j, *self.stores[level](k[j], v[j]), mean * later))
        return np.einsum("igj,jd->igd", probs, v)

    def _take_budget(self, probs, k, v) -> None:
        n = len(k)
        recent = self._recent(n)
        first_voter = max(0, n - self.window) if self.prompt == "snapkv" else 0
        sums = [probs[max(j, first_voter) :, :, j].sum(0).max() for j in range(n)]
        old = list(range(max(0, n - recent)))
        votes = sums
        if self.prompt == "paper":
            sums = [probs[j + 1 :, :, j].max(1).sum() for j in range(n)]
            votes = [sums[j] / (n - 1 - j) for j in old]
        if self.prompt == "snapkv":
            votes = [max(sums[i] for i in old if abs(i - j) <= 3) for j in old]
        best = sorted(old, key=lambda j: -votes[j])
        kept = best[: max(0, self._most(n) - (n - len(old)))] + list(range(len(old), n))
        for j in sorted(kept):
            self.kept[0].append(Token(j, *self.stores[0](k[j], v[j]), sums[j]))

    def _recent(self, n: int) -> int:
        return max(2, self._most(n) // 2) if self.generation == "h2o" else self.window

    def _most(self, n: int) -> int:
        return int(np.ceil(self.budget * n if self.budget <= 1 else self.budget))

    def take_token(self, position: int, q, k, v) -> np.ndarray:
        """Store a generated token. Return the attention [G, D] of its query [G, D]."""
        N, self.now = position + 1, position
        if self.streaming:
            sink, local = self.streaming
            self.kept[0] = [
                t for t in self.kept[0] if t.position < sink or position - t.position < local
            ]
        elif self.generation == "h2o":
            self._evict(self._most(N), self._recent(N))
        elif self.generation != "keep":
            compress = self._algorithm_1 if self.generation == "paper" else self._argmin
            compress([alpha / N for alpha in self.alpha])
        new = Token(position, *self.stores[0](k, v), 0.0)
        self.kept[0].append(new)
        tokens = [token for kept in self.kept for token in kept]
        keys, values = (np.stack([getattr(t, name) for t in tokens]) for name in ("key", "value"))
        scores = q @ keys.T * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(1, keepdims=True))
        probs = weights / weights.sum(1, keepdims=True)
        for token, prob in zip(tokens, probs.max(0)):
            if token is not new or self.generation in ("repository", "h2o"):
                token.score += prob
        return probs @ values

    def _age(self, token: Token) -> int:
        return self.now - token.position

    def _score(self, token: Token) -> float:
        later = self._age(token) - (self.generation == "paper")
        return token.score / later

    def _level(self, mean: float, thresholds: list[float]) -> int | None:
        """The highest precision whose threshold `mean` reaches; None drops the token."""
        return next((i for i, least in enumerate(thresholds) if mean >= least), None)

    def _down(self, token: Token, level: int) -> None:
        token.key, token.value = self.stores[level](token.key, token.value)
        self.kept[level].append(token)

    def _algorithm_1(self, thresholds: list[float]) -> None:
        """Lines 5 to 19. The candidate, in the highest precision until now, leaves the window."""
        leaving = [t for t in self.kept[0] if self._age(t) == self.window]
        if not leaving:
            return
        (candidate,) = leaving
        level = self._level(self._score(candidate), thresholds)
        if level != 0:
            self.kept[0].remove(candidate)
        if level is None:
            return
        if level:
            self._down(candidate, level)
        of_level = [t for t in self.kept[level] if level or self._age(t) >= self.window]
        victim = min(of_level, key=self._score)
        if self._score(victim) >= thresholds[level]:
            return
        self.kept[level].remove(victim)
        lower = self._level(self._score(victim), thresholds)
        if lower is not None:
            self._down(victim, lower)

    def _evict(self, most: int, recent: int) -> None:
        """H2O: if the new token has no room, drop the old token with the lowest summed score."""
        old = [t for t in self.kept[0] if self._age(t) >= recent]
        if old and len(self.kept[0]) >= most:
            self.kept[0].remove(min(old, key=lambda t: t.score))

    def _argmin(self, thresholds: list[float]) -> None:
        """The repository's rule."""
        old = [t for t in self.kept[0] if self._age(t) >= self.window]
        if not any(self._age(t) == self.window for t in old):
            return
        victim: Token | None = min(old, key=self._score)
        level: int | None = 0
        while victim is not None and level is not None:
            if self._score(victim) >= thresholds[level]:
                return
            self.kept[level].remove(victim)
            level = self._level(self._score(victim), thresholds)
            if level is None:
                return
            least = min(self.kept[level], key=self._score, default=None)
            self._down(victim, level)
            victim = least
