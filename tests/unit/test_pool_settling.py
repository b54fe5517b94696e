"""Calls of a view that ends: what becomes of each is the same on all workers, and never a guess."""

import itertools

import pytest

from shoal.errors import UsageError
from shoal.group.pool.ending import Standing, made_by_all, settle

UNMADE, OPEN, WHOLE, OTHER = Standing


def told(*calls: tuple[Standing, ...]) -> list[bytes]:
    """By worker, from the standings by call."""
    return [bytes(own) for own in zip(*calls, strict=True)]


def test_calls_are_mended_in_any_order_in_which_all_workers_have_made_them() -> None:
    calls = [(OPEN, UNMADE), (OPEN, OPEN), (UNMADE, OPEN)]
    assert made_by_all([3, 8, 9], told(*calls)) == [8]


def test_a_number_that_only_some_have_used_is_an_error_that_names_it_and_two_ranks() -> None:
    match = "rank 1 called all_reduce #4, but rank 0 skipped #4"
    with pytest.raises(UsageError, match=match):
        settle(4, told((OTHER, OPEN)))
    with pytest.raises(UsageError, match=match):
        made_by_all([4], told((OTHER, OPEN)))


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4])
def test_no_call_is_taken_for_whole_that_is_so_nowhere_and_none_is_forgotten(
    n_workers: int,
) -> None:
    for standings in itertools.product(Standing, repeat=n_workers):
        if OPEN in standings and OTHER in standings and WHOLE not in standings:
            continue
        whole, left = settle(1, told(standings))
        assert (1 in whole) == (OPEN in standings and WHOLE in standings)
        assert (1 in left) == (OPEN in standings and WHOLE not in standings)
