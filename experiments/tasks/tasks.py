"""Synthetic tasks of graded difficulty with exact answers.

A prompt consists of filler stories with records scattered in them, and a question at the end. A
record has no space, so each of its characters is one token.

task      record     question          answer                      needs
needle    #GR68673;  ?GR               68673;                      one key among stories
multikey  #GR68673;  ?GR               68673;                      one key among many
chain     #cb;#ba;   ?c                ba58213;                    three records, one after another
values    $k12;      &k                12k45k78;                   every value of k, in order
count     ~k3;       *k                4;                          how many records k has
vote      ~k3;       ^k                3;                          the most frequent value of k
cot       -          @b=0+4;c=b+3;!c@  b=0+4:00+4=b4;c=b+3:b4+3=c7;!c7.  the answer so far
cot_long  as cot, with 24 statements: 340 tokens to generate
story     -          the beginning of a text     its continuation (for perplexity)

HARD_TASKS are of the same kinds, at the largest size that the bundled model can solve. They
separate policies that the other tasks cannot separate:

multikey_96     96 keys
values_24       24 keys with three or four values each
chain_17        17 chains
cot_32, cot_40  32 and 40 statements
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.train.build_tokenizer import Vocabulary

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TASKS = ("needle", "multikey", "chain", "values", "count", "vote", "cot", "cot_long", "story")
HARD_TASKS = ("multikey_96", "values_24", "chain_17", "cot_32", "cot_40")
MIN_CONTEXT = {
    "cot_long": 512, "multikey_96": 1024, "values_24": 512, "chain_17": 512, "cot_32": 1024,
    "cot_40": 1024,
}  # fmt: skip
STORY_ANSWER = 64
VALUE_DIGITS = 5


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt and its answer.

    answer: the text that must follow the prompt.
    context_length: tokens of BOS, prompt and answer.
    max_tokens: tokens of the answer.
    others: further right answers.
    """

    prompt: str
    answer: str
    task: str
    context_length: int
    max_tokens: int
    stop: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.answer, *self.others)


@dataclass
class Problem:
    """Records to scatter in the filler, and (question, answer) pairs to append in order."""

    records: list[str] = field(default_factory=list)
    queries: list[tuple[str, str]] = field(default_factory=list)


