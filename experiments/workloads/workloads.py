"""Workloads: requests with arrival times, from files, tasks or statistics.

`--workload` names a kind and, after a colon, its source:

    prompts:FILE      .jsonl: an object {"prompt", "answer", "max_tokens", "stop", "task"} per line,
                      of which only "prompt" is required; any other file: one prompt per line
    sharegpt:FILE     ShareGPT_V3 conversations (JSON): prompts and output lengths of real chats
    alpaca:FILE       Stanford Alpaca instructions (JSON): prompts and output lengths
    trace:FILE        CSV of arrivals, prompt lengths and output lengths
    tasks:A,B         new prompts of the tasks in experiments/tasks/tasks.py, with their answers
    sharegpt, alpaca  synthetic lengths with the published means (vLLM §6.1)
    translation       a prefix that all requests share, and then a sentence (vLLM §6.4)
    chatbot           the end of a long conversation (vLLM §6.5)

Workloads that only set lengths have prompts of random ordinary tokens, and ignore EOS.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tasks import tasks
from experiments.workloads import files, synthetic_lengths
from paged import checks
from paged.checks import described
from paged.validation import check_stop_strings

SYNTHETIC = ("sharegpt", "alpaca", "translation", "chatbot")
FORMS = (
    "prompts:FILE, sharegpt:FILE, alpaca:FILE, trace:FILE, tasks:NAMES, sharegpt, alpaca, "
    "translation or chatbot"
)
# The context of the models in vLLM's paper, in tokens: a bound of the lengths in its workloads.
PAPER_CONTEXT = 2048
# vLLM's serving benchmark drops pairs with a shorter text or a longer prompt than this.
MIN_PAIR_TOKENS, MAX_PAIR_PROMPT = 4, 1024
PREFIX_TOKENS = {1: 80, 5: 341}  # translation's shared prefix, by number of examples (vLLM Fig. 16)


@dataclass(frozen=True)
class Request:
    """One request.

    arrival_s: seconds since the start of the workload.
    answer: the expected text; None for no expectation.
    adapter: name of the adapter; None for the base model.
    """

    arrival_s: float
    prompt: str | list[int]
    max_tokens: int
    ignore_eos: bool = False
    answer: str | None = None
    stop: tuple[str, ...] = ()
    task: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and notes on their origin, which go into report.json."""

    requests: list[Request]
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Vocabulary:
    """The model's tokenizer and vocabulary size, and the longest sequence that is served."""

    tokenizer: Any
    vocab_size: int
    max_model_len: int

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def ordinary_tokens(self) -> np.ndarray:
        """Ids of the tokens that are not special, int64 [at most V]."""
        ids = np.arange(min(self.vocab_size, len(self.tokenizer)))
        return np.setdiff1d(ids, self.tokenizer.all_special_ids)


@dataclass(frozen=True)
class WorkloadConfig:
    """The options of a workload. Each field is a flag of the same name, with a help text.

    Construction raises ValueError, naming the flag, for an invalid value.
    """

    workload: str = field(metadata={"help": FORMS, "path": True})
    num_requests: int = described(64, "requests at most; a file may hold fewer", least=1)
    request_rate: float = described(math.inf, "Poisson arrivals per second; inf for all at once")
    seed: int = described(0, "of lengths, tokens and arrivals", least=0)
    max_tokens: int = described(64, "output tokens for prompts that do not say", least=1)
    context_length: int = described(512, "tokens of a prompt of --workload=tasks:...", least=1)
    time_scale: float = described(1.0, "multiplies a trace's arrival times")
    overlong: str = described("error", "a trace's requests beyond the context: error, clip or drop")
    length_sigma: float = described(
        1.0, "spread of the synthetic log-normal lengths", least=0, most=3
    )
    length_divisor: int = described(
        1,
        f"divides all synthetic lengths and the context, of {PAPER_CONTEXT:,} tokens, that bounds "
        "them",
        least=1,
        most=512,
    )
    num_shots: int = described(1, "examples in the shared prefix of --workload=translation: 1 or 5")

    def __post_init__(self):
        checks.make_plain(self, unbounded=("request_rate", "time_scale"))
        for each in fields(self):
            value = getattr(self, each.name)
            if (allowed := checks.outside(each.metadata, value)) is not None:
                raise checks.refusal(f"--{each.name}", allowed, value)
        if not self.request_rate > 0:
            raise ValueError(f"--request_rate must be positive or inf, not {self.request_rate}")
        if not 0 <= self.time_scale < math.inf:
            raise ValueError(f"--time_scale must be finite and at least 0, not {self.time_scale}")
        if self.num_shots not in PREFIX_TOKENS:
            allowed = " or ".join(map(str, PREFIX_TOKENS))
            raise ValueError(f"--num_shots must be {allowed}, not {self.num_shots}")
        if self.overlong not in ("error", "clip", "drop"):
            raise ValueError(f"--overlong must be error, clip or drop, not {self.overlong!r}")
        if self.kind not in ("prompts", "trace", "tasks", *SYNTHETIC):
            raise ValueError(f"--workload must be {FORMS}, not {self.workload!r}")
        if self.kind in ("translation", "chatbot") and self.workload != self.kind:
            raise ValueError(f"--workload={self.kind} is synthetic and takes no source")
        if self.kind not in SYNTHETIC and not self.source:
            raise ValueError(f"--workload={self.workload} lacks its source; it must be {FORMS}")
        if self.source and self.kind != "tasks" and not Path(self.source).is_file():
            raise ValueError(f"--workload={self.workload}: there is no file {self.source!r}")
        if self.kind == "trace" and self.request_rate != math.inf:
            raise ValueError("a trace has its own arrivals: use --time_scale, not --request_rate")

    @property
    def kind(self) -> str:
        return self.workload.partition(":")[0]

    @property
    def source(self) -> str:
        return self.workload.partition(":")[2]


