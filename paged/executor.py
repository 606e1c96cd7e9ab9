"""Runs steps on the device: one compiled program for each declared shape."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from models.config import ModelConfig
from models.families import family
from models.llama import Reduce
from models.params import unstack
from models.sampling import (
    MAX_LOGIT_BIAS,
    SAMPLING_ROW,
    Array,
    Logprobs,
    SamplingArrays,
    SamplingState,
    logprobs_of,
    no_logprobs,
    sample,
)
from paged import compilations
from paged.block_pool import NULL_BLOCK
from paged.clock import VirtualClock, WallClock
from paged.config import EngineConfig
from paged.kv_cache import POLICIES
from paged.kv_cache.policy import KVPolicy
from paged.step_inputs import FROM_DEVICE, StepInputs, empty_step_inputs, step_shapes, unpack
from paged.tensor_parallel import SPLIT, SPLIT_BLOCKS, WHOLE, Shards

COPIED_TOKENS_PER_CALL = 1024  # block copies are padded to this, so that they are one program
CACHED_LAYER_BYTES = 2**22  # weights of a layer that a CPU's caches hold
# XLA takes each write into the pools for a copy of them, and to save memory that it does not need
# would compute attention twice.
GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


@flax.struct.dataclass
class StepOutputs:
    """What a step gives back.

    tokens: [I, S] int32, by iteration and row.  logprobs: of these tokens, [I, S].
    prompt_logprobs: of `StepInputs.prompt_targets`, [Tp].  On the host either is None if no row
    asked for it.
    """

    tokens: Array
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class PendingOutputs(Protocol):
    """The outputs of a dispatched step."""

    def wait(self) -> StepOutputs:
        """Numpy arrays, once the step has run."""
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

    def execute(self, inputs: StepInputs) -> PendingOutputs: ...

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None: ...

    def swap_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks (block, host block) to the host's memory."""
        ...

    def swap_in(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks (host block, block) back."""
        ...

    def load_slot(self, slot: int, tokens: np.ndarray, logit_bias: Mapping[int, float]) -> None:
        """Bring what sampling must know of a sequence: its tokens so far, and its logit bias."""
        ...


def _iterate(params, cache, state, inputs, model, policy, reduce):
    """One pass of the model: (cache, state, tokens [S], logprobs [S], hidden [T, E])."""
    S = inputs.lengths.shape[0]
    slot_of_token = inputs.slots[jnp.minimum(inputs.token_rows, S - 1)]
    sampled_before = state.history.at[slot_of_token, inputs.positions].get(
        mode="fill", fill_value=0
    )
    tokens = jnp.where(inputs.tokens < 0, sampled_before, inputs.tokens)

    cache, plan = policy.begin_step(cache, inputs)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        return policy.attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache, plan, inputs)

    hidden, cache = family(model).forward(
        params, model, tokens, inputs.positions, attend, cache, reduce=reduce
    )
    cache = policy.end_step(cache, plan, inputs)

    logits = family(model).logits(params, model, hidden[inputs.last_tokens])
    how = SamplingArrays.of_rows(inputs.sampling)
    sampled = sample(logits, how, inputs.lengths, state, inputs.slots)
    logprobs = jax.lax.cond(
        jnp.any(how.logprobs != 0),
        lambda: logprobs_of(logits, sampled),
        lambda: no_logprobs((S,), model.vocab_size),
    )
    slots = jnp.where(inputs.samples != 0, inputs.slots, state.history.shape[0])
    history = state.history.at[slots, inputs.lengths].set(sampled, mode="drop")
    return cache, replace(state, history=history), sampled, logprobs, hidden


def _next_iteration(inputs: StepInputs, done) -> StepInputs:
    """A step of decodes once `done` iterations have run; finished rows become padding."""
    goes_on = inputs.iterations > done
    S = inputs.lengths.shape[0]
    num_slots = jnp.iinfo(jnp.int32).max
    return replace(
        inputs,
        tokens=jnp.full_like(inputs.tokens, FROM_DEVICE),
        positions=jnp.where(goes_on, inputs.positions + 1, 0),
        token_rows=jnp.where(goes_on, inputs.token_rows, S),
        lengths=jnp.where(goes_on, inputs.lengths + 1, 0),
        slots=jnp.where(goes_on, inputs.slots, num_slots),
        samples=inputs.samples * goes_on,
    )


def _prompt_logprobs(params, hidden_TxE, targets_T, model: ModelConfig) -> Logprobs:
    """Of prompt tokens targets [Tp], where they are not -1, by chunks: few logits at a time."""
    Tp = targets_T.shape[0]

    def of_chunk(chunk):
        hidden, targets = chunk
        return logprobs_of(family(model).logits(params, model, hidden), targets)

    def compute():
        chunk = min(Tp, 64)
        padding = -Tp % chunk
        hidden = jnp.pad(hidden_TxE[:Tp], ((0, padding), (0, 0)))
        targets = jnp.pad(targets_T, (0, padding))
        chunks = hidden.reshape(-1, chunk, model.hidden_size), targets.reshape(-1, chunk)
        parts = jax.lax.map(of_chunk, chunks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:Tp], parts)

    return jax.lax.cond(
        jnp.any(targets_T >= 0), compute, lambda: no_logprobs((Tp,), model.vocab_size)
    )


def step(
    params, cache, state: SamplingState, inputs: StepInputs, model: ModelConfig, policy: KVPolicy,
    multi_step: int = 1, reduce: Reduce = lambda y: y,
):  # fmt: skip
    """One step of the model over a paged cache: (cache, state, StepOutputs).

    `state` feeds tokens that the host has not read yet. A step of decodes alone runs up to
    `multi_step` iterations, as many as its longest row asks for; each feeds the next. On a shard
    `params`, `cache` and `model` are its own, and `reduce` is the model's seam to the others.
    """
    Tp, S = inputs.num_prefill_tokens, inputs.lengths.shape[0]
    if Tp or multi_step == 1:
        cache, state, tokens, logprobs, hidden = _iterate(
            params, cache, state, inputs, model, policy, reduce
        )
        prompt = _prompt_logprobs(params, hidden, inputs.prompt_targets, model) if Tp else None
        first = jax.tree.map(lambda x: x[None], StepOutputs(tokens, logprobs))
        return cache, state, replace(first, prompt_logprobs=prompt)

    def body(i, carry):
        cache, state, now, outputs = carry
        cache, state, tokens, logprobs, _ = _iterate(
            params, cache, state, now, model, policy, reduce
        )
        outputs = jax.tree.map(
            lambda all_, new: all_.at[i].set(new), outputs, StepOutputs(tokens, logprobs)
        )
        return cache, state, _next_iteration(now, i + 1), outputs

    outputs = StepOutputs(
        jnp.zeros((multi_step, S), jnp.int32), no_logprobs((multi_step, S), model.vocab_size)
    )
    cache, state, _, outputs = jax.lax.fori_loop(
        0, jnp.max(inputs.iterations), body, (cache, state, inputs, outputs)
    )
    return cache, state, outputs


class _DeviceOutputs:
    def __init__(self, outputs: StepOutputs, inputs: StepInputs):
        # Log-probabilities are of many times a token's bytes: they stay where they are if unasked.
        if not np.any(inputs.sampling.view(SAMPLING_ROW)["logprobs"]):
            outputs = replace(outputs, logprobs=None)
        if not np.any(inputs.prompt_targets >= 0):
            outputs = replace(outputs, prompt_logprobs=None)
        for leaf in jax.tree.leaves(outputs):
            leaf.copy_to_host_async()
        self._outputs = outputs

    def wait(self) -> StepOutputs:
        return jax.tree.map(np.asarray, self._outputs)


@dataclass(frozen=True)
class StepProgram:
    """The step as an engine's configuration declares it, to be compiled for each shape (Tp, Sd) of
    `Buckets.shapes`; holds no arrays."""

    shards: Shards
    policy: KVPolicy
    num_slots: int
    table_width: int
    prefill_rows: int
    max_tokens: int
    multi_step: int

    @classmethod
    def declare(
        cls, config: EngineConfig, shards: Shards, implementation: str | None = None
    ) -> "StepProgram":
        """`implementation` goes to the attention ops."""
        policy = POLICIES[config.policy]
        return cls(
            shards,
            policy.device(config, shards.model, implementation),
            num_slots=config.max_num_seqs,
            table_width=policy.host(config).table_width,
            prefill_rows=config.max_prefills_per_step,
            max_tokens=config.max_model_len,
            multi_step=config.multi_step,
        )

    def init(self, dtype) -> jax.stages.Wrapped:
        """Gives an empty cache in `dtype`, and the slots' sampling state."""

        def empty():
            cache = self.policy.init(self.shards.model, dtype)
            return cache, SamplingState.empty(self.num_slots, self.max_tokens)

        return self.shards.jit(empty, (), (SPLIT, WHOLE))

    def empty_inputs(self, shape: tuple[int, int]) -> StepInputs:
        return empty_step_inputs(*shape, self.prefill_rows, self.num_slots, self.table_width)

    def compile(self, shape: tuple[int, int], params, cache, state) -> jax.stages.Compiled:
        """(params, cache, state, packed) -> (cache, state, StepOutputs), with cache and state
        donated; the arguments may be `ShapeDtypeStruct`s that say where they lie."""
        packed = self.empty_inputs(shape).packed
        lowered = self._jit(shape, params).lower(params, cache, state, packed)
        return lowered.compile(GPU_OPTIONS if self.shards.platform == "gpu" else None)

    def check(self, shape: tuple[int, int], dtype) -> None:
        """Raises ValueError if the attention ops cannot compute in `dtype`."""
        params, caches = self.shards.abstract_params(dtype), jax.eval_shape(self.init(dtype))
        packed = self.empty_inputs(shape).packed
        jax.eval_shape(self._jit(shape, params), params, *caches, packed)

    def _jit(self, shape: tuple[int, int], params) -> jax.stages.Wrapped:
        shapes = step_shapes(*shape, self.prefill_rows, self.table_width)

        def run(params, cache, state, packed):
            return step(
                params, cache, state, unpack(packed, shapes), self.shards.model, self.policy,
                self.multi_step, self.shards.reduce,
            )  # fmt: skip

        specs = self.shards.specs(params), SPLIT, WHOLE, WHOLE
        return self.shards.jit(run, specs, (SPLIT, WHOLE, WHOLE), donate_argnums=(1, 2))


def unstacks(platform: str, layer_bytes: int) -> bool:
    """Whether the step reads each layer's weights, of `layer_bytes`, as arrays of their own.

    A scan over stacked layers copies each one's weights before it multiplies by them. That triples
    what a decode step's products read and write; only a CPU's caches can hide it.
    """
    return platform == "gpu" or (platform == "cpu" and layer_bytes > CACHED_LAYER_BYTES)


class DeviceExecutor:
    """Owns the parameters, the cache and the slots' sampling state; all stay on the devices.

    params: as declared by the whole model, in the dtype to compute and cache in. shapes: the
    (Tp, Sd) of `Buckets.shapes`, compiled by `warm_up`, or without it when first met.
    """

    def __init__(
        self, params, program: StepProgram, *, shapes: list[tuple[int, int]], num_blocks: int,
        page_size: int,
    ):  # fmt: skip
        self.clock = WallClock()
        self._program = program
        shards, policy = program.shards, program.policy
        params = shards.place(params)
        layers = jax.tree.leaves(params["layers"])
        layer_bytes = sum(x.nbytes for x in layers) // shards.model.num_layers
        if unstacks(shards.platform, layer_bytes):
            params = unstack(params)
        self._params = params
        self._shapes = shapes
        self._cache, self._state = program.init(params["embed"].dtype)()
        self._load = shards.jit(SamplingState.load_slot, (WHOLE,) * 5, WHOLE, donate_argnums=0)
        self._copy = shards.jit(policy.copy_pages, (SPLIT, WHOLE, WHOLE), SPLIT, donate_argnums=0)
        self._export = shards.jit(policy.export_pages, (SPLIT, WHOLE), SPLIT_BLOCKS)
        self._import = shards.jit(
            policy.import_pages, (SPLIT, WHOLE, SPLIT_BLOCKS), SPLIT, donate_argnums=0
        )
        self._num_blocks = num_blocks
        self._copies_per_call = -(-COPIED_TOKENS_PER_CALL // page_size)
        self._landing: list[tuple[np.ndarray, Any]] = []  # (host blocks, content) on their way
        self._host_pool: Any = None
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
            self.execute(self._program.empty_inputs(shape)).wait()
        for count in (1, self._state.history.shape[0]):
            self.copy_blocks([(NULL_BLOCK, NULL_BLOCK)] * count)
        self.swap_out([(0, 0)])
        self.swap_in([(0, 0)])
        # A slot beyond the last: any other may be in use.
        self.load_slot(self._state.history.shape[0], np.zeros(0, np.int32), {})
        jax.block_until_ready(self._cache)

    def _compile(self, shape: tuple[int, int]) -> jax.stages.Compiled:
        assert shape in self._shapes, f"step shape {shape} is not declared"
        return self._program.compile(shape, self._params, self._cache, self._state)

    def execute(self, inputs: StepInputs) -> _DeviceOutputs:
        shape = inputs.num_prefill_tokens, inputs.tokens.shape[0] - inputs.num_prefill_tokens
        if shape not in self._programs:
            self._programs[shape] = self._compile(shape)
        program = self._programs[shape]
        self._cache, self._state, outputs = program(
            self._params, self._cache, self._state, inputs.packed
        )
        return _DeviceOutputs(outputs, inputs)

    def load_slot(self, slot: int, tokens: np.ndarray, logit_bias: Mapping[int, float]) -> None:
        history = np.zeros(self._program.max_tokens, np.int32)
        history[: len(tokens)] = tokens
        bias_tokens = np.zeros(MAX_LOGIT_BIAS, np.int32)
        bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
        bias_tokens[: len(logit_bias)] = list(logit_bias.keys())
        bias_values[: len(logit_bias)] = list(logit_bias.values())
        self._state = self._load(self._state, np.int32(slot), history, bias_tokens, bias_values)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) on the device, before the next step (vLLM §4.4): in one
        operation (§5.1), as a step copies at most one block of each sequence."""
        copies = list(copies)
        # Padding to the most there can be would cost most in steps that copy little.
        few = len(copies) <= self._copies_per_call
        size = self._copies_per_call if few else self._state.history.shape[0]
        for pairs in _parts(copies, size, padding=NULL_BLOCK):
            self._cache = self._copy(self._cache, pairs[:, 0].copy(), pairs[:, 1].copy())

    def swap_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks (block, host block) to the host's memory (vLLM §4.5): a gather and a transfer
        for many of them, for which the steps that follow do not wait."""
        self._land()
        for part in _parts(pairs, self._copies_per_call, padding=NULL_BLOCK):
            content = self._export(self._cache, part[:, 0].copy())
            for leaf in jax.tree.leaves(content):
                leaf.copy_to_host_async()
            self._landing.append((part[:, 1], content))

    def swap_in(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks (host block, block) back: a transfer and a scatter for many of them."""
        self._land()
        nowhere = self._num_blocks
        for part in _parts(pairs, self._copies_per_call, padding=nowhere):
            on_host = np.where(part[:, 0] == nowhere, NULL_BLOCK, part[:, 0])
            content = jax.tree.map(operator.itemgetter(on_host), self._host_pool)
            self._cache = self._import(self._cache, part[:, 1].copy(), content)

    def _land(self) -> None:
        """Bring what is on its way into the host's pool; padding lands in the null block."""
        for blocks, content in self._landing:
            if self._host_pool is None:
                # Untouched pages of it are not resident.
                self._host_pool = jax.tree.map(
                    lambda x: np.empty((self._num_blocks, *x.shape[1:]), x.dtype), content
                )
            pools, contents = jax.tree.leaves(self._host_pool), jax.tree.leaves(content)
            for pool, pages in zip(pools, contents, strict=True):
                pool[blocks] = pages
        self._landing.clear()


def _parts(pairs: Iterable[tuple[int, int]], size: int, padding: int) -> Iterator[np.ndarray]:
    """The pairs as arrays [size, 2] int32, the last one padded."""
    for part in itertools.batched(pairs, size):
        padded = np.full((size, 2), padding, np.int32)
        padded[: len(part)] = part
        yield padded
