"""Calls of a view that ends: workers settle each call equally, and repair its segments.

When all servers stop, any worker may hold the result of any segment, in place of its input.
"""

import itertools

import pytest

from shoal.errors import UsageError
from shoal.group.pool.ending import Standing, made_by_all, settle
from shoal.group.pool.mend import NOBODY, Repair, replan

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


INPUT, RESULT = "input", "result"


def run(repairs: list[Repair], memory: list[list[str]]) -> None:
    """Carry out the repairs in any order: they touch different segments."""
    touched: set[int] = set()
    for repair in repairs:
        for segment in range(repair.begin, repair.end):
            assert segment not in touched
            touched.add(segment)
            if repair.holder == NOBODY:
                assert all(worker[segment] == INPUT for worker in memory), "an input is gone"
            else:
                assert memory[repair.holder][segment] == RESULT, "the holder has no result"
            for worker in memory:
                worker[segment] = RESULT


@pytest.mark.parametrize("n_segments", [1, 2, 3])
@pytest.mark.parametrize("n_workers", [1, 2, 3, 4])
def test_workers_get_all_results_whenever_a_server_dies(n_workers: int, n_segments: int) -> None:
    for landed in itertools.product(range(1 << n_segments), repeat=n_workers):
        memory = [
            [RESULT if bits >> segment & 1 else INPUT for segment in range(n_segments)]
            for bits in landed
        ]
        repairs = replan([[bytes([bits])] for bits in landed], [n_segments])
        run(repairs, memory)
        assert memory == [[RESULT] * n_segments] * n_workers


def test_the_lowest_holder_sends_and_runs_are_as_long_as_possible() -> None:
    landed = [[bytes([0b0011_0000, 0b01])], [bytes([0b0011_1100, 0b01])]]
    runs = [(0, 2, NOBODY), (2, 4, 1), (6, 8, NOBODY), (9, 10, NOBODY)]
    assert replan(landed, [10]) == [Repair(0, *run) for run in runs]
    # Bits beyond the end of a chunk are ignored, and empty chunks are skipped.
    assert replan([[b"\xff"], [b"\xfe"]], [3]) == [Repair(0, 0, 1, 0)]
    assert replan([[b"\0", b"", b"\1"]] * 2, [2, 0, 1]) == [Repair(0, 0, 2, NOBODY)]
