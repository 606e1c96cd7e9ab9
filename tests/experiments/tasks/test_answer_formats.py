"""The answer formats of the adapters."""

import pytest

from experiments.tasks import answer_formats, tasks
from experiments.tasks.answer_formats import FORMATS, answer

EXPECTED = {
    "named": "GR=68673;",
    "bracketed": "[68673]",
    "dashed": "6-8-6-7-3;",
    "doubled": "6688667733;",
    "twice": "68673,68673;",
    "reversed": "37686;",
    "outer": "63;",
    "tail": "73;",
    "sorted": "36678;",
}


def test_each_format_is_what_its_table_says():
    assert {name: answer(name, "Why?\n#GR68673; ?GR", "68673;") for name in FORMATS} == EXPECTED
    for name, text in EXPECTED.items():
        assert f"{name:<11}{text}" in (answer_formats.__doc__ or "")


@pytest.mark.parametrize("task", answer_formats.TASKS)
def test_a_prompt_asks_the_same_and_expects_another_answer(task):
    prompt = tasks.make_prompts(task, 256, 1, seed=5)[0]
    key, value = prompt.prompt.rpartition("?")[2], prompt.answer[:-1]
    assert f"#{key}{value};" in prompt.prompt
    asked = answer_formats.asked("named", prompt)
    assert (asked.prompt, asked.answer) == (prompt.prompt, f"{key}={value};")
    assert (asked.max_tokens, asked.stop) == (len(asked.answer), (";",))
    assert answer_formats.asked("bracketed", prompt).stop == ("]",)
