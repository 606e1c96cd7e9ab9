"""Genealogies of beam searches: the parents of beams, and the tokens that beams can share."""

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DIGITS = string.digits + string.ascii_lowercase


def genealogies(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """request_id, prompt_tokens and parents of each beam search in a log."""
    prompts: dict[str, int] = {}
    parents: dict[str, list[list[int]]] = {}
    for event in events:
        if event["event"] == "arrival":
            prompts[event["request_id"]] = event["prompt_tokens"]
        elif event["event"] == "beams":
            of_request = parents.setdefault(event["request_id"], [])
            if event["parents"]:  # An event without parents ends the search.
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
    """Tokens of a request after its prompt and after each token, [steps].

    length: of one sequence.
    logical: of all sequences, without sharing.
    distinct: of all sequences, shared in blocks of one token.
    prompt: of all copies of the prompt.
    unshared: of one sequence after the last token that all sequences share.
    """

    length: np.ndarray
    logical: np.ndarray
    distinct: np.ndarray
    prompt: np.ndarray
    unshared: np.ndarray


def sharing(prompt_tokens: int, parents: Sequence[Sequence[int]], first: int = 1) -> Sharing:
    """The sharing of a request.

    parents: the parents of each step, as `parents_of` returns them.
    first: number of sequences before the first step.
    """
    paths = np.zeros((first, 0), np.int64)  # numbers of output tokens; a shared token has one
    prompts, numbered = first * prompt_tokens, 0
    rows = [(prompt_tokens, prompts, prompt_tokens, prompts, 0)]
    for of_step in parents:
        count = len(of_step)
        paths = np.column_stack([paths[list(of_step)], np.arange(numbered, numbered + count)])
        numbered += count
        length, distinct = prompt_tokens + paths.shape[1], prompt_tokens + len(np.unique(paths))
        unshared = int((paths != paths[0]).any(axis=0).sum())
        rows.append((length, count * length, distinct, count * prompt_tokens, unshared))
    return Sharing(*np.array(rows, np.int64).T)
