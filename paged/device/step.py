"""The step of an engine: one pass of the model or several, as one program on the device."""

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from models.common import ALONE, Adapters, Reduce
from models.config import ModelConfig
from models.families import family
from models.sampling import (
    Array,
    Logprobs,
    SamplingArrays,
    SamplingState,
    logprobs_of,
    no_logprobs,
    sample,
)
from paged.adapters.pool import AdapterPool
from paged.config import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.moves import Pool
from paged.kv_cache.policy import DevicePolicy
from paged.step_inputs import FROM_DEVICE, StepInputs, empty_step_inputs, step_layout, unpack
from paged.tensor_parallel import REPLICATED, SPLIT, Shards, shared

CACHED_LAYER_BYTES = 2**22  # weights of a layer that a CPU's caches hold
# XLA mistakes each write into the pools for a copy of the pools. Its rematerialization pass would
# compute attention twice, to save the memory of such copies.
GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


@flax.struct.dataclass
class StepOutputs:
    """The outputs of a step.

    tokens: [I, S] int32, by iteration and row.
    logprobs: [I, S] log-probabilities of these tokens; None on the host if no row requests any.
    prompt_logprobs: [Tp] log-probabilities of `StepInputs.prompt_targets`; None on the host if no
        row requests any.
    report: the KV policy's report, [num_shards, ...], or None.
    """

    tokens: Array
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    report: Any = None


def _iterate(params, cache, state, inputs, model, policy, adapters, reduce):
    """One pass of the model: (cache, state, tokens [S], logprobs [S], hidden [T, W])."""
    tokens = tokens_of(state, inputs)
    cache, plan = policy.begin_step(cache, inputs)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache):
        return policy.attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, cache, plan, inputs)

    hidden, cache = family(model).forward(
        params, model, tokens, inputs.positions, attend, cache, adapters, reduce
    )
    cache = policy.end_step(cache, plan, inputs)
    return cache, *sample_tokens(params, state, inputs, model, hidden), hidden


def tokens_of(state: SamplingState, inputs: StepInputs):
    """[T] the step's tokens, with those that the host has not read."""
    S = inputs.lengths.shape[0]
    slot_of_token = inputs.slots[jnp.minimum(inputs.token_rows, S - 1)]
    sampled_before = state.history.at[slot_of_token, inputs.positions].get(
        mode="fill", fill_value=0
    )
    return jnp.where(inputs.tokens < 0, sampled_before, inputs.tokens)


def sample_tokens(params, state: SamplingState, inputs: StepInputs, model: ModelConfig, hidden):
    """(state, tokens [S], logprobs [S]) after sampling from `hidden` [T, W]."""
    S = inputs.lengths.shape[0]
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
    return replace(state, history=history), sampled, logprobs


def _next_iteration(inputs: StepInputs, done) -> StepInputs:
    """Inputs of a decode step's next iteration, after `done` iterations. Finished rows become
    padding."""
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
    """Log-probabilities of the prompt tokens `targets_T` [Tp], of which -1 stands for no token.
    Computed in chunks, to hold few logits at a time."""
    Tp = targets_T.shape[0]

    def of_chunk(chunk):
        hidden, targets = chunk
        return logprobs_of(family(model).logits(params, model, hidden), targets)

    def compute():
        chunk = min(Tp, 64)
        padding = -Tp % chunk
        hidden = jnp.pad(hidden_TxE[:Tp], ((0, padding), (0, 0)))
        targets = jnp.pad(targets_T, (0, padding))
        chunks = hidden.reshape(-1, chunk, hidden.shape[-1]), targets.reshape(-1, chunk)
        parts = jax.lax.map(of_chunk, chunks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:Tp], parts)

    return jax.lax.cond(
        jnp.any(targets_T >= 0), compute, lambda: no_logprobs((Tp,), model.vocab_size)
    )


