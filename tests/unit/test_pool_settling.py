"""Calls of a view that ends: all workers settle each call equally, and never guess."""

import itertools

import pytest

from shoal.errors import UsageError
from shoal.group.pool.ending import Standing, made_by_all, settle

UNMADE, OPEN, WHOLE, OTHER = Standing


def by_worker(*calls: tuple[Standing, ...]) -> list[bytes]:
    """Transpose the standings by call into one byte string per worker."""
    return [bytes(own) for own in zip(*calls, strict=True)]


def test_calls_that_all_workers_made_are_repaired_in_any_order() -> None:
    calls = [(OPEN, UNMADE), (OPEN, OPEN), (UNMADE, OPEN)]
    assert made_by_all([3, 8, 9], by_worker(*calls)) == [8]


def test_a_number_used_only_by_some_is_an_error_that_names_it_and_two_ranks() -> None:
    match = "rank 1 called all_reduce #4, but rank 0 skipped #4"
    with pytest.raises(UsageError, match=match):
        settle(4, by_worker((OTHER, OPEN)))
    with pytest.raises(UsageError, match=match):
        made_by_all([4], by_worker((OTHER, OPEN)))


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4])
def test_every_open_call_is_settled_and_counts_as_complete_only_if_it_is(n_workers: int) -> None:
    for standings in itertools.product(Standing, repeat=n_workers):
        if OPEN in standings and OTHER in standings and WHOLE not in standings:
            continue
        whole, left = settle(1, by_worker(standings))
        assert (1 in whole) == (OPEN in standings and WHOLE in standings)
        assert (1 in left) == (OPEN in standings and WHOLE not in standings)
