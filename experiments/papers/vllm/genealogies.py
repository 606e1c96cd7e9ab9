"""Which sequences of a request descend from which, and the tokens that they could share at best."""

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DIGITS = string.digits + string.ascii_lowercase


def genealogies(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """request_id, prompt_tokens and parents (see above) of each beam search in a log."""
    prompts: dict[str, int] = {}
    parents: dict[str, list[list[int]]] = {}
    for event in events:
        if event["event"] == "arrival":
            prompts[event["request_id"]] = event["prompt_tokens"]
        elif event["event"] == "beams":
            of_request = parents.setdefault(event["request_id"], [])
            if event["parents"]:  # Without parents, the search is over.
                of_request.append([event["before"].index(slot) for slot in event["parents"]])
    return [
        {"request_id": name, "prompt_tokens": prompts[name], "parents": steps}
        for name, steps in parents.items()
    ]


def word(parents: Sequence[int]) -> str:
    """The parents of a step in the notation of genealogies.jsonl."""
    return "".join(DIGITS[parent] for parent in parents)


def parents_of(words: str) -> list[list[int]]:
    """The parents of each step, from genealogies.jsonl."""
    return [[DIGITS.index(digit) for digit in of_step] for of_step in words.split()]


@dataclass(frozen=True)
class Sharing:
    """The tokens that a request holds in each of its steps.

    length: of one sequence.
    logical: of all sequences, without sharing.
    distinct: of all sequences, with sharing in blocks of one token.
    prompt: those of `logical` that belong to prompts.
    unshared: of one sequence, since all sequences parted.
    """

    length: np.ndarray
    logical: np.ndarray
    distinct: np.ndarray
    prompt: np.ndarray
    unshared: np.ndarray


def sharing(prompt_tokens: int, parents: Sequence[Sequence[int]]) -> Sharing:
    """The most that sequences of this genealogy can share."""
    paths = np.zeros((1, 0), np.int64)  # Names of each sequence's output tokens, equal if shared.
    rows = [(*[prompt_tokens] * 4, 0)]
    names = 0
    for of_step in parents:
        count = len(of_step)
        paths = np.column_stack([paths[list(of_step)], np.arange(names, names + count)])
        names += count
        common = int((paths == paths[0]).all(axis=0).sum())
        length = prompt_tokens + paths.shape[1]
        distinct = prompt_tokens + len(np.unique(paths))
        unshared = paths.shape[1] - common
        rows.append((length, count * length, distinct, count * prompt_tokens, unshared))
    return Sharing(*np.array(rows, np.int64).T)


def samples_sharing(prompt_tokens: int, output_tokens: int, sequences: int) -> Sharing:
    """The most that sequences can share which have only their prompt in common."""
    prompt, output = np.full(output_tokens, prompt_tokens), np.arange(output_tokens)
    return Sharing(
        length=prompt + output,
        logical=sequences * (prompt + output),
        distinct=prompt + sequences * output,
        prompt=sequences * prompt,
        unshared=output,
    )