def load(config: WorkloadConfig, vocabulary: Vocabulary) -> Workload:
    """Make the workload. Equal configs and vocabularies give equal requests.

    Raises ValueError, naming file and line, for invalid content and for requests that do not fit
    the model.
    """
    if config.kind == "trace":
        return _trace(config, vocabulary)
    made_by_kind = {
        "prompts": _prompts, "tasks": _tasks, "translation": _translation, "chatbot": _chatbot
    }  # fmt: skip
    make = made_by_kind.get(config.kind, _pairs if config.source else _synthetic)
    workload = make(config, vocabulary)
    arrivals = poisson_arrivals(len(workload.requests), config.request_rate, config.seed).tolist()
    return _arriving(workload, arrivals, f"--request_rate={config.request_rate}")


def poisson_arrivals(count: int, rate: float, seed: int) -> np.ndarray:
    """Arrival times in seconds, float64 [count], the first at 0; all 0 when `rate` (1/s) is inf."""
    gaps = np.random.default_rng([seed, 0]).exponential(1 / rate, count)
    return np.cumsum(gaps) - gaps[0]


def _arriving(workload: Workload, arrivals: Sequence[float], cause: str) -> Workload:
    """The workload with these arrival times.

    cause: flag or file to name in the error if an arrival exceeds MAX_ARRIVAL_S.
    """
    last, most = arrivals[-1], files.MAX_ARRIVAL_S
    if not last <= most:  # This refuses NaN as well.
        raise ValueError(f"{cause}: the last request arrives at {last:g} s; at most {most:g} s")
    arrived = [replace(r, arrival_s=s) for r, s in zip(workload.requests, arrivals)]
    return replace(workload, requests=arrived)


def _prompts(config: WorkloadConfig, vocabulary: Vocabulary) -> Workload:
    entries = list(files.read_prompts(config.source))
    if not entries:
        raise ValueError(f"{config.source} holds no prompt")
    return Workload(
        [
            _prompt_request(entry, where, config, vocabulary)
            for where, entry in entries[: config.num_requests]
        ]
    )


def _tasks(config: WorkloadConfig, vocabulary: Vocabulary) -> Workload:
    names = config.source.split(",")
    requests = []
    for i, name in enumerate(names):
        count = (config.num_requests + len(names) - 1 - i) // len(names)
        for prompt in tasks.make_prompts(
            name, config.context_length, count, config.seed, vocabulary.tokenizer
        ):
            entry = task_entry(prompt)
            requests.append(_prompt_request(entry, f"task {name}", config, vocabulary))
    order = np.random.default_rng([config.seed, 1]).permutation(len(requests))
    return Workload([requests[i] for i in order], {"context_length": config.context_length})


def task_entry(prompt: tasks.TaskPrompt) -> dict:
    """A task's prompt as a line of a prompts file. A story has no single answer, so none is set."""
    answer = {} if prompt.task == "story" else {"answer": prompt.answer, "stop": list(prompt.stop)}
    return {"task": prompt.task, "prompt": prompt.prompt, "max_tokens": prompt.max_tokens} | answer


def _prompt_request(
    entry: dict, where: str, config: WorkloadConfig, vocabulary: Vocabulary
) -> Request:
    length, limit = vocabulary.count(entry["prompt"]), vocabulary.max_model_len
    max_tokens = entry.get("max_tokens") or min(config.max_tokens, max(1, limit - length))
    if length == 0:
        raise ValueError(f"{where}: the prompt has no token")
    if length + max_tokens > limit:
        raise ValueError(
            f"{where}: {length} prompt tokens and {max_tokens} new ones exceed the "
            f"{limit} that can be served (max_model_len, kv_cache_tokens)"
        )
    try:
        check_stop_strings(vocabulary.tokenizer, tuple(entry.get("stop", ())))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Request(
        0.0,
        entry["prompt"],
        max_tokens,
        answer=entry.get("answer"),
        stop=tuple(entry.get("stop", ())),
        task=entry.get("task"),
    )


