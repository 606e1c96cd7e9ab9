import re
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments.tasks import tasks
from experiments.train.build_tokenizer import Vocabulary
from models import load_tokenizer

VOCABULARY = Vocabulary()


def solve(task: str, prompt: str) -> str:
    """The answer, read from the text of the prompt alone."""
    task = task.partition("_")[0]
    if task in ("needle", "multikey"):
        values = dict(re.findall(r"#([A-Za-z]{1,2})(\d{5});", prompt))
        return values[prompt.rpartition("?")[2]] + ";"
    key = prompt[-1]
    if task == "chain":
        links = dict(re.findall(r"#([A-Za-z])([A-Za-z]|\d{5});", prompt))
        path = [links[key]]
        while path[-1] in links:
            path.append(links[path[-1]])
        return "".join(path) + ";"
    if task == "values":
        return key.join(re.findall(rf"\${key}(\d\d);", prompt)) + ";"
    votes = re.findall(rf"~{key}(\d);", prompt)
    if task == "count":
        return f"{len(votes)};"
    if task == "vote":
        (winner, most), (_, second) = [*Counter(votes).most_common(2), ("", 0)][:2]
        assert most - second >= 3
        return f"{winner};"
    program, _, asked = prompt.rstrip("@").rpartition("@")[2].rpartition("!")
    values, lines = {"0": 0}, []
    for name, source, digit in re.findall(r"([A-Za-z])=([A-Za-z0])\+(\d);", program):
        values[name] = (values[source] + int(digit)) % 10
        lines.append(
            f"{name}={source}+{digit}:{source}{values[source]}+{digit}={name}{values[name]};"
        )
    return "".join(lines) + f"!{asked}{values[asked]}."


@pytest.mark.parametrize("task", [task for task in tasks.TASKS if task != "story"])
@pytest.mark.parametrize("context_length", [512, 1024])
def test_answers_follow_from_the_prompts_and_lengths_are_exact(task, context_length):
    for p in tasks.make_prompts(task, context_length, num=20, seed=7):
        assert p.answer == solve(task, p.prompt)
        assert p.stop == (p.answer[-1],) and p.answer.count(p.answer[-1]) == 1
        assert 1 + len(VOCABULARY.encode(p.prompt + p.answer)) == context_length
        assert len(VOCABULARY.encode(p.answer)) == p.max_tokens
        assert (p.task, p.context_length) == (task, context_length)


@pytest.mark.parametrize("task", tasks.HARD_TASKS)
def test_hard_problems_have_the_size_of_their_name(task):
    for p in tasks.make_prompts(task, max(1024, tasks.MIN_CONTEXT[task]), num=5, seed=7):
        assert p.answer == solve(task, p.prompt)
        kind, _, size = task.partition("_")
        found = {
            "multikey": re.findall(r"#[A-Za-z]{2}\d{5};", p.prompt),
            "values": set(re.findall(r"\$([A-Za-z])\d\d;", p.prompt)),
            "chain": re.findall(r"#[A-Za-z]\d{5};", p.prompt),
            "cot": re.findall(r"[A-Za-z]=[A-Za-z0]\+\d;", p.prompt),
        }
        assert len(found[kind]) == int(size)


@pytest.mark.parametrize("context_length", [256, 4096])
def test_shortest_and_longest_contexts(context_length):
    for task in tasks.TASKS + tasks.HARD_TASKS:
        if context_length < tasks.MIN_CONTEXT.get(task, 256):
            continue
        (p,) = tasks.make_prompts(task, context_length, num=1, seed=0)
        length = 1 + len(VOCABULARY.encode(p.prompt)) + len(VOCABULARY.encode(p.answer))
        assert length == context_length, task


def test_stories_begin_at_a_beginning_and_go_on():
    for p in tasks.make_prompts("story", 256, num=5, seed=1):
        assert re.match("[A-Z]", p.prompt) and p.stop == ()
        assert len(VOCABULARY.encode(p.answer)) == p.max_tokens == tasks.STORY_ANSWER


def test_prompts_are_a_function_of_the_seed_and_begin_alike_for_any_number():
    one = tasks.make_prompts("multikey", 256, num=6, seed=1)
    assert one[:3] == tasks.make_prompts("multikey", 256, num=3, seed=1)
    assert not set(one) & set(tasks.make_prompts("multikey", 256, num=6, seed=2))
    assert len(set(one)) == 6


def test_lengths_by_the_bundled_tokenizer_are_the_same():
    tokenizer = load_tokenizer("bundled")
    for task in ("count", "cot"):
        assert tasks.make_prompts(task, 300, 2, 5, tokenizer) == tasks.make_prompts(task, 300, 2, 5)


def test_lengths_by_another_models_tokenizer_come_close():
    alphabet = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    bytes_only = Tokenizer(models.BPE(alphabet, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    for p in tasks.make_prompts("needle", 1500, num=5, seed=3, tokenizer=tokenizer):
        assert 1450 <= len(tokenizer(p.prompt + p.answer)["input_ids"]) <= 1500
        assert p.answer == solve("needle", p.prompt)


@pytest.mark.parametrize(
    ("task", "context_length", "message"),
    [
        ("sudoku", 512, "sudoku"),
        ("cot_long", 256, "512"),
        ("needle", 8, "256"),
        ("story", 64, "128"),
    ],
)
def test_what_cannot_be_made_says_why(task, context_length, message):
    with pytest.raises(ValueError, match=message):
        tasks.make_prompts(task, context_length, num=1, seed=0)
