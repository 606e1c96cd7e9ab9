"""A stand-in for the device that takes simulated time and samples made-up or recorded tokens."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from models.sampling import BEAM, MAX_LOGPROBS, SAMPLING_ROW, Logprobs
from paged.adapters.loads import SimulatedLoads
from paged.clock import VirtualClock
from paged.device.step import StepOutputs
from paged.kv_cache.moves import Moves, Pairs
from paged.kv_cache.policy import CacheConfig, ShardedModel, SimulatedDevice
from paged.simulator.recorded import RecordedAncestry, RecordedTokens
from paged.step_inputs import StepInputs


@dataclass(frozen=True)
class LinearCost:
    """Step time in seconds: a constant plus a rate for each token and each cached token read."""

    step_s: float = 5e-3
    token_s: float = 2e-5
    cached_token_s: float = 1e-7

    def __call__(self, inputs: StepInputs) -> float:
        rows = inputs.token_rows[inputs.token_rows < inputs.lengths.shape[0]]
        tokens = int((inputs.lengths[rows] > 0).sum())
        return self.step_s + self.token_s * tokens + self.cached_token_s * int(inputs.lengths.sum())

    def decodes_s(self, contexts: np.ndarray, adapters: np.ndarray) -> np.ndarray:
        """Seconds [k] of k steps that each compute one token of every row.

        contexts: [k, n] tokens of each row after the step.
        """
        step_s = self.step_s + self.token_s * contexts.shape[1]
        return step_s + self.cached_token_s * contexts.sum(1)


class _SimulatedOutputs:
    def __init__(self, clock: VirtualClock, ready_s: float, outputs: Callable[[], StepOutputs]):
        self._clock, self._ready_s, self._outputs = clock, ready_s, outputs

    def wait(self) -> StepOutputs:
        self._clock.wait_until(self._ready_s)
        return self._outputs()


class SimulatedExecutor:
    """The interface of `DeviceExecutor` over a cost model and a virtual clock.

    Steps queue as on a device. A step starts when the previous step has ended, so an engine that
    dispatches ahead sees the same lag.

    cost: StepInputs -> seconds of a step; `LinearCost` by default. Optional methods:
        `decodes_s`: seconds of many decode steps; without it steps run one by one.
        `moves_s`: seconds of moves; without it moves take no time.
        `copies_s`: seconds to copy units on the device; without it forks take no time.
        `holding_s`: seconds of a step, given `SimulatedDevice.kept` too.
        `with_adapters`: the cost with the given rank pages of each adapter slot.
        `without_host`: the cost of a further iteration of a multi-step.
    first_token: the smallest token id of made-up tokens. With all special tokens below it, output
        lengths follow the request's `max_tokens`.
    recorded: the tokens of a recorded run. Waiting for a step raises ValueError if the recorded run
        lacks a token of the step. None: tokens are made up from the row's seed and position.
    ancestry: recorded ancestries of beam searches. None: beams have made-up candidates.
    dtype: the dtype of the simulated model.
    adapter_page_s: `page_s` of `SimulatedLoads`.
    compression: a file that records which tokens a policy's heads kept in real runs, for policies
        that drop tokens or store them in fewer bits (DiffKV: `diffkv.recording`); empty for none.
    """

    def __init__(
        self,
        cost=None,
        *,
        vocab_size: int,
        first_token: int = 0,
        recorded: RecordedTokens | None = None,
        ancestry: RecordedAncestry | None = None,
        dtype: str = "float32",
        adapter_page_s: float = 2e-3,
        compression: str = "",
    ):
        self.clock = VirtualClock()
        self.adapters = SimulatedLoads(self.clock, adapter_page_s)
        self.compilations = 0
        self.dtype = dtype
        cost = cost or LinearCost()
        if hasattr(cost, "with_adapters"):
            cost = cost.with_adapters(self.adapters.pages)
        self._cost = cost
        # The host works once a step, however many iterations it dispatches.
        self._later_cost = getattr(cost, "without_host", cost)
        self._moves_s = 0.0  # seconds of the moves before the next step
        self._first_token, self._vocab_size = first_token, vocab_size
        self._recorded, self._ancestry, self._compression = recorded, ancestry, compression
        self._pages: SimulatedDevice | None = None
        self._num_steps = 0
        self._device_free_s = 0.0

    @property
    def takes_runs(self) -> bool:
        """Whether times and tokens of several decode steps can be computed in advance."""
        return self._recorded is None and hasattr(self._cost, "decodes_s")

    @property
    def device_free_s(self) -> float:
        """End of the last dispatched step, in seconds."""
        return self._device_free_s

    def decode_times(
        self, slots: np.ndarray, contexts: np.ndarray, adapters: np.ndarray
    ) -> np.ndarray:
        """Seconds [k] of k steps that each compute one token of every row.

        slots: [n] slots of the rows.
        contexts: [k, n] computed tokens of each row after the step.
        adapters: [n] adapter slots, -1 for none.
        """
        if self._pages is None or not hasattr(self._cost, "holding_s"):
            return self._cost.decodes_s(contexts, adapters)
        return self._cost.decodes_s(contexts, adapters, self._pages.kept(slots, contexts))

    def report(self) -> Any:
        """The report of the policy's simulated device half on the last computed step; None if it
        reports nothing."""
        return self._pages.report() if self._pages else None

    def grow(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Advance the policy's simulated device half by a step that computes one token of each of
        `slots` [n], up to `num_tokens` [n] tokens."""
        assert self._pages
        self._pages.compute(slots, num_tokens, np.zeros(len(slots), bool))

    def decoded(self, seeds: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """Tokens [k, n] that rows sample at these contexts [k, n]. seeds: [n]."""
        return self._made_up(seeds, contexts)

    def run_decodes(self, num_steps: int, free_s: float, tokens: np.ndarray) -> "_SimulatedOutputs":
        """Count `num_steps` more steps as dispatched. Returns the outputs of the last one, which
        ends at `free_s` and samples tokens [1, n]."""
        self._num_steps += num_steps
        self._device_free_s = free_s
        report = self.report()
        return _SimulatedOutputs(self.clock, free_s, lambda: StepOutputs(tokens, report=report))

    def report_by(
        self, simulated: Callable[..., SimulatedDevice], config: CacheConfig, model: ShardedModel
    ) -> None:
        """See `paged.device.executor.ReportingExecutor`."""
        self._pages = simulated(config, model, self._compression)

    def warm_up(self, progress: bool = True) -> None:
        pass

    def execute(self, inputs: StepInputs) -> _SimulatedOutputs:
        start = max(self.clock.now(), self._device_free_s) + self._moves_s
        self._moves_s = 0.0
        lengths = _lengths_by_iteration(inputs)
        if self._pages:
            rows = _computed_rows(inputs)
            prompts = rows < inputs.num_prefill_rows
            self._pages.compute(np.asarray(inputs.slots)[rows], lengths[:, rows].max(0), prompts)
        report = self.report()
        seconds = self._step_s(inputs, self._cost)
        for later in lengths[1:]:
            seconds += self._step_s(replace(inputs, lengths=later), self._later_cost)
        self._device_free_s = start + seconds
        number = self._num_steps
        self._num_steps += 1
        if self._recorded:
            outputs = functools.partial(self._replay, self._recorded, number, inputs, report)
        else:
            outputs = functools.partial(self._sample, inputs, lengths, report)
        return _SimulatedOutputs(self.clock, self._device_free_s, outputs)

    @staticmethod
    def _replay(recorded: RecordedTokens, number: int, inputs: StepInputs, report) -> StepOutputs:
        """The recorded outputs. report: the policy's report if the log has none."""
        outputs = recorded.sample(number, inputs)
        return outputs if outputs.report is not None else replace(outputs, report=report)

    def _step_s(self, inputs: StepInputs, cost) -> float:
        if self._pages is None or not hasattr(cost, "holding_s"):
            return cost(inputs)
        rows = _computed_rows(inputs)
        held = self._pages.kept(np.asarray(inputs.slots)[rows], np.asarray(inputs.lengths)[rows])
        return cost.holding_s(inputs, held)

    def _sample(self, inputs: StepInputs, position: np.ndarray, report=None) -> StepOutputs:
        how = np.asarray(inputs.sampling).view(SAMPLING_ROW)[:, 0]
        seed, logprobs = how["seed"], None
        if (how["logprobs"] == BEAM).any():
            logprobs = self._candidates(inputs, seed, position)
        return StepOutputs(self._made_up(seed, position), logprobs, report=report)

    def _candidates(self, inputs: StepInputs, seed: np.ndarray, position: np.ndarray) -> Logprobs:
        """Made-up beam candidates. They differ by slot, because all beams would otherwise descend
        from one beam. With an ancestry a beam has as many certain candidates as children."""
        places = np.arange(min(MAX_LOGPROBS, self._vocab_size - self._first_token))
        which = (position[..., None] * 1_000_003 + np.asarray(inputs.slots)[:, None]) % 2**20
        first = self._made_up(seed[:, None], which)
        span = self._vocab_size - self._first_token
        candidates = self._first_token + (first - self._first_token + places) % span
        top = -1.0 - places * (1 + which % 7) / 8
        if self._ancestry is not None:
            top = self._recorded_candidates(self._ancestry, inputs, position, places)
        return Logprobs(np.full(position.shape, np.nan), candidates, top.astype(np.float32))

    @staticmethod
    def _recorded_candidates(
        ancestry: RecordedAncestry, inputs: StepInputs, position: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        """Log-probabilities [I, S, A]: 0 for as many candidates of a beam as it has children, and
        -inf for the others."""
        how = np.asarray(inputs.sampling).view(SAMPLING_ROW)[:, 0]
        top = np.full((*position.shape, len(places)), -np.inf)
        beams = np.flatnonzero((how["logprobs"] == BEAM) & (np.asarray(inputs.samples) != 0))
        for seed in np.unique(how["seed"][beams]).tolist():
            rows = beams[how["seed"][beams] == seed]  # rows of one search, best first
            step = int(position[0, rows[0]]) - int(how["prompt_length"][rows[0]])
            counts = ancestry.children(seed, step)
            top[0, rows] = np.where(places < counts[:, None], 0.0, -np.inf)
        return top

    def _made_up(self, seed: np.ndarray, position: np.ndarray) -> np.ndarray:
        mixed = np.uint64(position) * np.uint64(2654435761) + np.uint64(seed)
        span = np.uint64(self._vocab_size - self._first_token)
        return np.asarray(self._first_token + (mixed >> np.uint64(7)) % span, np.int32)

    def apply(self, moves: Moves) -> None:
        if hasattr(self._cost, "moves_s"):
            self._moves_s += self._cost.moves_s(moves)
        if self._pages:
            self._moves_s += self._forks_s(moves.slot_copies)
            self._pages.move(moves)

    def apply_after(self, moves: Moves) -> None:
        if self._pages:
            self._moves_s += self._forks_s(moves.after)
            self._pages.move_after(moves)

    def _forks_s(self, pairs: Pairs) -> float:
        """Seconds of the copies that forks make. Copies after a step delay the next step."""
        if not (pairs and self._pages and hasattr(self._cost, "copies_s")):
            return 0.0
        return self._cost.copies_s(self._pages.copied(pairs))

    def load_slot(self, slot: int, tokens: np.ndarray, logit_bias: Mapping[int, float]) -> None:
        pass

    def reset(self) -> None:
        self._device_free_s, self._moves_s = self.clock.now(), 0.0
        self.adapters.reset()


def _computed_rows(inputs: StepInputs) -> np.ndarray:
    """Rows with tokens that the step computes."""
    rows = np.unique(inputs.token_rows[inputs.token_rows < inputs.lengths.shape[0]])
    return rows[np.asarray(inputs.lengths)[rows] > 0]


def _lengths_by_iteration(inputs: StepInputs) -> np.ndarray:
    """[I, S] tokens in the cache after each iteration; 0 for rows that the iteration skips."""
    done = np.arange(max(1, int(inputs.iterations.max())))[:, None]
    return np.where(inputs.iterations > done, inputs.lengths + done, 0)
