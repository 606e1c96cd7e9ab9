"""Moves of slots that change owners before a step."""

from paged.kv_cache.moves import Moves, Pool


def test_a_slot_with_two_owners_before_a_step_is_released_once():
    """A second release would free its pages twice. A copy for a former owner is cancelled."""
    moves = Moves(slot_copies=[(0, 1)])
    moves.release(1)
    moves.slot_copies.append((2, 1))
    moves.release(1)
    assert moves.released == [1] and moves.slot_copies == []


def test_a_slot_whose_copy_is_pending_is_exported_from_its_source():
    moves = Moves()
    moves.copy_slot(0, 1)
    moves.copy_slot(1, 2)
    moves.export_slot(2, 7)
    assert moves.slot_exports == [(0, 7)]


def test_a_parent_that_leaves_may_be_its_grandchild():
    """A lookup that followed pairs from child to parent would never end."""
    moves = Moves()
    moves.copy_slot(2, 3)
    moves.release(2)
    moves.copy_slot(3, 2)
    assert moves.slot_copies == [(2, 3), (2, 2)]
    moves.export_slot(2, 7)
    assert moves.slot_exports == [(2, 7)]


def test_few_copies_are_not_padded_to_the_most():
    pool = Pool("p", 9, 9, 0, units_per_call=4, max_copies=6, unit_bytes=1)
    assert pool.copy_sizes == (4, 6)
    assert Pool("p", 9, 9, 0, units_per_call=4, max_copies=3, unit_bytes=1).copy_sizes == (4,)
