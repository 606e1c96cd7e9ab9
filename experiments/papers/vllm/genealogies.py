"""The parents of beams, read from an event log or in the notation of genealogies.jsonl."""

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
