"""Next-token distributions of a model under a KV policy, at each token of a reference answer.

Measures the log-probability of a reference answer, and the divergence of the next-token
distributions along this answer from another run's distributions. Both measures already change when
the generated answer is still the same. The answer's tokens are forced in decode steps, because a
prefill selects no pages and demotes no tokens.
"""

import io
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.lib import run_record
from models.sampling import MAX_LOGPROBS
from paged.engine import Engine
from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import RequestOutput

Key = tuple[str, int, int]  # task, context and index of a prompt
LEAST = 1e-9  # lower bound of probabilities in a divergence
ROUNDING = 1e-6  # of a sum of float32 probabilities


@dataclass(frozen=True)
class Distributions:
    """Next-token distributions along one answer of n tokens, with A alternatives each. Natural
    log-probabilities are float32 as in files, so that a loaded run equals the saved run.

    logprobs: [n] float32 log-probabilities of the answer's tokens.
    tokens: [n, A] int32 the most probable tokens.
    tops: [n, A] float32 log-probabilities of `tokens`.
    """

    logprobs: np.ndarray
    tokens: np.ndarray
    tops: np.ndarray


def answer_tokens(tokenizer, prompt: str, answer: str) -> tuple[int, ...]:
    """The tokens of an answer after a prompt."""
    before, both = tokenizer.encode(prompt), tokenizer.encode(prompt + answer)
    if both[: len(before)] == before:
        return tuple(both[len(before) :])
    # The tokenizer merges the prompt's end with the answer's start; generation cannot.
    return tuple(tokenizer.encode(answer, add_special_tokens=False))


def of_answers(
    engine: Engine, prompts: Sequence[str], answers: Sequence[str], outputs: Sequence[RequestOutput]
) -> list[Distributions]:
    """The distributions along each reference answer.

    outputs: the engine's own outputs, with all alternatives' log-probabilities. An output that
        equals its answer is used as it is; other answers are forced in another run.
    """
    wanted = [
        answer_tokens(engine.tokenizer, prompt, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    found = list(outputs)
    wrong = [i for i, output in enumerate(outputs) if tuple(output.tokens) != wanted[i]]
    how = [
        SamplingParams(
            max_tokens=len(wanted[i]), forced_output=wanted[i], ignore_eos=True,
            logprobs=MAX_LOGPROBS,
        )
        for i in wrong
    ]  # fmt: skip
    for i, output in zip(wrong, engine.generate([prompts[i] for i in wrong], how), strict=True):
        found[i] = output
    return [_of_output(output) for output in found]


def _of_output(output: RequestOutput) -> Distributions:
    assert output.logprobs, "log-probabilities were not asked for"
    return Distributions(
        np.array([each.logprob for each in output.logprobs], np.float32),
        np.array([[*each.top] for each in output.logprobs], np.int32),
        np.array([[*each.top.values()] for each in output.logprobs], np.float32),
    )


def divergence(ours: Distributions, theirs: Distributions) -> float:
    """Kullback-Leibler divergence of our distributions from theirs, KL(theirs ‖ ours), in nats:
    mean over the answer's tokens.

    Alternatives that both runs have are kept. Those that only the other run has are merged into
    one, and all remaining tokens into another. Our probability of the former is unknown, but at
    most what our own alternatives leave over, and each token's at most our least alternative's. So
    the result is a lower bound; it is tight if the alternatives hold nearly all of the probability.
    """
    total = 0.0
    for tokens, tops, other_tokens, other_tops in zip(
        ours.tokens, ours.tops, theirs.tokens, theirs.tops, strict=True
    ):
        _, at, other_at = np.intersect1d(tokens, other_tokens, return_indices=True)
        all_q, all_p = np.exp(tops.astype(np.float64)), np.exp(other_tops.astype(np.float64))
        q, p = all_q[at], all_p[other_at]
        only_theirs = np.delete(all_p, other_at)
        q_left, p_left = (max(1 - x.sum(), ROUNDING) for x in (q, p))
        p_only = min(only_theirs.sum(), p_left)
        most = min(len(only_theirs) * all_q.min(), max(1 - all_q.sum(), ROUNDING))
        # Of all shares up to `most`, the one with the least divergence.
        q_only = min(most, q_left * p_only / p_left)
        q = np.maximum([*q, q_only, q_left - q_only], LEAST)
        p = np.maximum([*p, p_only, p_left - p_only], LEAST)
        q, p = q / q.sum(), p / p.sum()
        total += float(p @ np.log(p / q))
    return total / len(ours.tokens)


def write(path: str | Path, found: Mapping[Key, Distributions]) -> None:
    """Write an .npz: the keys, and the arrays of all answers, concatenated."""
    content = io.BytesIO()
    np.savez_compressed(
        content,
        task=[task for task, _, _ in found],
        context=[context for _, context, _ in found],
        index=[index for _, _, index in found],
        counts=[len(each.logprobs) for each in found.values()],
        logprobs=_joined(each.logprobs for each in found.values()),
        tokens=_joined(each.tokens for each in found.values()),
        tops=_joined(each.tops for each in found.values()),
    )
    run_record.write_whole(path, content.getvalue())


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    listed = list(arrays)
    return np.concatenate(listed) if listed else np.zeros(0)


def read(path: str | Path) -> dict[Key, Distributions]:
    """Load a file of `write`. Raises ValueError for any other file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        ends = np.cumsum(arrays["counts"])[:-1]
        parts = [np.split(arrays[name], ends) for name in ("logprobs", "tokens", "tops")]
        keys = zip(
            arrays["task"].tolist(), arrays["context"].tolist(), arrays["index"].tolist(),
            strict=True,
        )  # fmt: skip
        return {
            key: Distributions(*each)
            for key, each in zip(keys, zip(*parts, strict=True), strict=True)
        }
    except (
        KeyError, ValueError, TypeError, OSError, EOFError, RuntimeError, zipfile.BadZipFile,
        zlib.error,
    ) as error:  # fmt: skip
        raise ValueError(
            f"{path} is not a distributions file of an evaluation ({error})"
        ) from error
