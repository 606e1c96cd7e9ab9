"""Invariants of a running sequence's lengths, and the violations that `Slots.check` detects."""

from collections.abc import Callable

import numpy as np
import pytest

from paged.requests.sampling_params import SamplingParams
from paged.requests.sequence import SequenceGroup, Status, share_prefixes
from paged.scheduling.slots import Slots


def _group(prompt: int, how: SamplingParams) -> SequenceGroup:
    tokens = np.arange(3, 3 + prompt, dtype=np.int32)
    return SequenceGroup("job", 0, tokens, how, 0, prompt + how.max_tokens)


def _slots() -> Slots:
    """Slots of four sequences.

    Slot 0: a sequence in the middle of its prompt.
    Slot 1: a sequence that generates, with two tokens in flight.
    Slots 2 and 3: two sequences with one prompt, which the sequence in slot 2 computes.
    """
    slots = Slots(8, 32)
    two = _group(6, SamplingParams(max_tokens=5, n=2, temperature=1.0))
    share_prefixes(two.sequences, 4)
    for group in (_group(9, SamplingParams()), _group(7, SamplingParams(max_tokens=5)), two):
        for sequence in group.sequences:
            slots.acquire(sequence)
    slots.length[1], slots.known[1] = 10, 8
    slots.computed[:4] = 4, 9, 0, 6
    return slots


def test_what_the_diagram_shows_passes():
    slots = _slots()
    slots.check()
    sequence = slots.sequence_in(1)
    slots.release(sequence, Status.FINISHED)
    slots.check()
    assert sequence.tokens.tolist()[:7] == list(range(3, 10)) and len(sequence.tokens) == 8


FAULTS: dict[str, Callable[[Slots], object]] = {
    "a lost slot": lambda slots: slots._free.pop(),
    "a slot freed twice": lambda slots: slots._free.append(1),
    "a forgotten owner": lambda slots: slots.owner.__setitem__(2, None),
    "a sequence that has ended": lambda slots: setattr(
        slots.sequence_in(1), "status", Status.FINISHED
    ),
    "a parent that has ended": lambda slots: slots.release(slots.sequence_in(2), Status.FINISHED),
    "two owners swapped": lambda slots: slots.owner.insert(0, slots.owner.pop(1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slot_that_is_not_one_sequences_is_seen(fault):
    slots = _slots()
    FAULTS[fault](slots)
    with pytest.raises(AssertionError):
        slots.check()


@pytest.mark.parametrize(
    ("name", "slot", "value", "said"),
    [
        ("held", 1, True, "held is True"),
        ("held", 3, False, "held is False"),
        ("known", 0, 8, "prompt_length <= known"),
        ("known", 1, 11, "known <= length"),
        ("length", 1, 13, "length <= limit"),
        ("computed", 0, 9, "computed < length"),
        ("computed", 0, -1, "0 <= computed"),
        ("computed", 3, 7, "computed < length"),
        ("computed", 1, 8, "all but the newest"),
    ],
)
def test_a_length_that_cannot_be_is_seen(name, slot, value, said):
    slots = _slots()
    getattr(slots, name)[slot] = value
    with pytest.raises(AssertionError, match=said):
        slots.check()
