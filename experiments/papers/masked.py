"""A model's answers when it sees a part of its context, by forward passes without an engine.

A prompt passes through the model once, with causal attention or a study's own. Then the right
answer passes through it once for each mask. An answer is right if each of its tokens after the
first is the likeliest after the right tokens before it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.study import Run
from experiments.tasks import tasks
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from models.families import family
from models.full_attention import causal_attend

# Prompts, and answers, are padded to multiples of it, so that programs are few. Masks by pages rely
# on it too.
MULTIPLE = 64
# (layer, q [R, K, G, D], keys [S, K, D], positions [R], ...) -> the tokens [R, K, S] that each
# query sees, bool; later tokens are masked elsewhere. A size may be 1.
Seen = Callable[..., jax.Array]


@dataclass(frozen=True)
class Rows:
    """The rows of a prompt, as `Run.once` keeps them."""

    fields: list[list]


@dataclass(frozen=True)
class Question:
    """A prompt and its right answer, as token ids."""

    prompt: list[int]
    answer: list[int]

    def first_wrong(self, likeliest: np.ndarray) -> int:
        """Index of the answer's first wrong token; -1 if the answer is right. likeliest: the
        likeliest tokens after each but the last of the answer's."""
        wrong = np.flatnonzero(likeliest != self.answer[1:])
        return int(wrong[0]) + 1 if len(wrong) else -1


@lru_cache(maxsize=1)
def questions_of(flags: Any, task: str, context: int) -> list[Question]:
    """The questions of a study's model, number of prompts and seed. Raises ValueError for an
    unknown task, one that does not fit the context, one whose answers are shorter than two tokens,
    and a tokenizer that merges prompt and answer."""
    tokenizer, found = load_tokenizer(flags.model), []
    prompts = tasks.make_prompts(task, context, flags.num_prompts, flags.seed, tokenizer)
    for each in prompts:
        prompt = tokenizer(each.prompt)["input_ids"]
        whole = tokenizer(each.prompt + each.answer)["input_ids"]
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                f"the tokenizer of {flags.model} merges the end of a prompt and its answer"
            )
        found.append(Question(prompt, whole[len(prompt) :]))
    if min(len(each.answer) for each in found) < 2:
        raise ValueError(f"answers of {task} must have at least two tokens")
    return found


@lru_cache(maxsize=1)
def loaded(model: str):
    """The model's configuration and parameters."""
    return checkpoint.load(model)


def fields_of(
    run: Run, of_prompt: Callable[..., Rows], flags: Any, cases: Iterable[Any], num_prompts: int
) -> Iterator[list]:
    """The fields of the rows of `of_prompt(flags, case, index)` for each case and prompt, kept by
    the run, until it is stopped."""
    for case in cases:
        for index in tqdm(range(num_prompts), str(case)):
            if run.stopped():
                return
            yield from run.once(of_prompt, flags, case, index).fields


def check_distinct(**flags: Sequence) -> None:
    """Raises ValueError for a flag that names a value twice."""
    for name, given in flags.items():
        if len(set(given)) < len(given):
            raise ValueError(f"--{name} names a value twice: {', '.join(map(str, given))}")


def padded(tokens: list[int]) -> np.ndarray:
    found = np.zeros(-(-len(tokens) // MULTIPLE) * MULTIPLE, np.int32)
    found[: len(tokens)] = tokens
    return found


class Asked:
    """A question whose prompt has passed through the model.

    attend: the prompt's attention, as `causal_attend` returns it. It gets `state` in the first
        layer, and returns (attention, new state) in each; `found` is the last layer's.
    """

    def __init__(
        self, params, config: ModelConfig, question: Question, attend: Callable | None = None,
        state: Any = None,
    ):  # fmt: skip
        self.params, self.config, self.start = params, config, len(question.prompt)
        self.tokens, self.rows = padded(question.answer[:-1]), len(question.answer) - 1
        prompt = padded(question.prompt)
        self.places = len(prompt) + len(self.tokens)  # S
        empty = jnp.zeros((config.num_layers, 2, self.places, config.num_kv_heads, config.head_dim))
        self.kv, self.found = _prefill(params, config, attend, prompt, empty, state)

    def likeliest(self, seen: Seen, *arrays, **static) -> np.ndarray:
        """The likeliest token after each but the last of the answer's. `seen` gets the arrays, and
        the static values by name."""
        how = self.config, seen, tuple(sorted(static.items()))
        found = _likeliest(self.params, *how, self.kv, self.start, self.tokens, *arrays)
        return np.asarray(found)[: self.rows]


def everything(layer, q_RxKxGxD, keys_SxKxD, at_R):
    """A `Seen` that leaves nothing out."""
    return jnp.ones((1, 1, 1), bool)


def attention(q_RxKxGxD, keys_SxKxD, values_SxKxD, mask_RxKxS, scale: float):
    """[R, K, G, D] the attention of each query to the tokens of its mask."""
    logits = jnp.einsum("rkgd,skd->rkgs", q_RxKxGxD, keys_SxKxD) * scale
    probs = jax.nn.softmax(jnp.where(mask_RxKxS[:, :, None], logits, -jnp.inf))
    return jnp.einsum("rkgs,skd->rkgd", probs, values_SxKxD)


@partial(jax.jit, static_argnums=(1, 2))
def _prefill(params, config: ModelConfig, given, tokens_T, kv_Lx2xSxKxD, state):
    """The keys and values of a prompt, written to the first T of S places, and the state of the
    attention `given`."""
    exact = given or causal_attend(config)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, carry):
        kv, state = carry
        kv = kv.at[layer, :, : len(tokens_T)].set(jnp.stack([k_TxKxD, v_TxKxD]))
        out, state = exact(layer, q_TxHxD, k_TxKxD, v_TxKxD, state)
        return out, (kv, state)

    positions = jnp.arange(len(tokens_T))
    carry = kv_Lx2xSxKxD, state
    return family(config).forward(params, config, tokens_T, positions, attend, carry)[1]


@partial(jax.jit, static_argnums=(1, 2, 3))
def _likeliest(
    params, config: ModelConfig, seen: Seen, static: tuple, kv_Lx2xSxKxD, start, tokens_R, *arrays
):
    """[R] the likeliest token after each of R tokens from position `start` on."""
    K, D = config.num_kv_heads, config.head_dim
    S, at_R = kv_Lx2xSxKxD.shape[2], start + jnp.arange(len(tokens_R))
    past = jnp.arange(S) <= at_R[:, None, None]

    def attend(layer, q_RxHxD, k_RxKxD, v_RxKxD, cache):
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(kv_Lx2xSxKxD[layer, i], new, start, 0)
            for i, new in enumerate((k_RxKxD, v_RxKxD))
        )
        q = q_RxHxD.reshape(len(tokens_R), K, -1, D)
        mask = past & seen(layer, q, keys, at_R, *arrays, **dict(static))
        out = attention(q, keys, values, mask, config.attention.scale)
        return out.reshape(q_RxHxD.shape), cache

    model = family(config)
    hidden, _ = model.forward(params, config, tokens_R, at_R, attend, None)
    return model.logits(params, config, hidden).argmax(-1)


def percent_right(first_wrong: Iterable[int]) -> float:
    return 100 * float(np.mean([each < 0 for each in first_wrong]))