def _pairs(config: WorkloadConfig, vocabulary: Vocabulary) -> Workload:
    """Real prompts with the lengths of their answers, filtered like vLLM's benchmark."""
    read = {"sharegpt": files.read_sharegpt, "alpaca": files.read_alpaca}
    pairs = list(read[config.kind](config.source))
    limit = min(PAPER_CONTEXT, vocabulary.max_model_len)
    requests: list[Request] = []
    filtered = 0
    for i in np.random.default_rng([config.seed, 1]).permutation(len(pairs)):
        if len(requests) == config.num_requests:
            break
        prompt_tokens, output_tokens = map(vocabulary.count, pairs[i])
        short = min(prompt_tokens, output_tokens) < MIN_PAIR_TOKENS
        if short or prompt_tokens > MAX_PAIR_PROMPT or prompt_tokens + output_tokens > limit:
            filtered += 1
            continue
        requests.append(Request(0.0, pairs[i][0], output_tokens, ignore_eos=True))
    if not requests:
        raise ValueError(
            f"{config.source}: none of {len(pairs)} pairs has at least {MIN_PAIR_TOKENS} tokens in "
            f"and out, at most {MAX_PAIR_PROMPT} in and {limit} together"
        )
    return Workload(requests, {"pairs_filtered": filtered})


def _trace(config: WorkloadConfig, vocabulary: Vocabulary) -> Workload:
    limit, rows = vocabulary.max_model_len, files.read_trace(config.source)
    if config.overlong == "drop":
        rows = [row for row in rows if row[1] + row[2] <= limit]
    rows = rows[: config.num_requests]
    if not rows:
        raise ValueError(f"{config.source} holds no request of at most {limit} tokens")
    overlong = [prompt + output for _, prompt, output in rows if prompt + output > limit]
    if overlong and config.overlong == "error":
        raise ValueError(
            f"{config.source}: {len(overlong)} of {len(rows)} requests exceed the "
            f"{limit} tokens that can be served (max_model_len, kv_cache_tokens); the longest has "
            f"{max(overlong)}. --overlong=clip or drop serves the rest"
        )
    lengths = [_clip(prompt, output, limit) for _, prompt, output in rows]
    arrivals = [(time - rows[0][0]) * config.time_scale for time, _, _ in rows]
    requests = _token_requests(lengths, vocabulary, config.seed)
    workload = Workload(requests, {"overlong": config.overlong, "clipped": len(overlong)})
    return _arriving(workload, arrivals, f"{config.source}, --time_scale={config.time_scale}")


def _clip(prompt: int, output: int, limit: int) -> tuple[int, int]:
    # Cut the output first, but not below half of the context; then cut the prompt.
    output = min(output, max(limit // 2, limit - prompt))
    return min(prompt, limit - output), output


def _synthetic(config: WorkloadConfig, vocabulary: Vocabulary) -> Workload:
    lengths, notes = synthetic_lengths.draw_divided(
        config.num_requests, config.kind, config.length_sigma, _context(config, vocabulary),
        config.seed, config.length_divisor,
    )  # fmt: skip
    return Workload(_token_requests(lengths, vocabulary, config.seed), notes)


def _translation(config: WorkloadConfig, vocabulary: Vocabulary) -> Workload:
    """Prompts of a shared prefix (instruction and examples) and a sentence each."""
    context = _context(config, vocabulary)
    prefix_tokens = max(1, PREFIX_TOKENS[config.num_shots] // config.length_divisor)
    if context < prefix_tokens + 2:
        raise ValueError(
            f"a prefix of {prefix_tokens} tokens leaves no room for a prompt and an output in a "
            f"context of {context}: raise --max_model_len or --length_divisor"
        )
    lengths, notes = synthetic_lengths.draw_divided(
        config.num_requests, "translation", config.length_sigma, context - prefix_tokens,
        config.seed, config.length_divisor,
    )  # fmt: skip
    rng = np.random.default_rng([config.seed, 3])
    prefix = rng.choice(vocabulary.ordinary_tokens(), prefix_tokens).tolist()
    requests = [
        replace(request, prompt=prefix + request.prompt)
        for request in _token_requests(lengths, vocabulary, config.seed)
    ]
    return Workload(requests, notes | {"shared_prefix_tokens": prefix_tokens})


def _chatbot(config: WorkloadConfig, vocabulary: Vocabulary) -> Workload:
    lengths, notes = synthetic_lengths.draw_chats(
        config.num_requests, config.length_sigma, PAPER_CONTEXT // config.length_divisor,
        _context(config, vocabulary) // 2, config.seed, config.length_divisor,
    )  # fmt: skip
    return Workload(_token_requests(lengths, vocabulary, config.seed), notes)


def _context(config: WorkloadConfig, vocabulary: Vocabulary) -> int:
    """Tokens of the longest synthetic sequence."""
    return min(PAPER_CONTEXT // config.length_divisor, vocabulary.max_model_len)


def _token_requests(
    lengths: list[tuple[int, int]], vocabulary: Vocabulary, seed: int
) -> list[Request]:
    rng, tokens = np.random.default_rng([seed, 2]), vocabulary.ordinary_tokens()
    return [
        Request(0.0, rng.choice(tokens, prompt).tolist(), output, ignore_eos=True)
        for prompt, output in lengths
    ]
