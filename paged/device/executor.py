"""Runs steps on the device: one compiled program for each declared shape."""

import itertools
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np
from tqdm import tqdm

from models.params import stack
from models.sampling import MAX_LOGIT_BIAS, SAMPLING_ROW, SamplingState
from paged.blocks.block_pool import NULL_BLOCK
from paged.clock import VirtualClock, WallClock
from paged.device import compilations
from paged.device.step import StepOutputs, StepProgram, stacks
from paged.device.step_inputs import StepInputs
from paged.device.tensor_parallel import SPLIT, SPLIT_BLOCKS, WHOLE

COPIED_TOKENS_PER_CALL = 1024  # block copies are padded to this, so that they are one program


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

    def reset(self) -> None:
        """Start afresh after a failure, with an empty cache, and compile nothing: whatever call was
        interrupted, and this one too."""
        ...


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
        if stacks(shards.platform, layer_bytes):
            params = stack(params)
        self._params = params
        self._shapes = shapes
        self._empty = program.init(params["embed"].dtype)
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
        self.reset()

    def reset(self) -> None:
        # An interrupted call may have donated them and lost what it got for them. What is left of
        # them makes room first.
        self._cache: Any = None
        self._state: Any = None
        self._landing.clear()
        self._cache, self._state = self._empty()

    @property
    def compilations(self) -> int:
        return compilations.count()

    def warm_up(self, progress: bool = True) -> None:
        """Compile every declared shape, on all cores, and run each once on padding."""
        threads = ThreadPoolExecutor(os.cpu_count())
        try:
            compiled = threads.map(self._compile, self._shapes)
            shapes = tqdm(self._shapes, "compiling steps", disable=not progress)
            self._programs = dict(zip(shapes, compiled, strict=True))
        finally:
            # Whoever interrupts this waits for what compiles now, but not for what would come next.
            threads.shutdown(cancel_futures=True)
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
