"""Runs steps on the device: one compiled program for each declared shape."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from tqdm import tqdm

from models import w4a8, w8a8
from models.families import family
from models.params import stack
from models.sampling import MAX_LOGIT_BIAS, SAMPLING_ROW, SamplingState
from paged.adapters.device import DeviceAdapters
from paged.adapters.loads import AdapterLoads
from paged.adapters.pool import ResidentAdapters
from paged.clock import VirtualClock, WallClock
from paged.device import compilations
from paged.device.mover import SlotMover, UnitMover
from paged.device.step import StepOutputs, StepProgram, stacks
from paged.kv_cache.moves import Moves
from paged.kv_cache.policy import CacheConfig, ShardedModel, SimulatedDevice
from paged.step_inputs import StepInputs
from paged.tensor_parallel import REPLICATED


class PendingOutputs(Protocol):
    """The outputs of a dispatched step."""

    def wait(self) -> StepOutputs:
        """Wait for the step; returns its outputs as numpy arrays."""
        ...


class Executor(Protocol):
    """The engine's interface to a device, real or simulated."""

    @property
    def clock(self) -> WallClock | VirtualClock: ...

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        ...

    def warm_up(self, progress: bool = True) -> None: ...

    @property
    def dtype(self) -> str:
        """The model's compute dtype."""
        ...

    @property
    def adapters(self) -> AdapterLoads | None:
        """Loads adapters to the device; None or unused if none are configured."""
        ...

    def apply(self, moves: Moves) -> None:
        """Start all moves except `moves.after`, before the next step."""
        ...

    def execute(self, inputs: StepInputs) -> PendingOutputs: ...

    def apply_after(self, moves: Moves) -> None:
        """Start `moves.after`, after the last executed step."""
        ...

    def load_slot(self, slot: int, tokens: np.ndarray, logit_bias: Mapping[int, float]) -> None:
        """Load a sequence's sampling inputs: its tokens so far, then its forced tokens that are not
        generated yet, and its logit bias."""
        ...

    def reset(self) -> None:
        """Start afresh after a failure, with an empty cache, and compile nothing. Any earlier call,
        of `reset` too, may have been interrupted."""
        ...


@runtime_checkable
class ReportingExecutor(Protocol):
    """An executor in simulated time. It has no device half that could report to the host half."""

    def report_by(
        self, simulated: Callable[..., SimulatedDevice], config: CacheConfig, model: ShardedModel
    ) -> None:
        """From the next step on, return reports of this simulated device half."""
        ...


