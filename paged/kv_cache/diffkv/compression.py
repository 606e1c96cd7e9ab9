"""Which precision a token is kept in: DiffKV's compression policy (§4), as functions of scores.

A token's significance is the mean of the probabilities that later tokens give it, of which the
largest of its KV head's query heads counts. It is compared with alpha over a number of tokens.

Where the paper and the authors' repository differ, each has its rule. Of prompts of N tokens, with
tokens counted from 1:

    paper       the mean over all later tokens; token i is compared with alpha / i
    repository  the last 64 queries, a token's own among them, are summed before the largest query
                head is taken; all tokens are compared with alpha / N

Of generation, where N tokens are there with the newest:

    paper       Algorithm 1: first the candidate, the token that leaves the window, is kept, moved
                down or dropped; if it stays in its precision, the least significant token of this
                precision may be moved down or dropped
    repository  the least significant token of high precision beyond the window, the candidate among
                them, may be moved down or dropped; what comes down takes the place of the least
                significant token of low precision if that is to be dropped. A token's own
                probability counts.

With three precisions (§4, discussion; §5.3) a token's significance says which of them it goes to,
and the window and new tokens are in the highest. The candidate is kept there or moved down to any,
and only where it goes to is there a victim, which goes down by its own significance, or is dropped
(paper). Who comes down takes the place of the least significant token of that precision if that is
below its threshold, and that one goes on down in the same way (repository).

So a step is a chain: the new token takes the place of one of the highest precision, this one that
of a lower one, and so on, until one is added or dropped. At most one token leaves each precision,
none leaves whose place is not taken, so that no precision's tokens get fewer, and those of one get
one more: a head needs one page at most.

Two baselines keep a budget of tokens in each head, all in one precision, whatever its scores are:

    h2o     (arXiv:2306.14048) the scores of all queries are summed up, a token's own among them. Of
            a prompt the tokens of the largest sums stay, and in generation the one of the smallest
            sum goes if there are more than the budget. Half of the budget is the window
    snapkv  (arXiv:2404.14469) of a prompt those tokens stay for which the queries of the window
            vote: a token's votes are the largest among it and its neighbours. Generated tokens stay
            (generation rule `keep`)

A third, `kivi`, asks for no scores: rest.py.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

NOBODY = 3e38  # significance where there is no token
REPOSITORY_ROWS = 64  # queries at the end of a prompt
NEIGHBOURS = 3  # on each side of a token, whose votes count for it (SnapKV: a kernel of 7)
CANDIDATE, HIGHEST = range(2)  # places of `Found`


def budget_tokens(budget, lengths):
    """Tokens that a head keeps of so many: the budget, which up to 1 is a share of them."""
    tokens = jnp.ceil(jnp.where(budget <= 1, budget * lengths, budget))
    return tokens.astype(jnp.int32)


class Found(NamedTuple):
    """Tokens that may leave: at `CANDIDATE` the one that leaves the window with the next token, and
    from `HIGHEST` on the least significant one of each of I precisions beyond the window.

    at: [..., 1 + I] int32, its place among the tokens of its precision.
    mean: [..., 1 + I] float32, its significance, `NOBODY` if there is none.
    """

    at: jax.Array
    mean: jax.Array


class Decision(NamedTuple):
    """What a new token changes in each precision.

    arrives: [..., I] whether a token comes there: to the highest the new one, and to another the
        last one before it that was replaced.
    replaces: [..., I] whether it takes the place of a token, which goes on down. It is added
        otherwise.
    at: [..., I] int32, that place.
    """

    arrives: jax.Array
    replaces: jax.Array
    at: jax.Array


class Keeper(Protocol):
    """Which tokens of a KV head stay, and in which of I precisions, the highest first."""

    def of_prompts(
        self, sums_TxK, positions_T, lengths_T, alpha, budget
    ) -> tuple[list[jax.Array], jax.Array]:
        """Tokens of prompts: (whether each precision keeps them, [T, K] bool each, scores [T, K]
        float32).

        sums: [T, K] float32, what `prompt_attention` gives with `Rules.prompt_scores`.
        positions: [T] int32 from 0; a prompt's tokens lie one after the other.
        lengths: [T] int32, N of a token's prompt.
        alpha: [I] thresholds by precision.
        budget: of `budget_tokens`, where rules have one.
        """
        ...

    def places(self, positions_T, ranks_TxK) -> jax.Array:
        """[T, K] int32, where tokens of prompts lie in the highest precision. ranks: [T, K] int32,
        the number of kept ones before each."""
        ...

    def decide(self, found: Found, positions, alpha, kept, budget) -> Decision:
        """What new tokens at `positions` [...] change. kept: [...] tokens in the highest
        precision without them."""
        ...


@dataclass(frozen=True)
class Rules:
    """window: tokens at the end of a sequence that stay in the highest precision, at least 2; H2O
        has its own.
    prompt, generation: see above.
    budgeted: whether a budget, and not alpha, decides what stays of prompts.
    """

    window: int = 64
    prompt: Literal["paper", "repository", "h2o", "snapkv", "kivi"] = "paper"
    generation: Literal["paper", "repository", "h2o", "keep", "kivi"] = "paper"
    budgeted: bool = False

    @property
    def prompt_scores(self) -> dict:
        """What `prompt_attention` sums up."""
        # Of what is not asked for, as little as can be.
        rows = {"repository": REPOSITORY_ROWS, "snapkv": self.window, "kivi": 1}
        last_rows = rows.get(self.prompt)
        of_paper = self.prompt == "paper"
        return {"last_rows": last_rows, "own": not of_paper, "by_head": not of_paper}

    @property
    def counts_own(self) -> bool:
        """Whether a generated token's score counts what it gives itself."""
        return self.generation in ("repository", "h2o")

    def recent(self, budget, lengths):
        """Tokens at the end of sequences of `lengths` tokens that stay."""
        if self.generation != "h2o":
            return self.window
        return jnp.maximum(budget_tokens(budget, lengths) // 2, 2)

    def significance(self, scores, age):
        """The mean of a token's probabilities, `age` tokens after it and before the next adds its
        own; of H2O their sum."""
        if self.generation == "h2o":
            return scores
        return scores / jnp.maximum(age if self.counts_own else age - 1, 1)

    def of_prompts(self, sums_TxK, positions_T, lengths_T, alpha, budget):
        """See `Keeper`."""
        positions, N = positions_T[:, None], lengths_T[:, None]
        recent = positions >= N - self.recent(budget, N)
        later = jnp.maximum(N - positions if self.counts_own else N - positions - 1, 0)
        if self.prompt == "paper":
            mean, base = sums_TxK / jnp.maximum(N - 1 - positions, 1), positions + 1
            scores = mean * later
        elif self.prompt == "repository":
            mean, base = sums_TxK / jnp.clip(N - positions, 1, REPOSITORY_ROWS), N
            scores = mean * later
        else:
            mean, base, scores = sums_TxK, N, sums_TxK
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
        """See `Keeper`."""
        return ranks_TxK

    def decide(self, found: Found, positions, alpha, kept=0, budget=0.0) -> Decision:
        """See `Keeper`. H2O alone needs `kept` and `budget`."""
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
            leaves = leaving < NOBODY
            leaves &= (self.generation == "h2o") & (kept >= budget_tokens(budget, lengths))
            travels = jnp.zeros_like(leaves)
        else:
            travels = leaves = (candidate < NOBODY) & (leaving < thresholds[0])
        arrives, replaces = [jnp.ones_like(leaves)], [leaves]
        # In the paper's words only the candidate meets a victim where it is moved down to.
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
    """The most votes, none below 0, of a token and its neighbours in the same prompt. first: [T]
    int32, the row of a prompt's first token."""
    T, reach = len(first_T), (NEIGHBOURS, NEIGHBOURS)
    votes, first = jnp.pad(votes_TxK, (reach, (0, 0))), jnp.pad(first_T, reach, constant_values=-1)
    parts = [
        jnp.where((first[i : i + T] == first_T)[:, None], votes[i : i + T], 0.0)
        for i in range(sum(reach) + 1)
    ]
    return jnp.stack(parts).max(0)


def _ranks(scores_TxK, first_T):
    """How many tokens of the same prompt come before each by score, of equal ones the first one
    first: [T, K] int32."""
    first = jnp.broadcast_to(first_T[:, None], scores_TxK.shape)
    order = jnp.lexsort((-scores_TxK, first), axis=0)
    return jnp.argsort(order, axis=0).astype(jnp.int32) - first


def least(means, places, rows, before: tuple[jax.Array, jax.Array]):
    """The smallest of means [n, ...] by rows [n] and its place [R, ...] int32, of equal ones the
    first: (mean, place), which go on from `before`."""
    mean, place = before
    new = mean.at[rows].min(means)
    place = jnp.where(new < mean, jnp.iinfo(jnp.int32).max, place)
    won = (means == new[rows]) & (means < NOBODY)
    return new, place.at[rows].min(jnp.where(won, places, jnp.iinfo(jnp.int32).max))
