"""A stand-in for the device that takes simulated time and samples made-up tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paged.clock import VirtualClock
from paged.step_inputs import StepInputs


@dataclass(frozen=True)
class LinearCost:
    """Step time in seconds: a constant plus a rate for each token and each cached token read."""

    step_s: float = 5e-3
    token_s: float = 2e-5
    cached_token_s: float = 1e-7

    def __call__(self, inputs: StepInputs) -> float:
        tokens = int((inputs.token_rows < inputs.lengths.shape[0]).sum())
        return self.step_s + self.token_s * tokens + self.cached_token_s * int(inputs.lengths.sum())


class _SimulatedTokens:
    def __init__(self, clock: VirtualClock, ready_s: float, tokens: np.ndarray):
        self._clock, self._ready_s, self._tokens = clock, ready_s, tokens

    def wait(self) -> np.ndarray:
        self._clock.wait_until(self._ready_s)
        return self._tokens


class SimulatedExecutor:
    """The interface of `DeviceExecutor` over a cost model and a virtual clock.

    Steps queue as they do on a device: one starts when the one before it has ended, so an engine
    that runs ahead sees the same lag. Tokens are a function of the row's seed and position alone,
    and never below `first_token`, so that with special tokens below it lengths follow the request's
    `max_tokens`.
    """

    def __init__(self, cost=None, *, vocab_size: int, first_token: int = 0):
        self.clock = VirtualClock()
        self.compilations = 0
        self._cost = cost or LinearCost()
        self._first_token, self._vocab_size = first_token, vocab_size
        self._device_free_s = 0.0

    def warm_up(self, progress: bool = True) -> None:
        pass

    def execute(self, inputs: StepInputs) -> _SimulatedTokens:
        start = max(self.clock.now(), self._device_free_s)
        self._device_free_s = start + self._cost(inputs)
        position, seed = np.uint64(inputs.sampling.position), np.uint64(inputs.sampling.seed)
        mixed = position * np.uint64(2654435761) + seed
        span = np.uint64(self._vocab_size - self._first_token)
        tokens = np.asarray(self._first_token + (mixed >> np.uint64(7)) % span, np.int32)
        return _SimulatedTokens(self.clock, self._device_free_s, tokens)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        pass
