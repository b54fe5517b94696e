"""The parts of a step, from times given by hand, and the slowest rank."""

from __future__ import annotations

from typing import Any

import pytest
from unit.in_process import run_well

from shoal.average.layout import ArraySpec, Layout
from shoal.average.report.breakdown import StepBreakdown, break_down
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


def test_without_noted_passes_the_first_ready_array_parts_a_step() -> None:
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


def brief(number: int, own: float, exposed: float, **others: float) -> StepBreakdown:
    plain = dict.fromkeys(("total", "forward", "backward", "other", "hidden"), 1.0)
    return StepBreakdown(number=number, own=own, exposed=exposed, **{**plain, **others})


def test_the_slowest_rank_sends_its_last_buffer_longest_after_the_last_average() -> None:
    by_rank = [
        [brief(0, -1, 1), brief(1, 100, 60), brief(2, 100, 60), brief(3, 130, 7)],
        [brief(0, -1, 1), brief(1, 150, 3), brief(2, 140, 8), brief(3, 120, 15)],
        [brief(1, 90, 20), brief(2, 120, 25), brief(3, 80, 51), brief(4, 1, 1)],
    ]
    ranks, n_compared = compare(dict(enumerate(by_rank)))
    assert n_compared == 3
    assert [one.n_slowest for one in ranks] == [1, 2, 0]
    assert ranks[0].waited == pytest.approx((50 + 40 + 0) / 3)
    assert ranks[2].waited == pytest.approx((20 + 20 + 50) / 3)  # it never waits for more than all
    assert ranks[1].held_up == pytest.approx((50 + 20) / 3)
    assert ranks[0].held_up == pytest.approx(10 / 3)


def test_ranks_that_know_no_common_step_are_not_compared() -> None:
    assert compare({0: [brief(0, 1, 1)], 1: [brief(1, 1, 1)]}) == ([], 0)


def test_a_single_rank_is_not_slower_than_any_other() -> None:
    ranks, n_compared = compare({3: [brief(0, 5, 1), brief(1, 5, 1)]})
    assert n_compared == 0
    assert ranks[0].exposed == 1
    assert (ranks[0].rank, ranks[0].n_slowest) == (3, 0)


def exchange(group: Any) -> dict[int, list[StepBreakdown]]:
    mine = [brief(n, 10.5 * group.rank, n) for n in range(100 if group.rank else 3)]
    return gather(group, "steps", mine)


def test_ranks_exchange_their_last_steps() -> None:
    for by_rank in run_well(exchange, 3):
        assert by_rank[0] == [brief(n, 0, n) for n in range(3)]
        assert by_rank[2] == [brief(n, 21, n) for n in range(36, 100)]


@pytest.mark.parametrize(("n_buffers", "n_kept"), [(1, 128), (128, 128), (1024, 16), (10**6, 8)])
def test_fewer_steps_are_kept_where_they_have_many_buffers(n_buffers: int, n_kept: int) -> None:
    assert StepLog(n_buffers).kept.maxlen == n_kept