def step(
    params, cache, state: SamplingState, inputs: StepInputs, model: ModelConfig,
    policy: DevicePolicy, multi_step: int = 1, adapters: Adapters | None = None,
    reduce: Reduce = ALONE,
):  # fmt: skip
    """One step of the model over a paged cache: (cache, state, StepOutputs).

    `state` has the tokens that the host has not read yet. A step without prefill runs up to
    `multi_step` iterations, as many as its longest row needs. The tokens of an iteration are the
    inputs of the next iteration.

    params, cache, model: the shard's own.
    adapters: adds the LoRA products to the model's projections; None without adapters.
    reduce: sum and maximum over all shards.
    """
    Tp, S = inputs.num_prefill_tokens, inputs.lengths.shape[0]
    if Tp or multi_step == 1:
        cache, state, tokens, logprobs, hidden = _iterate(
            params, cache, state, inputs, model, policy, adapters, reduce
        )
        prompt = _prompt_logprobs(params, hidden, inputs.prompt_targets, model) if Tp else None
        first = jax.tree.map(lambda x: x[None], StepOutputs(tokens, logprobs))
        return cache, state, replace(first, prompt_logprobs=prompt)

    def body(i, carry):
        cache, state, now, outputs = carry
        cache, state, tokens, logprobs, _ = _iterate(
            params, cache, state, now, model, policy, adapters, reduce
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


@dataclass(frozen=True)
class StepProgram:
    """The step as an engine's configuration declares it, to be compiled for each shape (Tp, Sd) of
    `Buckets.shapes`. It has no arrays. Equal programs of a process are traced and compiled once.

    adapters: pool of adapters; None if none are configured.

    Raises ValueError for a policy whose device half has no hash.
    """

    shards: Shards
    policy: DevicePolicy
    pools: tuple[Pool, ...]
    slot_state: bool
    num_slots: int
    table_width: int
    prefill_rows: int
    max_tokens: int
    multi_step: int
    adapters: AdapterPool | None = None

    def __post_init__(self):
        try:
            hash(self.policy)
        except TypeError as error:
            raise ValueError(f"a policy's device half must be hashable: {error}") from None

    @classmethod
    def declare(
        cls, config: EngineConfig, shards: Shards, implementation: str | None = None
    ) -> "StepProgram":
        """`implementation` goes to the attention ops and the adapters' ops."""
        policy = policy_of(config.policy)
        sizes = policy.sizes(config, shards.sharded)
        return cls(
            shards,
            policy.device(config, shards.sharded, implementation),
            pools=sizes.pools,
            slot_state=config.parts.slot_state,
            num_slots=config.max_num_seqs,
            table_width=sizes.table_width,
            prefill_rows=config.max_prefills_per_step,
            max_tokens=config.max_model_len,
            multi_step=config.multi_step,
            adapters=AdapterPool.declare(config, implementation),
        )

    def init(self, dtype) -> jax.stages.Wrapped:
        """A function that returns an empty cache in `dtype`, and the slots' sampling state."""

        return _init(self, str(jnp.dtype(dtype)))

    def empty_inputs(self, shape: tuple[int, int]) -> StepInputs:
        return empty_step_inputs(
            *shape, self.prefill_rows, self.num_slots, self.table_width, self.adapters is not None
        )

    def compile(
        self, shape: tuple[int, int], params, adapters, cache, state, gpu_options=GPU_OPTIONS
    ) -> jax.stages.Compiled:
        """The program (params, adapters, cache, state, packed) -> (cache, state, StepOutputs). It
        donates cache and state. Its arguments may be `ShapeDtypeStruct`s with shardings."""
        packed = self.empty_inputs(shape).packed
        lowered = self._jit(shape, params, adapters).lower(params, adapters, cache, state, packed)
        return lowered.compile(gpu_options if self.shards.platform == "gpu" else None)

    def check(self, shape: tuple[int, int], dtype) -> None:
        """Raise ValueError if the attention ops cannot compute in `dtype`."""
        params, caches = self.shards.abstract_params(dtype), jax.eval_shape(self.init(dtype))
        packed = self.empty_inputs(shape).packed
        adapters = self.adapters and self.adapters.abstract(self.shards, dtype)
        jax.eval_shape(self._jit(shape, params, adapters), params, adapters, *caches, packed)

    def _jit(self, shape: tuple[int, int], params, adapters) -> jax.stages.Wrapped:
        specs, structure = jax.tree.flatten(self.shards.specs((params, adapters)))
        jits, key = _jits(self), (shape, structure, *specs)
        if key not in jits:
            jits[key] = self._jit_of(shape, *jax.tree.unflatten(structure, specs))
        return jits[key]

    def _jit_of(self, shape: tuple[int, int], of_params, of_adapters) -> jax.stages.Wrapped:
        pool = self.adapters
        layout = step_layout(*shape, self.prefill_rows, self.table_width, pool is not None)

        def run(params, adapters, cache, state, packed):
            inputs = unpack(packed, layout)
            hook = pool.hook(self.shards.model, adapters, inputs) if pool else None
            cache, state, outputs = step(
                params, cache, state, inputs, self.shards.model, self.policy, self.multi_step, hook,
                self.shards.reduce,
            )  # fmt: skip
            report = jax.tree.map(lambda x: x[None], self.policy.report(cache))
            return cache, state, replace(outputs, report=report)

        whole: Any = REPLICATED
        outputs = StepOutputs(whole, whole, whole, SPLIT)
        return self.shards.jit(
            run, (of_params, of_adapters, SPLIT, REPLICATED, REPLICATED),
            (SPLIT, REPLICATED, outputs), donate_argnums=(2, 3),
        )  # fmt: skip


@shared
def _jits(program: StepProgram) -> dict[Any, jax.stages.Wrapped]:
    """The jitted steps of a program, by shape and by partition specs of the arguments."""
    return {}


@shared
def _init(program: StepProgram, dtype: str) -> jax.stages.Wrapped:
    def empty():
        cache = program.policy.init(dtype, program.shards.number())
        return cache, SamplingState.empty(program.num_slots, program.max_tokens)

    return program.shards.jit(empty, (), (SPLIT, REPLICATED))


def stacks(platform: str, layer_bytes: int) -> bool:
    """Whether the step scans over stacked layers, each of `layer_bytes` of weights.

    A scan compiles one layer instead of all, but copies each layer's weights before use: three
    times the memory traffic of a decode step's products. Only a CPU's caches can hide the copies.
    """
    return platform == "cpu" and layer_bytes <= CACHED_LAYER_BYTES