def _keys(rng, n: int, length: int = 1) -> list[str]:
    if length == 1:
        return [LETTERS[i] for i in rng.choice(len(LETTERS), n, replace=False)]
    return [LETTERS[i // 52] + LETTERS[i % 52] for i in rng.choice(52 * 52, n, replace=False)]


def _digits(rng, n: int) -> str:
    return "".join(map(str, rng.integers(0, 10, n)))


def _shuffled(rng, items: list) -> list:
    return [items[i] for i in rng.permutation(len(items))]


def needles(rng, n: int, key_length: int) -> Problem:
    values = {key: _digits(rng, VALUE_DIGITS) for key in _keys(rng, n, key_length)}
    records = [f"#{key}{value};" for key, value in values.items()]
    return Problem(records, _shuffled(rng, [(f"?{k}", f"{v};") for k, v in values.items()]))


def chains(rng, n: int, hops: int, key_length: int) -> Problem:
    """n chains, each of `hops` aliases that lead to the key with the value."""
    keys, problem = _keys(rng, n * (hops + 1), key_length), Problem()
    for i in range(n):
        links, value = keys[i * (hops + 1) : (i + 1) * (hops + 1)], _digits(rng, VALUE_DIGITS)
        problem.records += [f"#{a}{b};" for a, b in pairwise(links)]
        problem.records.append(f"#{links[-1]}{value};")
        problem.queries.append((f"?{links[0]}", "".join(links[1:]) + value + ";"))
    return Problem(_shuffled(rng, problem.records), _shuffled(rng, problem.queries))


def multiple_values(rng, n: int, least: int, most: int) -> Problem:
    """n keys with `least` to `most` two-digit values. Answers list values in the text's order."""
    keys = [key for key in _keys(rng, n) for _ in range(rng.integers(least, most + 1))]
    keys, values = _shuffled(rng, keys), rng.choice(90, len(keys), replace=len(keys) > 90) + 10
    of: dict[str, list[str]] = {}
    for key, value in zip(keys, values):
        of.setdefault(key, []).append(str(value))
    records = [f"${key}{value};" for key, value in zip(keys, values)]
    queries = [(f"&{key}", key.join(values) + ";") for key, values in of.items()]
    return Problem(records, _shuffled(rng, queries))


def ballots(rng, n: int, least: int, most: int, margin: int, ask: str = "*^") -> Problem:
    """n keys with `least` to `most` votes each. '*' asks for the number of votes if at most 9. '^'
    asks for the winner if it leads by `margin` votes or has all votes.
    """
    problem, votes = Problem(), []
    for key in _keys(rng, n):
        size, winner = int(rng.integers(least, most + 1)), rng.integers(0, 10)
        for _ in range(100):
            digits = np.where(rng.random(size) < 0.5, winner, rng.integers(0, 10, size))
            tally = np.sort(np.bincount(digits, minlength=10))
            if tally[-1] - tally[-2] >= min(margin, size):
                break
        if "^" in ask and tally[-1] - tally[-2] >= min(margin, size):
            problem.queries.append((f"^{key}", f"{np.bincount(digits).argmax()};"))
        if "*" in ask and size < 10:
            problem.queries.append((f"*{key}", f"{size};"))
        votes += [f"~{key}{digit};" for digit in digits]
    return Problem(_shuffled(rng, votes), _shuffled(rng, problem.queries))


def chain_of_thought(rng, n: int) -> Problem:
    """n statements name=name+digit (modulo 10). The answer computes all of them, 14 tokens each."""
    names, values = _keys(rng, n), {"0": 0}
    program, trace = "", ""
    for i, name in enumerate(names):
        source = names[rng.integers(0, i)] if i and rng.random() > 0.15 else "0"
        digit = int(rng.integers(0, 5))
        values[name] = (values[source] + digit) % 10
        statement = f"{name}={source}+{digit}"
        program += statement + ";"
        trace += f"{statement}:{source}{values[source]}+{digit}={name}{values[name]};"
    asked = names[rng.integers(0, n)]
    return Problem([], [(f"@{program}!{asked}@", f"{trace}!{asked}{values[asked]}.")])


# Evaluation problems by task: (rng, size) -> problem. Difficulty grows with the size, which is the
# context in tokens, at most 1,024.
PROBLEMS: dict[str, Callable[[Any, int], Problem]] = {
    "needle": lambda rng, size: needles(rng, 1, int(rng.integers(1, 3))),
    "multikey": lambda rng, size: needles(rng, size // 32, 2),
    "chain": lambda rng, size: chains(rng, size // 86, 2, 1),
    "values": lambda rng, size: multiple_values(rng, size // 64, 2, 3),
    "count": lambda rng, size: ballots(rng, 3, 1, 6, 0, "*"),
    "vote": lambda rng, size: ballots(rng, 3, 6, 10, 3, "^"),
    "cot": lambda rng, size: chain_of_thought(rng, 10),
    "cot_long": lambda rng, size: chain_of_thought(rng, 24),
    "multikey_96": lambda rng, size: needles(rng, 96, 2),
    "values_24": lambda rng, size: multiple_values(rng, 24, 3, 4),
    "chain_17": lambda rng, size: chains(rng, 17, 2, 1),
    "cot_32": lambda rng, size: chain_of_thought(rng, 32),
    "cot_40": lambda rng, size: chain_of_thought(rng, 40),
}


def _interleave(rng, filler: list[str], records: list[str]) -> list[str]:
    cuts = [0, *np.sort(rng.integers(0, len(filler) + 1, len(records))), len(filler)]
    parts = ["".join(filler[a:b]) for a, b in pairwise(cuts)]
    return [part for pair in zip(parts, [*records, ""]) for part in pair if part]


class PromptMaker:
    """Makes prompts for evaluation, from seeds that training never uses."""

    def __init__(self, seed: int, count_tokens: Callable[[str], int] | None = None):
        self.seed, self.vocabulary = seed, Vocabulary()
        self.count = count_tokens or (lambda text: 1 + len(self.vocabulary.encode(text)))
        corpus = self.vocabulary.story_tokens(400_000, seed=zlib.crc32(b"evaluation") + seed)
        self.filler = [self.vocabulary.pieces[i] for i in corpus]

    def _filler(self, rng, n: int) -> list[str]:
        if n > len(self.filler) // 2:
            raise ValueError(f"no more than {len(self.filler) // 2} filler tokens, not {n}")
        start = int(rng.integers(0, len(self.filler) - n))
        return self.filler[start : start + n]

    def make(self, task: str, context_length: int, index: int) -> TaskPrompt:
        """Prompt number `index` of a task. Raises ValueError if it does not fit the context."""
        rng = np.random.default_rng(
            [self.seed, 1, zlib.crc32(task.encode()), context_length, index]
        )
        if task == "story":
            return self._story(rng, context_length)
        least = MIN_CONTEXT.get(task, 256)
        if context_length < least:
            raise ValueError(f"task {task!r} needs {least} tokens, not {context_length}")
        problem = PROBLEMS[task](rng, min(context_length, 1024))
        question, answer = problem.queries[0]
        fixed = "".join(problem.records) + question + answer
        used = self.count(fixed)
        room = context_length - used
        if room < 0:
            raise ValueError(f"task {task!r} needs {used} tokens here, not {context_length}")
        state = rng.bit_generator.state
        while True:
            rng.bit_generator.state = state
            prompt = "".join(_interleave(rng, self._filler(rng, room), problem.records)) + question
            excess = self.count(prompt + answer) - context_length
            if excess <= 0 or room == 0:
                break
            # Another model's tokenizer may encode stories as more tokens than ours.
            room = min(room - 1, room * (context_length - used) // (context_length - used + excess))
        tokens = self.count(prompt + answer) - self.count(prompt)
        return TaskPrompt(prompt, answer, task, context_length, tokens, (answer[-1],))

    def _story(self, rng, context_length: int) -> TaskPrompt:
        if context_length < 2 * STORY_ANSWER:
            raise ValueError(f"a story needs {2 * STORY_ANSWER} tokens, not {context_length}")
        newlines = [
            i for i, piece in enumerate(self.filler[: -2 * context_length]) if piece == "\n"
        ]
        if not newlines:
            raise ValueError(f"no story has {context_length} tokens")
        start = newlines[rng.integers(0, len(newlines))] + 1
        # No space precedes the first word, so each of its characters is a token.
        length = context_length - len(self.filler[start]) + 1
        pieces = self.filler[start : start + length]
        prompt = "".join(pieces[:-STORY_ANSWER])[1:]
        answer = "".join(pieces[-STORY_ANSWER:])
        return TaskPrompt(prompt, answer, "story", context_length, STORY_ANSWER, ())


def make_prompts(
    task: str, context_length: int, num: int, seed: int, tokenizer=None
) -> list[TaskPrompt]:
    """`num` prompts, which depend only on the arguments.

    tokenizer: a Hugging Face tokenizer that measures lengths. The default is the bundled model's
        tokenizer, with which lengths are exact.

    Raises ValueError for an unknown task, and if a task does not fit the context.
    """
    if task not in TASKS + HARD_TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS + HARD_TASKS)}")
    count = None if tokenizer is None else (lambda text: len(tokenizer(text)["input_ids"]))
    maker = PromptMaker(seed, count)
    return [maker.make(task, context_length, i) for i in range(num)]
