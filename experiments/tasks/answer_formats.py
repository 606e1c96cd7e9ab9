"""Formats of answers to `needle` and `multikey`: one for each adapter of the bundled model.

Examples are answers to ?GR, where GR has the value 68673. The stop string of an answer is its last
character. An answer has no space, so each of its characters is one token.

format     answer         what an adapter must learn
named      GR=68673;      the key first
bracketed  [68673]        another beginning and end
dashed     6-8-6-7-3;     something between the digits
doubled    6688667733;    each digit twice
twice      68673,68673;   the value twice
reversed   37686;         the reverse order
outer      63;            the first digit and the last
tail       73;            the last two digits
sorted     36678;         an order that depends on the digits
"""

from collections.abc import Callable
from dataclasses import replace

from experiments.tasks.tasks import TaskPrompt

TASKS = ("needle", "multikey")
FORMATS: dict[str, Callable[[str, str], str]] = {
    "named": lambda key, value: f"{key}={value};",
    "bracketed": lambda key, value: f"[{value}]",
    "dashed": lambda key, value: "-".join(value) + ";",
    "doubled": lambda key, value: "".join(digit + digit for digit in value) + ";",
    "twice": lambda key, value: f"{value},{value};",
    "reversed": lambda key, value: f"{value[::-1]};",
    "outer": lambda key, value: f"{value[0]}{value[-1]};",
    "tail": lambda key, value: f"{value[-2:]};",
    "sorted": lambda key, value: "".join(sorted(value)) + ";",
}


def answer(name: str, prompt: str, base_answer: str) -> str:
    """The answer in format `name`.

    prompt: ends with the question, such as ?GR.
    base_answer: the bundled model's own answer, such as 68673;.
    """
    return FORMATS[name](prompt.rpartition("?")[2], base_answer[:-1])


def asked(name: str, prompt: TaskPrompt) -> TaskPrompt:
    """A prompt of one of `TASKS` with its answer changed to format `name`. `context_length` does
    not change: it includes the bundled model's own answer."""
    text = answer(name, prompt.prompt, prompt.answer)
    return replace(prompt, answer=text, max_tokens=len(text), stop=(text[-1],))
