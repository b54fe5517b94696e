"""Where a step's time went, out of times made up by hand, and who was the slowest."""

from __future__ import annotations

from typing import Any

import pytest
from unit.in_process import run_well

from shoal.average.layout import ArraySpec, Layout
from shoal.average.report.breakdown import StepBreakdown, break_down, common, merged
from shoal.average.report.compared import compare, gather
from shoal.average.step_times import StepLog, StepTimes
from shoal.dtypes import DType

TWO = Layout.of([ArraySpec(name, (16,), DType.FLOAT32) for name in "ab"], [1, 0], 64)
US = 1000  # nanoseconds


def step(number: int, **times: Any) -> StepTimes:
    """A step of two buffers; times in microseconds."""
    plain: dict[str, Any] = dict.fromkeys(("forward", "begin", "backward", "first"), 0)
    plain |= dict.fromkeys(("full", "posted", "done"), (0, 0))
    plain |= {"waits": ((0, 0), (0, 0)), "sent": 0, "wait": 0, "end": 0}
    plain |= times
    in_ns = {name: in_nanoseconds(value) for name, value in plain.items()}
    return StepTimes(number=number, layout=TWO, to_unix=0, **in_ns)


def in_nanoseconds(value: Any) -> Any:
    return tuple(map(in_nanoseconds, value)) if isinstance(value, tuple) else value * US


def waited_for(number: int, at: int) -> StepTimes:
    """10 us of something, a forward pass of 100, a loss of 5, 200 of backward, 50 of waiting."""
    return step(
        number,
        forward=at,
        begin=at + 100,
        backward=at + 105,
        first=at + 150,
        full=(at + 200, at + 305),
        posted=(at + 200, at + 305),
        done=(at + 280, at + 350),
        waits=((at + 305, at + 306), (at + 306, at + 354)),
        sent=at + 305,
        wait=at + 305,
        end=at + 355,
    )


def test_a_step_is_forward_backward_exposed_communication_and_the_rest() -> None:
    first, second = break_down([waited_for(n, 1000 + 365 * n) for n in range(3)])
    assert (first.number, second.number) == (0, 1)
    assert first[1:-1] == second[1:-1]
    assert second.total == 365
    assert second.forward == 100
    assert second.backward == 200
    assert second.exposed == 50
    assert second.other == 365 - 100 - 200 - 50
    assert second.hidden == 80  # of the first buffer; all of the second was waited for
    assert first.own == -1
    assert second.own == 305 + 365 - 350


def test_a_single_step_lasts_until_its_end() -> None:
    (only,) = break_down([waited_for(0, 1000)])
    assert only.total == 355
    assert only.other == 5


def test_no_steps_have_no_breakdown() -> None:
    assert break_down([]) == []


def test_where_nobody_tells_of_passes_the_first_array_parts_them() -> None:
    times = step(
        0,
        begin=10,
        first=40,
        posted=(50, 60),
        done=(55, 75),
        waits=((60, 60), (60, 75)),
        sent=60,
        wait=60,
        end=76,
    )
    found, *_ = break_down([times, step(1, begin=100)])
    assert found[1:6] == (90, 30, 20, 16, 24)
    assert found.hidden == 5


def test_with_the_forward_pass_overlapped_waits_are_no_part_of_it() -> None:
    # The averages of step 0 are waited for in the forward pass of step 1, for 10 and 20 us.
    zero = step(
        0,
        forward=0,
        begin=100,
        backward=100,
        first=120,
        posted=(150, 200),
        done=(220, 260),
        waits=((210, 220), (240, 260)),
        sent=200,
        wait=290,
        end=291,
    )
    one = step(1, forward=205, begin=300, backward=300, first=320, sent=400)
    found = break_down([zero, one, step(2, forward=410)])
    assert found[0].exposed == 0
    assert found[0].hidden == (260 - 150) - 30
    assert found[1].forward == 95 - 31
    assert found[1].exposed == 31
    assert found[1].backward == 100
    assert found[1].other == 10


def test_time_in_several_intervals_counts_once() -> None:
    assert merged([(5, 7), (1, 3), (2, 4), (9, 9), (4, 5)]) == [(1, 7)]
    assert common([(0, 10), (20, 30)], [(5, 25)]) == 10


def told(number: int, own: float, exposed: float, **others: float) -> StepBreakdown:
    plain = dict.fromkeys(("total", "forward", "backward", "other", "hidden"), 1.0)
    return StepBreakdown(number=number, own=own, exposed=exposed, **{**plain, **others})


def test_the_slowest_rank_is_that_whose_last_buffer_left_last_after_the_last_average() -> None:
    by_rank = [
        [told(0, -1, 1), told(1, 100, 60), told(2, 100, 60), told(3, 130, 7)],
        [told(0, -1, 1), told(1, 150, 3), told(2, 140, 8), told(3, 120, 15)],
        [told(1, 90, 20), told(2, 120, 25), told(3, 80, 51), told(4, 1, 1)],
    ]
    ranks, n_compared = compare(dict(enumerate(by_rank)))
    assert n_compared == 3
    assert [one.n_slowest for one in ranks] == [1, 2, 0]
    assert ranks[0].waited == pytest.approx((50 + 40 + 0) / 3)
    assert ranks[2].waited == pytest.approx((20 + 20 + 50) / 3)  # it never waits for more than all
    assert ranks[1].held_up == pytest.approx((50 + 20) / 3)
    assert ranks[0].held_up == pytest.approx(10 / 3)


def test_ranks_that_know_no_common_step_are_not_compared() -> None:
    assert compare({0: [told(0, 1, 1)], 1: [told(1, 1, 1)]}) == ([], 0)


def test_a_single_rank_is_not_slower_than_any_other() -> None:
    ranks, n_compared = compare({3: [told(0, 5, 1), told(1, 5, 1)]})
    assert n_compared == 0
    assert ranks[0].exposed == 1
    assert (ranks[0].rank, ranks[0].n_slowest) == (3, 0)


def tell(group: Any) -> dict[int, list[StepBreakdown]]:
    mine = [told(n, 10.5 * group.rank, n) for n in range(100 if group.rank else 3)]
    return gather(group, "tell", mine)


def test_ranks_tell_each_other_of_their_last_steps() -> None:
    for heard in run_well(tell, 3):
        assert heard[0] == [told(n, 0, n) for n in range(3)]
        assert heard[2] == [told(n, 21, n) for n in range(36, 100)]


@pytest.mark.parametrize(("n_buffers", "n_kept"), [(1, 128), (128, 128), (1024, 16), (10**6, 8)])
def test_fewer_steps_are_kept_where_they_have_many_buffers(n_buffers: int, n_kept: int) -> None:
    assert StepLog(n_buffers).kept.maxlen == n_kept
