"""Tokens of a run that was: what a simulated device samples when the run is replayed."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paged.metrics import NO_TOKEN
from paged.step_inputs import StepInputs


class RecordedTokens:
    """The tokens that `events` (`Engine.events`, or their JSON) hold, by step and slot.

    Raises ValueError for a step that they do not schedule.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]):
        slots: dict[int, list[int]] = {}
        self._steps: dict[int, dict[int, np.ndarray]] = {}
        for event in events:
            if event["event"] == "schedule":
                slots[event["step"]] = event["slots"]
            elif event["event"] == "step":
                number = event["step"]
                if number not in slots:
                    raise ValueError(f"step {number}: the log does not hold its schedule")
                tokens = np.array(event["tokens"], np.int32).reshape(-1, len(slots[number]))
                self._steps[number] = dict(zip(map(int, slots[number]), tokens.T, strict=True))

    def sample(self, number: int, inputs: StepInputs) -> np.ndarray:
        """The tokens [I, S] int32 of step `number`, NO_TOKEN where a row samples nothing.

        Raises ValueError if the step was not recorded, or not with all that is to be sampled.
        """
        if number not in self._steps:
            raise ValueError(f"step {number}: the log does not hold its tokens")
        tokens = np.full((max(1, inputs.iterations.max()), len(inputs.slots)), NO_TOKEN, np.int32)
        for row in np.flatnonzero(inputs.samples).tolist():
            slot, count = int(inputs.slots[row]), int(inputs.iterations[row])
            recorded = self._steps[number].get(slot, np.zeros(0, np.int32))[:count]
            if len(recorded) < count or NO_TOKEN in recorded:
                raise ValueError(
                    f"step {number}: {count} tokens are to be sampled in slot {slot}, and the log "
                    f"does not hold them: the schedule is another one"
                )
            tokens[:count, row] = recorded
        return tokens
