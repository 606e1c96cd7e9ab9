"""Problems from a user's files: LongBench, RULER, needles in a haystack.

Each line of a file is a JSON object: {"prompt": text, "answer": text, "task": text, "max_tokens":
count, "stop": texts}. "answers", a list, may replace "answer". The default "task" is the file's
name, or the folder's if RULER's programs wrote TASK/validation.jsonl. Problems of a task are
grouped by length, rounded up to a power of two.

Lines may also be RULER's own (with "input" and "outputs") or LongBench's (with "context", "input"
and "answers"). LongBench keeps its prompts' templates elsewhere: here a prompt is the context, the
question and "Answer:".
"""

import os
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.lib import report
from experiments.lib.text_files import parse_json_line, read_lines, shown
from experiments.tasks.tasks import TaskPrompt
from experiments.workloads.files import prompt_entry

RESERVED = ("all", "average", "memory")  # reports have sums of these names
Problems = Mapping[tuple[str, int], Sequence[TaskPrompt]]  # by task and context


def exact(text: str, problem: TaskPrompt) -> float:
    """1 if the text is one of the answers, else 0."""
    return float(any(report.is_exact(text, each, problem.stop) for each in problem.answers))


def contains(text: str, problem: TaskPrompt) -> float:
    """Share of the answers that the text contains, ignoring case: RULER's score."""
    found = [answer.lower() in text.lower() for answer in problem.answers]
    return sum(found) / len(found)


def f1(text: str, problem: TaskPrompt) -> float:
    """The highest F1 of the text's words and an answer's words, without punctuation, articles and
    case: LongBench's score."""
    return max(_f1(_words(text), _words(answer)) for answer in problem.answers)


MATCHES: dict[str, Callable[[str, TaskPrompt], float]] = {
    "exact": exact, "contains": contains, "f1": f1
}  # fmt: skip


def _words(text: str) -> list[str]:
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _f1(ours: Sequence[str], theirs: Sequence[str]) -> float:
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs)) if common else float(ours == theirs)


def read_problems(
    paths: Sequence[str], tokenizer, output_tokens: int, max_model_len: int
) -> dict[tuple[str, int], list[TaskPrompt]]:
    """The problems of all files. output_tokens: default of "max_tokens".

    Raises ValueError, naming file and line, for an invalid or too long problem.
    """
    problems: dict[tuple[str, int], list[TaskPrompt]] = {}
    real = list(map(os.path.realpath, paths))
    for path, own in zip(paths, real, strict=True):
        if real.count(own) > 1:
            raise ValueError(f"--problems names {path} twice")
    for path in paths:
        empty = True
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            problem = _problem(parse_json_line(line, path, number), path, number, output_tokens)
            tokens = [len(tokenizer.encode(problem.prompt + each)) for each in problem.answers]
            prompt = len(tokenizer.encode(problem.prompt))
            length = max(prompt + problem.max_tokens, *tokens)
            if length > max_model_len:
                raise ValueError(
                    f"{path}:{number}: prompt and answer have {length} tokens, more than "
                    f"max_model_len ({max_model_len})"
                )
            context = 1 << (length - 1).bit_length()
            problems.setdefault((problem.task, context), []).append(problem)
            empty = False
        if empty:
            raise ValueError(f"{path}: holds no problem")
    return problems


def _in_our_fields(entry: dict) -> dict:
    """A record of RULER or LongBench in the fields of this module; others do not change."""
    kept = {name: entry[name] for name in ("task", "max_tokens", "stop") if name in entry}
    match entry:
        case {"prompt": _}:
            return entry
        case {"input": str(text), "outputs": answers, "answer_prefix": str(prefix)}:
            return kept | {"prompt": text + prefix, "answers": answers}
        case {"input": str(text), "outputs": answers}:
            return kept | {"prompt": text, "answers": answers}
        case {"context": str(context), "input": str(question), "answers": answers}:
            asked = f"Question: {question}\n" if question else ""
            task = {"task": entry["dataset"]} if "dataset" in entry else {}
            prompt = f"{context}\n\n{asked}Answer:"
            return task | kept | {"prompt": prompt, "answers": answers}
    return entry


def _task(path: Path) -> str:
    """The task that a file's path names."""
    folder = path.absolute().parent.name
    return folder if path.stem == "validation" and folder else path.stem


def _problem(entry, path: str, number: int, output_tokens: int) -> TaskPrompt:
    where = f"{path}:{number}"
    answers = None
    if isinstance(entry, dict):
        entry = _in_our_fields(entry)
        if "answer" in entry and "answers" in entry:
            raise ValueError(f'{where}: a problem has "answer" or "answers", not both')
        answers = entry.pop("answers", None)
    entry = prompt_entry(entry, where)
    if answers is None and isinstance(entry.get("answer"), str):
        answers = [entry["answer"]]
    texts = isinstance(answers, list) and all(isinstance(each, str) and each for each in answers)
    if not texts or not answers or not entry["prompt"]:
        raise ValueError(
            f"{where}: a problem needs a prompt, and an answer or a list of answers, not "
            f"{shown(answers)}"
        )
    task = entry.get("task") or _task(Path(path))
    if task.lower() in RESERVED:
        raise ValueError(f"{where}: {task!r} is no name for a task: reports name sums so")
    return TaskPrompt(
        entry["prompt"], answers[0], task, 0,
        entry.get("max_tokens") or output_tokens, tuple(entry["stop"]), tuple(answers[1:]),
    )  # fmt: skip
