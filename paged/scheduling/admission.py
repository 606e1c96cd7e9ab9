"""What limits the requests that enter a step: room for their prompts, and a gate of its own."""

from typing import Protocol

from paged.config import EngineConfig
from paged.requests.sequence import SequenceGroup


class PrefillRoom:
    """The prefill rows of one step, under the limits of tokens and of rows.

    refused: whether a sequence that runs found no room: then nobody new may enter.
    """

    def __init__(self, config: EngineConfig, budget: int):
        self._config, self.budget = config, budget
        self.rows: list[tuple[int, int]] = []
        self.refused = False

    @property
    def full(self) -> bool:
        return self.budget == 0 or len(self.rows) == self._config.max_prefills_per_step

    def takes(self, left: int) -> bool:
        return not self.full and (self._config.chunked_prefill or left <= self.budget)

    def add(self, slot: int, left: int, forks: int = 0) -> None:
        """As many of the `left` tokens as fit; none if the sequence must go whole and cannot. With
        the last of them come `forks` rows of one token: it waits a step if these do not fit."""
        if not self.takes(left):
            self.refused = True
            return
        count = min(left, self.budget)
        if count == left and count + forks > self.budget:
            count = left - 1
        self.rows.append((slot, count))
        self.budget -= count + (forks if count == left else 0)


class AdmissionGate(Protocol):
    """Holds back waiting requests whose adapter is not on the device (Punica §5.2)."""

    @property
    def loading(self) -> bool:
        """Whether something is on its way that will let requests in."""
        ...

    def admits(self, group: SequenceGroup) -> bool: ...

    def wait(self) -> None:
        """Until the next arrival."""
        ...


class OpenGate:
    """Holds nobody back."""

    loading = False

    def admits(self, group: SequenceGroup) -> bool:
        return True

    def wait(self) -> None:
        raise AssertionError("nothing is on its way")
