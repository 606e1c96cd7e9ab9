"""DiffKV's policy as its paper prints it (§4), one head of one sequence, in loops and float64."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

# What a key and a value become by being stored.
Stored = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(eq=False)
class Token:
    position: int
    key: np.ndarray
    value: np.ndarray
    score: float


@dataclass
class Head:
    """alpha: of high and of low precision. store_high, store_low: what precision leaves of a token.
    prompt, generation: 'paper' or 'repository', or with a budget, up to 1 as a share of the tokens,
    'h2o' or 'snapkv', and 'h2o' or 'keep'."""

    alpha: tuple[float, float]
    window: int
    store_high: Stored
    store_low: Stored
    prompt: str = "paper"
    generation: str = "paper"
    budget: float = 0.0
    high: list[Token] = field(default_factory=list)
    low: list[Token] = field(default_factory=list)

    def take_prompt(self, q, k, v) -> np.ndarray:
        """Attention [n, G, D] of queries [n, G, D]."""
        n, G, D = q.shape
        probs = np.zeros((n, G, n))
        for i in range(n):
            scores = q[i] @ k[: i + 1].T * D**-0.5
            weights = np.exp(scores - scores.max(1, keepdims=True))
            probs[i, :, : i + 1] = weights / weights.sum(1, keepdims=True)
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
            token = Token(j, *self.store_high(k[j], v[j]), mean * later)
            if j >= n - self.window or mean >= self.alpha[0] / base:
                self.high.append(token)
            elif mean >= self.alpha[1] / base:
                token.key, token.value = self.store_low(k[j], v[j])
                self.low.append(token)
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
            self.high.append(Token(j, *self.store_high(k[j], v[j]), sums[j]))

    def _recent(self, n: int) -> int:
        return max(2, self._most(n) // 2) if self.generation == "h2o" else self.window

    def _most(self, n: int) -> int:
        return int(np.ceil(self.budget * n if self.budget <= 1 else self.budget))

    def take_token(self, position: int, q, k, v) -> np.ndarray:
        """Attention [G, D] of the query [G, D] of a generated token."""
        N, self.now = position + 1, position
        if self.generation == "h2o":
            self._evict(self._most(N), self._recent(N))
        elif self.generation != "keep":
            compress = self._algorithm_1 if self.generation == "paper" else self._argmin
            compress(self.alpha[0] / N, self.alpha[1] / N)
        new = Token(position, *self.store_high(k, v), 0.0)
        self.high.append(new)
        tokens = self.high + self.low
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

    def _down(self, token: Token) -> None:
        token.key, token.value = self.store_low(token.key, token.value)
        self.low.append(token)

    def _algorithm_1(self, threshold_high: float, threshold_low: float) -> None:
        """Lines 5 to 19. The candidate leaves the window, where it was in high precision."""
        leaving = [t for t in self.high if self._age(t) == self.window]
        if not leaving:
            return
        (candidate,) = leaving
        recent = [t for t in self.high if self._age(t) < self.window]
        high = [t for t in self.high if self._age(t) > self.window]
        if self._score(candidate) >= threshold_high:
            high.append(candidate)
            victim = min(high, key=self._score)
            if threshold_low <= self._score(victim) < threshold_high:
                high.remove(victim)
                self._down(victim)
            elif self._score(victim) < threshold_low:
                high.remove(victim)
        elif self._score(candidate) >= threshold_low:
            self._down(candidate)
            victim = min(self.low, key=self._score)
            if self._score(victim) < threshold_low:
                self.low.remove(victim)
        self.high = high + recent

    def _evict(self, most: int, recent: int) -> None:
        """H2O: the least of all accumulated scores goes, if there is no room for the new token."""
        old = [t for t in self.high if self._age(t) >= recent]
        if old and len(self.high) >= most:
            self.high.remove(min(old, key=lambda t: t.score))

    def _argmin(self, threshold_high: float, threshold_low: float) -> None:
        """The repository's rule."""
        old = [t for t in self.high if self._age(t) >= self.window]
        if not any(self._age(t) == self.window for t in old):
            return
        victim = min(old, key=self._score)
        if self._score(victim) >= threshold_high:
            return
        self.high.remove(victim)
        if self._score(victim) >= threshold_low:
            if self.low:
                least = min(self.low, key=self._score)
                if self._score(least) < threshold_low:
                    self.low.remove(least)
            self._down(victim)
