"""What holds of a running sequence's lengths, and that `Slots.check` sees when it does not."""

import numpy as np
import pytest

from paged.requests.sequence import SamplingParams, SequenceGroup, Status, share_prefixes
from paged.scheduling.slots import Slots


def _group(prompt: int, how: SamplingParams) -> SequenceGroup:
    tokens = np.arange(3, 3 + prompt, dtype=np.int32)
    return SequenceGroup("job", 0, tokens, how, 0, prompt + how.max_tokens)


def _slots() -> Slots:
    """One sequence in the middle of its prompt, in slot 0; one that generates, with two tokens in
    flight, in slot 1; and two with one prompt, in slots 2 and 3, of which the first computes it."""
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


def _lose_a_slot(slots: Slots) -> None:
    slots._free.pop()


def _free_a_slot_twice(slots: Slots) -> None:
    slots._free.append(1)


def _forget_an_owner(slots: Slots) -> None:
    slots.owner[2] = None


def _end_a_sequence(slots: Slots) -> None:
    slots.sequence_in(1).status = Status.FINISHED


def _end_a_donor(slots: Slots) -> None:
    slots.release(slots.sequence_in(2), Status.FINISHED)


def _swap_two_owners(slots: Slots) -> None:
    slots.owner[0], slots.owner[1] = slots.owner[1], slots.owner[0]


@pytest.mark.parametrize(
    "fault",
    [
        _lose_a_slot, _free_a_slot_twice, _forget_an_owner, _end_a_sequence, _end_a_donor,
        _swap_two_owners,
    ],
)  # fmt: skip
def test_a_slot_that_is_not_one_sequences_is_seen(fault):
    slots = _slots()
    fault(slots)
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
