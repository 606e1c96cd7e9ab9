"""Training batches of the tasks in `experiments.tasks.tasks`, with many questions per sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from experiments.tasks import stories, tasks
from experiments.tasks.tasks import Problem
from experiments.train.build_tokenizer import BOS, EOS, Vocabulary

PASSKEY = 32  # characters
CHARACTERS = 10  # of filler text, for each token of a sequence; more than any text needs
TASKS = "needles", "chain", "values", "count", "vote", "cot", "passkeys", "copy", "story"
SHORTEST = 64  # tokens of a sequence that has room for every task


def passkeys(rng, n: int, size: int) -> Problem:
    """n random values of `size` characters, and a question for each, in the order of the text.
    Gates are trained on this task (DuoAttention, §2.3); no evaluation uses it."""
    questions = [question for question, _ in tasks.needles(rng, n, 2).queries]
    queries = [(question, _digits_and_letters(rng, size) + ";") for question in questions]
    return Problem([f"#{question[1:]}{answer}" for question, answer in queries], queries)


def training_problem(task: str, rng, room: int) -> Problem:
    """A problem of random difficulty for `room` tokens, with a question for each record or key;
    `_segments` drops questions that do not fit."""
    key_length = int(rng.integers(1, 3))
    many = 40 if key_length == 1 else 96

    def number(tokens_each: int, most: int) -> int:
        most = max(1, min(most, room // tokens_each))
        return most if rng.random() < 0.3 else int(rng.integers(1, most + 1))

    match task:
        case "needles":
            return tasks.needles(rng, number(2 * (7 + key_length), many), key_length)
        case "chain":
            hops = int(rng.integers(1, 4))
            tokens = 2 * (7 + key_length) + hops * (2 + 3 * key_length)
            return tasks.chains(rng, number(tokens, many // (hops + 1)), hops, key_length)
        case "values":
            return tasks.multiple_values(rng, number(26, 30), int(rng.integers(1, 3)), 3)
        case "count":
            return tasks.ballots(rng, number(26, 24 if rng.random() < 0.5 else 5), 1, 6, 0, "*")
        case "vote":
            return tasks.ballots(rng, number(42, 12), 4, 10, 2, "^")
        case "cot":
            most = min(50 if rng.random() < 0.3 else 26, (room - 9) // 20)
            return tasks.chain_of_thought(rng, int(rng.integers(max(1, most // 3), most + 1)))
        case "passkeys":
            size = min(PASSKEY, room // 2 - 5)
            return passkeys(rng, min(10, room // (2 * (4 + size))), size)
    raise ValueError(f"unknown training task {task!r}")


@dataclass(frozen=True)
class Batch:
    """The batch of a training step. Inputs are tokens[:, :-1], labels are tokens[:, 1:].

    tokens: [B, T + 1] int32.
    weights: [B, T + 1] float32 weight of each token as a label: 1 or more in answers, less in
        filler, 0 for tokens that are not learnt.
    positions: [B, T + 1] int32, with jumps.
    tasks: the task of each sequence.
    """

    tokens: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    tasks: tuple[str, ...]


def check_corpus(characters: int, length: int) -> None:
    """Raise ValueError if filler text of so many characters may be shorter than a sequence."""
    if characters < CHARACTERS * length:
        raise ValueError(
            f"corpus_characters must be at least {CHARACTERS} times the longest sequence, "
            f"{length} tokens, not {characters}"
        )


class TrainingData:
    """Training batches. They depend only on the arguments of the constructor and of `batch`.

    rewrite: (question, answer) -> the answer to learn; None to keep answers unchanged.
    tokenizer: the model's Hugging Face tokenizer; None for the bundled model's.
    """

    def __init__(
        self,
        seed: int,
        filler_weight: float = 0.05,
        corpus_characters: int = 6_000_000,
        rewrite: Callable[[str, str], str] | None = None,
        tokenizer=None,
    ):
        self.vocabulary, self.filler_weight, self.seed = Vocabulary(), filler_weight, seed
        self.rewrite = rewrite
        if tokenizer is not None and tokenizer.get_vocab() == self.vocabulary.ids:
            tokenizer = None
        self.tokenizer, self.begin, self.end = tokenizer, [BOS], EOS
        if tokenizer is None:
            self.corpus = self.vocabulary.story_tokens(corpus_characters, seed=seed)
            return
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer needs a token that ends a sequence (eos_token)")
        self.end = tokenizer.eos_token_id
        self.begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.corpus = np.array(self._spell(stories.text(corpus_characters, seed)), np.int32)

    def _spell(self, text: str) -> list[int]:
        if self.tokenizer is not None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return [self.vocabulary.ids[c] for c in text]

    def _segments(self, task: str, room: int) -> list[tuple[list[int], list[float]]]:
        """Segments (tokens, weights) that together fill nearly all of `room` tokens."""
        if task == "copy":
            text = self._spell(_digits_and_letters(self.rng, (room - 2) // 2))
            bar = self._spell("|")
            return [
                ([*self.begin, *text], [0.0] * (len(self.begin) + len(text))),
                (bar + text, [0.0] + [1.0] * len(text)),
            ]
        if task == "story":
            if self.tokenizer is not None:
                raise ValueError("the task story needs the bundled model's tokenizer")
            start = int(self.rng.integers(0, len(self.corpus) - room))
            text = self.corpus[start : start + room].tolist()
            first = self.vocabulary.pieces[text[0]]
            head = self._spell(first[1:]) if first[1:].isalpha() else [text[0]]
            weights = [0.0] * (1 + len(head)) + [4 * self.filler_weight] * room
            return [(tokens := [BOS, *head, *text[1:]][:room], weights[: len(tokens)])]
        problem = training_problem(task, self.rng, room - 1)
        records = [self._spell(record) for record in problem.records]
        queries, left = [], room - 2 - sum(map(len, records))
        for question, answer in problem.queries:
            if self.rewrite:
                answer = self.rewrite(question, answer)
            tokens, weights = _labelled(self._spell(question), self._spell(answer), task)
            left -= len(tokens)
            if left < 0:
                break
            queries.append((tokens, weights))
        else:
            queries.append(([self.end], [self.filler_weight]))
        first = self.begin, [0.0] * len(self.begin)
        gap = room - len(self.begin) - sum(map(len, records)) - sum(len(t) for t, _ in queries)
        assert gap >= 0, (task, room, gap)
        start = int(self.rng.integers(0, len(self.corpus) - gap))
        text = self.corpus[start : start + gap].tolist()
        cuts = [0, *np.sort(self.rng.integers(0, gap + 1, len(records))), gap]
        segments = [first]
        for i, (a, b) in enumerate(pairwise(cuts)):
            segments.append((text[a:b], [self.filler_weight] * (b - a)))
            if i < len(records):
                segments.append((records[i], [0.0] * len(records[i])))
        return segments + queries

    def _positions(
        self, lengths: list[int], total: int, max_position: int, share: float
    ) -> np.ndarray:
        """Positions from 0, with up to three jumps between segments in `share` of the sequences.

        Jumps let short sequences train distances up to `max_position`.
        """
        steps, slack = np.ones(total, np.int32), max_position - total
        if slack > 0 and self.rng.random() < share:
            starts, n = np.cumsum(lengths)[:-1], int(self.rng.integers(1, 4))
            far = self.rng.integers(0, slack + 1)
            for part in self.rng.dirichlet(np.ones(n)) * far:
                steps[starts[self.rng.integers(0, len(starts))]] += int(part)
        steps[0] = 0
        return np.cumsum(steps, dtype=np.int32)

    def batch(
        self, step: int, length: int, size: int, mix: dict[str, float], max_position=0, share=0.35
    ) -> Batch:
        """`size` sequences of `length` labels. `mix` gives the probability of each task."""
        self.rng = np.random.default_rng([self.seed, 0, step])
        names, total = list(mix), sum(mix.values())
        rows, names_of_rows = [], []
        for _ in range(size):
            task = names[self.rng.choice(len(names), p=[p / total for p in mix.values()])]
            segments = [s for s in self._segments(task, length + 1) if s[0]]
            tokens = [t for segment, _ in segments for t in segment][: length + 1]
            weights = [w for _, segment in segments for w in segment][: length + 1]
            rest = length + 1 - len(tokens)
            lengths = [len(segment) for segment, _ in segments] + [1]
            positions = (
                self._positions(lengths[:-1], length + 1, max_position, share)
                if len(segments) > 1
                else np.arange(length + 1, dtype=np.int32)
            )
            rows.append((tokens + [self.end] * rest, weights + [0.0] * rest, positions))
            names_of_rows.append(task)
        tokens, weights, positions = zip(*rows)
        return Batch(
            np.array(tokens, np.int32),
            np.array(weights, np.float32),
            np.stack(positions),
            tuple(names_of_rows),
        )


def _digits_and_letters(rng, n: int) -> str:
    return "".join((tasks.LETTERS + "0123456789")[i] for i in rng.integers(0, 62, n))


def _labelled(question: list[int], answer: list[int], task: str) -> tuple[list[int], list[float]]:
    """(tokens, weights) of question and answer. Question tokens weigh 0, answer tokens 1, and the
    first answer token 2. Tokens that depend on several keys or a sum weigh 3 or 4.
    """
    weights = [2.0] + [1.0] * (len(answer) - 1)
    match task:
        case "count":
            weights[0] = 4.0
        case "values":  # These tokens decide whether one more value follows.
            weights[2::3] = [3.0] * len(weights[2::3])
        case "cot":  # These tokens are sums.
            weights[12:-4:14] = [3.0] * len(weights[12:-4:14])
    return question + answer, [0.0] * len(question) + weights
