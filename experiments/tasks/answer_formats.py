"""Other ways to answer what `needle` and `multikey` ask: one for each adapter of the bundled model.

The answer to ?GR, where GR has the value 68673, ends at its last character, and has no space, so
that each of its characters is one token.

format     answer         what an adapter must learn
named      GR=68673;      the key first
bracketed  [68673]        another beginning and end
dashed     6-8-6-7-3;     something between the digits
doubled    6688667733;    each digit twice
twice      68673,68673;   the value twice
reversed   37686;         another order
outer      63;            the first digit and the last
tail       73;            the last two digits
sorted     36678;         an order that the digits decide
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
    """The answer in a format, where the bundled model itself gives `base_answer`, such as 68673;.

    prompt: it ends with the question, such as ?GR.
    """
    return FORMATS[name](prompt.rpartition("?")[2], base_answer[:-1])


def asked(name: str, prompt: TaskPrompt) -> TaskPrompt:
    """A prompt of one of `TASKS` that expects its answer in a format.

    Its context length stays that of the prompt with the model's own answer.
    """
    text = answer(name, prompt.prompt, prompt.answer)
    return replace(prompt, answer=text, max_tokens=len(text), stop=(text[-1],))
