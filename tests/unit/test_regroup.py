"""`Averager.regroup` over real groups, whose ranks are threads: expected values are NumPy's."""

import contextlib
from typing import Any

import numpy as np
import pytest
from unit.averages import SHAPES, average_filled, check, fill, shuffled, values
from unit.feedback_model import average, check_residuals, feeding, gradients, new_model, send
from unit.feedback_model import check as check_step
from unit.in_process import in_ranks

import shoal
from shoal.average import Averager, ChunkTopK
from shoal.errors import PeerLost, UsageError

NAMES = list(SHAPES)
UPWARD = tuple(range(len(NAMES)))


def take_steps(averager: Averager, *steps: int) -> None:
    """Average in the order of names on rank 0, and in a different order on each other rank."""
    for step in steps:
        average_filled(averager, step, NAMES if averager.group.rank == 0 else shuffled(1, step))
        check(averager, step)


def pair_of(group: shoal.Group) -> Any:
    """Return the group of ranks 0 and 1, which rank 2 joins later; None on rank 2."""
    return group.subgroup([0, 1], "pair") if group.rank < 2 else None


@in_ranks(3)
def test_survivors_abandon_and_repeat_a_step_that_lost_a_rank(group: shoal.Group) -> None:
    averager = Averager(group, SHAPES, fusion_bytes=512)
    hook = averager.hook("weight")
    take_steps(averager, 0, 1)
    averager.begin()
    group.barrier()
    if group.rank == 2:
        return
    with contextlib.suppress(PeerLost):
        fill(averager, 2, NAMES if group.rank else NAMES[3:])
    rest = group.shrink([2])
    averager.regroup(rest)
    assert averager.group is rest
    assert averager.layout.order == UPWARD
    assert [step.number for step in averager.times] == [0, 1]
    take_steps(averager, 2, 3)
    averager.begin()
    fill(averager, 4, [name for name in NAMES if name != "weight"])
    averager.arrays["weight"][...] = values("weight", rest.rank, 4)
    hook()
    averager.wait()
    check(averager, 4)
    assert [step.number for step in averager.times] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n_steps", [0, 1, 3])
@in_ranks(3)
def test_a_new_rank_averages_with_ranks_that_go_on(group: shoal.Group, n_steps: int) -> None:
    options: dict[str, Any] = {"fusion_bytes": 512, "check_finite": True, "check_same": 2}
    pair = pair_of(group)
    if pair is None:
        averager = Averager(group, SHAPES, **options)
    else:
        averager = Averager(pair, SHAPES, **options)
        take_steps(averager, *range(n_steps))
        averager.regroup(group)
    assert averager.layout.order == (UPWARD if n_steps else UPWARD[::-1])
    for step in range(n_steps, n_steps + 3):
        take_steps(averager, step)
        averager.check_same({"step": step})
    assert averager.layout.order == UPWARD
    report = averager.report()
    assert [rank.rank for rank in report.ranks] == [0, 1, 2]
    assert report.n_compared == 1  # neither the first step that all ranks know nor the last
    assert [step.number for step in averager.times][-3:] == list(range(n_steps, n_steps + 3))


@in_ranks(3)
def test_different_arrays_are_refused_by_name_and_the_group_goes_on(group: shoal.Group) -> None:
    pair = pair_of(group)
    if pair is None:
        other = {**SHAPES, "bias": ((999,), "float64")}
        with pytest.raises(UsageError, match=r"'bias' is not the same .*\[999\] on rank 2"):
            Averager(group, other)
        averager = Averager(group, SHAPES)
    else:
        averager = Averager(pair, SHAPES)
        with pytest.raises(UsageError, match=r"'bias' is not the same .*\[999\] on rank 2"):
            averager.regroup(group)
        averager.regroup(group)
    take_steps(averager, 0, 1)


@in_ranks(2)
def test_a_step_is_not_abandoned_while_its_group_lives(group: shoal.Group) -> None:
    averager = Averager(group, SHAPES)
    other = group.subgroup([0, 1], "other")
    averager.begin()
    fill(averager, 0, NAMES)
    with pytest.raises(UsageError, match=r"regroup within a step; call wait\(\) first"):
        averager.regroup(other)
    averager.wait()
    check(averager, 0)
    averager.begin()  # before any array is ready
    averager.regroup(other)
    take_steps(averager, 1)
    for turn in range(2):  # the step's reserved numbers are free again
        again = Averager(group, SHAPES)
        take_steps(again, turn)


@in_ranks(3)
def test_residuals_are_kept_and_a_new_rank_begins_without_any(group: shoal.Group) -> None:
    pair, model, before = pair_of(group), new_model(3), new_model(2)
    for step in range(3):
        before.step(gradients(2, step))
    model.residuals[:2] = before.residuals
    averager = feeding(group if pair is None else pair)
    if pair is not None:
        for step in range(3):
            average(averager, gradients(2, step)[group.rank])
        averager.regroup(group)
    for step in range(3, 6):
        check_step(averager, model, gradients(3, step))


@pytest.mark.parametrize("ends_on", [(), (0,), (1,), (0, 1)])
@in_ranks(3)
def test_rank_0s_last_step_decides_if_residuals_change(group: shoal.Group, ends_on: Any) -> None:
    averager, model = feeding(group), new_model(3)
    for step in range(2):
        check_step(averager, model, gradients(3, step))
    send(averager, gradients(3, 2)[group.rank])
    averager.send_rest()
    if group.rank in (2, *ends_on):
        averager.wait()
    group.barrier()
    if group.rank == 2:
        return
    averager.regroup(group.shrink([2]))
    if 0 in ends_on:
        model.step(gradients(3, 2))
    check_residuals(averager, model)
    model.residuals.pop()
    check_step(averager, model, gradients(2, 3))


@in_ranks(2)
def test_a_new_rank_sends_the_current_share_of_the_others(group: shoal.Group) -> None:
    scheme = ChunkTopK(1 / 64, warm_up=4)
    specs = {"x": ((8192,), "float32")}

    def sent(averager: Averager) -> int:
        averager.begin()["x"][...] = np.arange(8192, dtype=np.float32) + 1
        averager.ready("x")
        averager.wait()
        return int(np.count_nonzero(averager.arrays["x"]))

    if group.rank == 0:
        averager = Averager(group.subgroup([0], "alone"), specs, compress=scheme)
        assert [sent(averager) for _ in range(4)] == [2048, 2048, 512, 512]
        averager.regroup(group)
    else:
        averager = Averager(group, specs, compress=scheme)
    assert 128 <= sent(averager) <= 256  # 1/64 from each rank