class _DeviceOutputs:
    def __init__(self, outputs: StepOutputs, inputs: StepInputs):
        # Log-probabilities are many times larger than tokens, and are copied only if requested.
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

    params: parameters of the whole model, in the compute dtype.
    shapes: the (Tp, Sd) of `Buckets.shapes`, compiled by `warm_up`, or at their first use.
    adapter_host_bytes: bytes of adapters kept in the host's memory.
    quantization: see `EngineConfig`.
    """

    def __init__(
        self, params, program: StepProgram, *, shapes: list[tuple[int, int]],
        adapter_host_bytes: int = 0, quantization: str = "none",
    ):  # fmt: skip
        self.clock = WallClock()
        self.program = program
        shards, policy = program.shards, program.policy
        params = shards.place(params)
        if quantization != "none":
            quantize = {"w8a8": w8a8.quantize, "w4a8": w4a8.quantize}[quantization]
            params = quantize(params, family(shards.model).PROJECTIONS)
        layers = jax.tree.leaves(params["layers"])
        layer_bytes = sum(x.nbytes for x in layers) // shards.model.num_layers
        if stacks(shards.platform, layer_bytes):
            params = stack(params)
        self.params = params
        self._shapes = shapes
        dtype = params["embed"].dtype
        self.adapters: DeviceAdapters | None = None
        if program.adapters:
            self.adapters = DeviceAdapters(shards, program.adapters, dtype, adapter_host_bytes)
        self._empty = program.init(dtype)
        self._load = shards.jit(
            SamplingState.load_slot, (REPLICATED,) * 5, REPLICATED, donate_argnums=0
        )
        self._pools = {pool.name: UnitMover(shards, policy, pool) for pool in program.pools}
        self._slots = SlotMover(shards, policy, program.num_slots) if program.slot_state else None
        self._programs: dict[tuple[int, int], jax.stages.Compiled] = {}
        self.reset()

    def reset(self) -> None:
        # An interrupted call may have donated these arrays and lost its results. Arrays that are
        # left are freed first, to make room.
        self._cache: Any = None
        self._state: Any = None
        for mover in self._movers():
            mover.reset()
        if self.adapters:
            self.adapters.reset()
        self._cache, self._state = self._empty()

    def _movers(self) -> list["UnitMover | SlotMover"]:
        return [*self._pools.values(), *([self._slots] if self._slots else [])]

    @property
    def dtype(self) -> str:
        return str(self.params["embed"].dtype)

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
            # An interruption waits for compilations in progress, but not for queued ones.
            threads.shutdown(cancel_futures=True)
        for shape in self._shapes:
            self.execute(self.program.empty_inputs(shape)).wait()
        for mover in self._movers():
            self._cache = mover.warm_up(self._cache)
        if self.adapters:
            self.adapters.warm_up()
        # The slot beyond the last is used, because any real slot may be in use.
        self.load_slot(self._state.history.shape[0], np.zeros(0, np.int32), {})
        jax.block_until_ready(self._cache)

    def _compile(self, shape: tuple[int, int]) -> jax.stages.Compiled:
        assert shape in self._shapes, f"step shape {shape} is not declared"
        return self.program.compile(shape, self.params, self._lora, self._cache, self._state)

    @property
    def _lora(self) -> ResidentAdapters | None:
        """The adapters that a step reads and never donates."""
        return self.adapters.resident if self.adapters else None

    def execute(self, inputs: StepInputs) -> PendingOutputs:
        shape = inputs.num_prefill_tokens, inputs.tokens.shape[0] - inputs.num_prefill_tokens
        if shape not in self._programs:
            self._programs[shape] = self._compile(shape)
        return self.run(self._programs[shape], inputs)

    def run(self, program: Callable, inputs: StepInputs, *others: Any) -> PendingOutputs:
        """Run a program with the arguments of `StepProgram.compile`'s, then `others`. The cache and
        state that it returns replace the executor's."""
        self._cache, self._state, outputs = program(
            self.params, self._lora, self._cache, self._state, inputs.packed, *others
        )
        return _DeviceOutputs(outputs, inputs)

    def load_slot(self, slot: int, tokens: np.ndarray, logit_bias: Mapping[int, float]) -> None:
        history = np.zeros(self.program.max_tokens, np.int32)
        history[: len(tokens)] = tokens
        bias_tokens = np.zeros(MAX_LOGIT_BIAS, np.int32)
        bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
        bias_tokens[: len(logit_bias)] = list(logit_bias.keys())
        bias_values[: len(logit_bias)] = list(logit_bias.values())
        self._state = self._load(self._state, np.int32(slot), history, bias_tokens, bias_values)

    def apply(self, moves: Moves) -> None:
        """Each copy or swap is one device operation for many units (vLLM §5.1). A swap is a gather
        or a scatter, and a transfer. No step waits for units that are swapped out (§4.5)."""
        for pool, pairs in moves.exports.items():
            self._pools[pool].export(self._cache, pairs)
        if self._slots:
            self._cache = self._slots.before(self._cache, moves)
        for pool, pairs in moves.imports.items():
            self._cache = self._pools[pool].bring(self._cache, pairs)
        for pool, pairs in moves.copies.items():
            self._cache = self._pools[pool].copy(self._cache, pairs)
        if self._slots:
            self._cache = self._slots.copy(self._cache, moves.slot_copies)

    def apply_after(self, moves: Moves) -> None:
        if moves.after:
            assert self._slots is not None, "slots without state are copied"
            self._cache = self._slots.copy(self._cache, moves.after)

    def snapshot(self) -> Any:
        """The policy's `snapshot` of its cache after all dispatched steps, for pictures and tests.
        Raises ValueError for a policy without one."""
        policy: Any = self.program.policy
        if not hasattr(policy, "snapshot"):
            raise ValueError(f"{type(policy).__name__} shows nothing of its cache: no snapshot")
        return policy.snapshot(self._cache)
