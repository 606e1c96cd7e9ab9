"""Runs steps on the device: one compiled program for each declared shape."""

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from models.config import ModelConfig
from models.families import family
from models.sampling import sample
from paged import compilations
from paged.clock import VirtualClock, WallClock
from paged.kv_cache.policy import KVPolicy
from paged.step_inputs import StepInputs, empty_step_inputs

COPIES_PER_CALL = 64  # block copies are padded to this, so that they are one program


class PendingTokens(Protocol):
    """The sampled tokens of a dispatched step."""

    def wait(self) -> np.ndarray:
        """Tokens [S] int32 by row, once the step has run."""
        ...


class Executor(Protocol):
    """What the engine asks of a device, real or simulated."""

    @property
    def clock(self) -> WallClock | VirtualClock: ...

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        ...

    def warm_up(self, progress: bool = True) -> None: ...

    def execute(self, inputs: StepInputs) -> PendingTokens: ...

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None: ...


def step(params, cache, last_tokens, inputs: StepInputs, model: ModelConfig, policy: KVPolicy):
    """One step of the model over a paged cache.

    last_tokens: [num_slots] int32, the newest sampled token of each slot; it feeds tokens that the
    host has not read yet. Returns (cache, last_tokens, sampled [S] int32).
    """
    S = inputs.lengths.shape[0]
    slot_of_token = inputs.slots[jnp.minimum(inputs.token_rows, S - 1)]
    from_device = last_tokens.at[slot_of_token].get(mode="fill", fill_value=0)
    tokens = jnp.where(inputs.tokens < 0, from_device, inputs.tokens)

    cache, plan = policy.begin_step(cache, inputs)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        return policy.attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache, plan, inputs)

    hidden, cache = family(model).forward(params, model, tokens, inputs.positions, attend, cache)
    cache = policy.end_step(cache, plan, inputs)

    logits = family(model).logits(params, model, hidden[inputs.last_tokens])
    sampled = sample(logits, inputs.sampling)
    slots = jnp.where(inputs.samples, inputs.slots, last_tokens.shape[0])
    return cache, last_tokens.at[slots].set(sampled, mode="drop"), sampled


class _DeviceTokens:
    def __init__(self, tokens: jax.Array):
        tokens.copy_to_host_async()
        self._tokens = tokens

    def wait(self) -> np.ndarray:
        return np.asarray(self._tokens)


class DeviceExecutor:
    """Owns the parameters, the cache and each slot's newest token; all stay on the device.

    params: as declared by the model, in the dtype to compute and cache in. shapes: the (Tp, Sd)
    of `Buckets.shapes`, compiled by `warm_up`, or without it when first met.
    """

    def __init__(
        self, params, model: ModelConfig, policy: KVPolicy, *, shapes: list[tuple[int, int]],
        num_slots: int, table_width: int, prefill_rows: int,
    ):  # fmt: skip
        self.clock = WallClock()
        self._params, self._policy = params, policy
        self._shapes = shapes
        self._empty = functools.partial(
            empty_step_inputs,
            prefill_rows=prefill_rows, num_slots=num_slots, table_width=table_width,
        )  # fmt: skip
        dtype = params["embed"].dtype
        self._cache = jax.jit(lambda: policy.init(model, dtype))()
        self._last_tokens = jnp.zeros(num_slots, jnp.int32)
        self._step = jax.jit(
            functools.partial(step, model=model, policy=policy), donate_argnums=(1, 2)
        )
        self._copy = jax.jit(policy.copy_pages, donate_argnums=0)
        self._programs: dict[tuple[int, int], jax.stages.Compiled] = {}

    @property
    def compilations(self) -> int:
        return compilations.count()

    def warm_up(self, progress: bool = True) -> None:
        """Compile every declared shape, two at a time, and run each once on padding."""

        with ThreadPoolExecutor(2) as threads:
            compiled = threads.map(self._compile, self._shapes)
            shapes = tqdm(self._shapes, "compiling steps", disable=not progress)
            self._programs = dict(zip(shapes, compiled, strict=True))
        for shape in self._shapes:
            self.execute(self._empty(*shape)).wait()
        self.copy_blocks([(0, 0)])
        jax.block_until_ready(self._cache)

    def _compile(self, shape: tuple[int, int]) -> jax.stages.Compiled:
        assert shape in self._shapes, f"step shape {shape} is not declared"
        inputs = self._empty(*shape)
        return self._step.lower(self._params, self._cache, self._last_tokens, inputs).compile()

    def execute(self, inputs: StepInputs) -> _DeviceTokens:
        shape = inputs.num_prefill_tokens, inputs.tokens.shape[0] - inputs.num_prefill_tokens
        if shape not in self._programs:
            self._programs[shape] = self._compile(shape)
        program = self._programs[shape]
        self._cache, self._last_tokens, sampled = program(
            self._params, self._cache, self._last_tokens, inputs
        )
        return _DeviceTokens(sampled)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) on the device, before the next step (vLLM §4.4)."""
        pairs = np.array(list(copies), np.int32).reshape(-1, 2)
        for at in range(0, len(pairs), COPIES_PER_CALL):
            # Padding copies the null block onto itself.
            padded = np.zeros((COPIES_PER_CALL, 2), np.int32)
            part = pairs[at : at + COPIES_PER_CALL]
            padded[: len(part)] = part
            self._cache = self._copy(self._cache, padded[:, 0].copy(), padded[:, 1].copy())
