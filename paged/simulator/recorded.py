"""Recorded tokens and beam candidates, which a simulated device samples when it replays a run; and
recorded ancestries of beams, for simulated beam searches without a model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from models.sampling import BEAM, INVALID_TOKEN, MAX_LOGPROBS, SAMPLING_ROW, Logprobs
from paged.device.step import StepOutputs
from paged.metrics import NO_TOKEN
from paged.step_inputs import StepInputs


class RecordedTokens:
    """The tokens in `events` (`Engine.events`, or their JSON), by step and slot.

    Raises ValueError for a step without a schedule in `events`.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]):
        slots: dict[int, list[int]] = {}
        self._beams: dict[int, dict[int, tuple[list, list]]] = {}  # by step and slot
        self._steps: dict[int, dict[int, np.ndarray]] = {}
        self._reports: dict[int, Any] = {}
        for event in events:
            if event["event"] == "schedule":
                slots[event["step"]] = event["slots"]
            elif event["event"] == "beams":
                candidates = zip(event["candidates"], event["candidate_logprobs"], strict=True)
                of_step = self._beams.setdefault(event["step"], {})
                of_step.update(zip(map(int, event["before"]), candidates, strict=True))
            elif event["event"] == "step":
                number = event["step"]
                if number not in slots:
                    raise ValueError(f"step {number}: the log does not hold its schedule")
                self._reports[number] = event.get("report")
                tokens = np.array(event["tokens"], np.int32).reshape(-1, len(slots[number]))
                self._steps[number] = dict(zip(map(int, slots[number]), tokens.T, strict=True))

    def sample(self, number: int, inputs: StepInputs) -> StepOutputs:
        """The recorded outputs of step `number`.

        tokens: [I, S] int32, NO_TOKEN where a row samples nothing.
        logprobs: log-probabilities of beam candidates; None without beams.
        report: the policy's report.

        Raises ValueError if the log lacks the step, or a token that the step samples.
        """
        if number not in self._steps:
            raise ValueError(f"step {number}: the log does not hold its tokens")
        tokens = np.full((max(1, inputs.iterations.max()), len(inputs.slots)), NO_TOKEN, np.int32)
        is_beam = np.asarray(inputs.sampling).view(SAMPLING_ROW)["logprobs"][:, 0] == BEAM
        beams = np.flatnonzero(is_beam & (np.asarray(inputs.samples) != 0))
        for row in np.flatnonzero(np.asarray(inputs.samples) * ~is_beam).tolist():
            slot, count = int(inputs.slots[row]), int(inputs.iterations[row])
            recorded = self._steps[number].get(slot, np.zeros(0, np.int32))[:count]
            if len(recorded) < count or NO_TOKEN in recorded:
                raise ValueError(
                    f"step {number}: {count} tokens are to be sampled in slot {slot}, and the log "
                    f"does not hold them: this schedule differs from the recorded one"
                )
            tokens[:count, row] = recorded
        report = jax.tree.map(
            np.array, self._reports[number], is_leaf=lambda x: isinstance(x, list)
        )
        logprobs = self._candidates(number, inputs, beams, tokens) if len(beams) else None
        return StepOutputs(tokens, logprobs, report=report)

    def _candidates(
        self, number: int, inputs: StepInputs, beams: np.ndarray, sampled: np.ndarray
    ) -> Logprobs:
        """The candidates of `beams`. Also sets INVALID_TOKEN in `sampled` [I, S] for beams without
        candidates in the log: their request was aborted before the host read the candidates, or
        their logits were not finite."""
        recorded = self._beams.get(number, {})
        shape = *sampled.shape, MAX_LOGPROBS
        candidates, top = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
        for row in beams.tolist():
            tokens, logprobs = recorded.get(int(inputs.slots[row]), ([], []))
            sampled[0, row] = 0 if len(tokens) else INVALID_TOKEN
            candidates[0, row, : len(tokens)], top[0, row, : len(tokens)] = tokens, logprobs
        return Logprobs(np.full(sampled.shape, np.nan, np.float32), candidates, top)


class RecordedAncestry:
    """The number of children of each beam, by step, in recorded beam searches.

    searches: recorded searches, each a list of steps. A step lists, for each beam that is live
        after it, the index of the beam's parent among the beams before it. Before the first step
        there is one beam. A request with more steps than its search repeats the search from the
        second step on.
    """

    def __init__(self, searches: Sequence[Sequence[Sequence[int]]]):
        """Raises ValueError if there is no search, or one with fewer than two steps."""
        if not searches or min(map(len, searches)) < 2:
            raise ValueError("an ancestry needs searches, each of two steps at least")
        self._children = [_children(search) for search in searches]

    def children(self, request: int, step: int) -> np.ndarray:
        """In step `step`, counted from 0: the number of children of each beam before the step.
        request: a number that stays the same for the whole request, such as its seed."""
        steps = self._children[request % len(self._children)]
        return steps[step if step < len(steps) else 1 + (step - 1) % (len(steps) - 1)]


def _children(parents: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Numbers of children, by step. After each step, beams are renumbered in the order of their
    parents. Children of one parent need no order: without a model, all candidates score alike."""
    steps, place = [], [0]  # new number of each recorded beam
    for of_step in parents:
        ours = np.array([place[parent] for parent in of_step])
        steps.append(np.bincount(ours, minlength=len(place)))
        place = np.argsort(np.argsort(ours, kind="stable"), kind="stable").tolist()
    return steps
