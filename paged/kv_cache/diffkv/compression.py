"""DiffKV's compression policy (§4): the precision of each kept token, as a function of scores.

A token's significance is its mean attention probability over later queries. A KV head uses the
maximum over its query heads. The threshold is alpha divided by a number of tokens.

The paper and the authors' repository have different rules. For a prompt of tokens 1 to N:

    paper       Significance is the mean over all later queries. The threshold of token i is
                alpha / i
    repository  Significance is the mean over the last 64 queries, or over the queries from the
                token's own on, if they are fewer. Probabilities are summed over queries before the
                maximum over query heads. The threshold is alpha / N

For generation, with N tokens including the newest, the threshold is alpha / N:

    paper       Algorithm 1. First the candidate, the token that leaves the window, is kept, moved
                down or dropped. Then the victim, the least significant token of the candidate's
                final precision, may be moved down or dropped
    repository  The least significant token of high precision outside the window, the candidate
                included, may be moved down or dropped. A token that is moved down replaces low
                precision's least significant token, if that is below its threshold. A token's score
                includes the probability of its own query

With three precisions (§4, discussion; §5.3), a token's significance decides its precision. The
window and new tokens are in the highest precision.

    paper       The candidate stays or is moved down to any precision. Only the candidate's final
                precision has a victim. The victim is moved down by its own significance, or dropped
    repository  A token that is moved down replaces the least significant token of its new
                precision, if that is below the precision's threshold. That token is moved down or
                dropped in turn

So a step is a chain: the new token displaces a token of the highest precision, which displaces one
of a lower precision, and so on, until a token is added or dropped. A token leaves
a precision only if another token takes its place. So no precision's token count shrinks. At most
one precision's count grows, by one token, and a head needs at most one page.

Two baselines keep a budget of tokens in each head, all in one precision:

    h2o     (arXiv:2306.14048) A token's score is the sum over all queries, its own included. A
            prompt keeps the tokens with the largest sums. In generation, the token with the
            smallest sum outside the window is dropped if the budget is exceeded. The window is
            half of the budget
    snapkv  (arXiv:2404.14469) A prompt keeps the tokens with the most votes of the window's
            queries. A token's votes are the maximum over the token and its neighbours. Generated
            tokens are kept (generation rule `keep`)

A third baseline, `kivi`, needs no scores (keeps.py).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

NO_TOKEN = 3e38  # significance of a missing token
REPOSITORY_ROWS = 64  # last queries of a prompt, whose probabilities are summed
NEIGHBOURS = 3  # tokens on each side in the maximum of votes (SnapKV's kernel size of 7)
CANDIDATE, HIGHEST = range(2)  # indices on the last axis of `Found`


def budget_tokens(budget, lengths):
    """Number of tokens that a head keeps of `lengths` tokens. A budget up to 1 is a share."""
    tokens = jnp.ceil(jnp.where(budget <= 1, budget * lengths, budget))
    return tokens.astype(jnp.int32)


class Found(NamedTuple):
    """Tokens that may leave their precision.

    Index `CANDIDATE` is the token that leaves the window when the next token is added. The indices
    from `HIGHEST` on are the least significant token of each of I precisions outside the window.

    at: [..., 1 + I] int32, place of the token in its precision.
    mean: [..., 1 + I] float32, significance of the token, `NO_TOKEN` if there is no token.
    """

    at: jax.Array
    mean: jax.Array


class Decision(NamedTuple):
    """The change of each precision when a token is generated.

    arrives: [..., I] whether a token is written to the precision. The highest precision gets the
        new token. A lower one may get the token that left a higher one.
    replaces: [..., I] whether the written token replaces another token, which is then moved down or
        dropped. Otherwise the precision grows by one token.
    at: [..., I] int32, place of the replaced token.
    """

    arrives: jax.Array
    replaces: jax.Array
    at: jax.Array


class Keeper(Protocol):
    """Decides which tokens a KV head keeps, and in which of I precisions, the highest first."""

    def of_prompts(
        self, sums_TxK, positions_T, lengths_T, alpha, budget
    ) -> tuple[list[jax.Array], jax.Array]:
        """The kept tokens of prompts. Returns (masks, scores): for each precision a mask [T, K]
        bool of the tokens kept in that precision, and the tokens' scores [T, K] float32, which are
        sums of probabilities.

        sums: [T, K] float32, sums of probabilities, by `prompt_attention` with
            `Rules.prompt_scores`.
        positions: [T] int32 from 0. Tokens of a prompt are consecutive.
        lengths: [T] int32, length N of each token's prompt.
        alpha: [I] alpha of each precision's threshold.
        budget: see `budget_tokens`. Only rules with a budget use it.
        """
        ...

    def places(self, positions_T, ranks_TxK) -> jax.Array:
        """[T, K] int32 places of prompt tokens in the highest precision. ranks: [T, K] int32,
        number of kept tokens before each token."""
        ...

    def decide(self, found: Found, positions, alpha, kept, budget) -> Decision:
        """The `Decision` for new tokens at `positions` [...]. kept: [...] number of tokens in the
        highest precision, without the new token."""
        ...


@dataclass(frozen=True)
class Rules:
    """A `Keeper` that decides by scores.

    window: tokens at the end of a sequence that stay in the highest precision, at least 2. H2O's
        window is half of its budget instead.
    prompt, generation: rules that the module's docstring describes.
    budgeted: whether a budget, not alpha, decides which tokens of a prompt are kept.
    """

    window: int = 64
    prompt: Literal["paper", "repository", "h2o", "snapkv", "kivi"] = "paper"
    generation: Literal["paper", "repository", "h2o", "keep", "kivi"] = "paper"
    budgeted: bool = False

    @property
    def prompt_scores(self) -> dict:
        """Arguments of `prompt_attention` that choose the probabilities to sum."""
        # KIVI needs no scores, and a sum over one query is the cheapest.
        rows = {"repository": REPOSITORY_ROWS, "snapkv": self.window, "kivi": 1}
        last_rows = rows.get(self.prompt)
        of_paper = self.prompt == "paper"
        return {"last_rows": last_rows, "own": not of_paper, "by_head": not of_paper}

    @property
    def counts_own(self) -> bool:
        """Whether a generated token's score includes the probability of its own query."""
        return self.generation in ("repository", "h2o")

    def recent(self, budget, lengths):
        """Number of last tokens that are the window of a sequence of `lengths` tokens, all in the
        highest precision."""
        if self.generation != "h2o":
            return self.window
        return jnp.maximum(budget_tokens(budget, lengths) // 2, 2)

    def significance(self, scores, age):
        """The mean of a token's probabilities; for H2O their sum, `scores`. age: number of queries
        since the token, its own query included."""
        if self.generation == "h2o":
            return scores
        return scores / jnp.maximum(age if self.counts_own else age - 1, 1)

    def prompt_significance(self, sums_TxK, positions_Tx1, N):
        """(significance [T, K], base) of the tokens of prompts of N tokens. A token is kept if its
        significance is at least alpha / base."""
        if self.prompt == "paper":
            return sums_TxK / jnp.maximum(N - 1 - positions_Tx1, 1), positions_Tx1 + 1
        if self.prompt == "repository":
            return sums_TxK / jnp.clip(N - positions_Tx1, 1, REPOSITORY_ROWS), N
        return sums_TxK, N

    def of_prompts(self, sums_TxK, positions_T, lengths_T, alpha, budget):
        positions, N = positions_T[:, None], lengths_T[:, None]
        recent = positions >= N - self.recent(budget, N)
        later = jnp.maximum(N - positions if self.counts_own else N - positions - 1, 0)
        mean, base = self.prompt_significance(sums_TxK, positions, N)
        scores = mean * later if self.prompt in ("paper", "repository") else sums_TxK
        if self.budgeted:
            first_T = jnp.arange(len(positions_T)) - positions_T
            if self.prompt == "snapkv":
                mean = _of_neighbours(jnp.where(recent, 0.0, mean), first_T)
            rank = _ranks(jnp.where(recent, jnp.inf, mean), first_T)
            highest = recent | (rank < budget_tokens(budget, N))
            return [highest] + [jnp.zeros_like(highest)] * (len(alpha) - 1), scores
        kept = [recent | (mean >= alpha[0] / base)]
        rest = ~kept[0]
        for each in alpha[1:]:
            kept.append(rest & (mean >= each / base))
            rest &= ~kept[-1]
        return kept, scores

    def places(self, positions_T, ranks_TxK):
        return ranks_TxK

    def decide(self, found: Found, positions, alpha, kept=0, budget=0.0) -> Decision:
        # Only H2O uses `kept` and `budget`.
        lengths = positions + 1
        thresholds = [each / lengths for each in alpha]
        (candidate, *victims), places = (jnp.moveaxis(x, -1, 0) for x in (found.mean, found.at))
        victim = victims[0]
        if self.generation == "paper":
            of_candidate = candidate < thresholds[0]
        else:
            of_candidate = candidate <= victim
        leaving = jnp.where(of_candidate, candidate, victim)
        if self.generation in ("h2o", "keep"):
            leaves = leaving < NO_TOKEN
            leaves &= (self.generation == "h2o") & (kept >= budget_tokens(budget, lengths))
            travels = jnp.zeros_like(leaves)
        else:
            travels = leaves = (candidate < NO_TOKEN) & (leaving < thresholds[0])
        arrives, replaces = [jnp.ones_like(leaves)], [leaves]
        # In the paper only the candidate's final precision has a victim.
        meets = of_candidate if self.generation == "paper" else jnp.ones_like(of_candidate)
        for least_here, threshold in zip(victims[1:], thresholds[1:], strict=True):
            arrives.append(travels & (leaving >= threshold))
            replaces.append(arrives[-1] & meets & (least_here < threshold))
            travels = jnp.where(arrives[-1], replaces[-1], travels)
            leaving = jnp.where(replaces[-1], least_here, leaving)
            if self.generation == "paper":
                meets &= ~arrives[-1]
        at = [jnp.where(of_candidate, places[CANDIDATE], places[HIGHEST]), *places[HIGHEST + 1 :]]
        return Decision(*(jnp.stack(x, -1) for x in (arrives, replaces, at)))


def _of_neighbours(votes_TxK, first_T):
    """[T, K] maximum votes of a token and its neighbours in the same prompt, at least 0. first: [T]
    int32, index of the first token of each token's prompt."""
    T, reach = len(first_T), (NEIGHBOURS, NEIGHBOURS)
    votes, first = jnp.pad(votes_TxK, (reach, (0, 0))), jnp.pad(first_T, reach, constant_values=-1)
    parts = [
        jnp.where((first[i : i + T] == first_T)[:, None], votes[i : i + T], 0.0)
        for i in range(sum(reach) + 1)
    ]
    return jnp.stack(parts).max(0)


def _ranks(scores_TxK, first_T):
    """[T, K] int32 rank of each token in its prompt by descending score. Among tokens of equal
    score the earlier is first."""
    first = jnp.broadcast_to(first_T[:, None], scores_TxK.shape)
    order = jnp.lexsort((-scores_TxK, first), axis=0)
    return jnp.argsort(order, axis=0).astype(jnp.int32) - first


def least(means, places, rows, before: tuple[jax.Array, jax.Array]):
    """The minimum (mean, place) [R, ...] of each row, over `before`, an earlier minimum, and means
    [n, ...] at `places` of rows [n]. Among equal means, the smallest place wins."""
    mean, place = before
    new = mean.at[rows].min(means)
    place = jnp.where(new < mean, jnp.iinfo(jnp.int32).max, place)
    won = (means == new[rows]) & (means < NO_TOKEN)
    return new, place.at[rows].min(jnp.where(won, places, jnp.iinfo(jnp.int32).max))
