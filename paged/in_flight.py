"""A step on its way through the device."""

from dataclasses import dataclass

import numpy as np

from paged.device.executor import PendingOutputs
from paged.scheduling.scheduled_step import ScheduledStep


@dataclass
class InFlight:
    """A dispatched step whose tokens have not been read."""

    number: int
    step: ScheduledStep
    rows: np.ndarray  # index in the step's inputs of each scheduled row
    outputs: PendingOutputs
    dispatched_s: float
    facts: dict  # fields of its StepRecord
    host_s: float = 0.0
