"""Works and futures, torch's own layers, and what cannot be done, over real processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from contract.torch_checks import (
    SIZES,
    assert_passed,
    barrier,
    check_close,
    check_equal,
    checks_in,
    given,
    raised,
    reduced,
    run_checks,
    sync_options,
    wide,
)
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    Tensor = torch.Tensor
    Group = dist.ProcessGroup


# ---- works and futures ----


def check_async_works(group: Group) -> None:
    size = group.size()
    tensors = [torch.ones(1000 * k + 1) for k in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait() is True
        if hasattr(group, "describe"):  # else torch wraps ours in one that knows only wait
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
    for tensor in tensors:
        check_equal(tensor, torch.full_like(tensor, float(size)))


def check_futures_hold_the_list_of_tensors(group: Group) -> None:
    size = group.size()
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    check_equal(doubled.wait(), torch.full((10,), 2.0 * size))
    assert future.value()[0] is tensor
    finished = group.allreduce([tensor], sync_options()).get_future()
    assert finished.done()
    assert finished.value()[0] is tensor


def check_a_future_is_done_after_the_copy_back(group: Group) -> None:
    size = group.size()
    matrix = torch.ones(300, 200)
    future = dist.all_reduce(matrix.t()[::3], group=group, async_op=True).get_future()
    seen = future.then(lambda _: matrix.clone()).wait()
    assert seen[:, ::3].unique().tolist() == [float(size)]
    assert seen[:, 1::3].unique().tolist() == [1.0]


def check_a_callback_may_wait_for_another_future(group: Group) -> None:
    """What DDP's PowerSGD hook does."""
    size = group.size()

    def next_one(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        again = dist.all_reduce(done.value()[0], group=group, async_op=True)
        return again.get_future().wait()[0]

    future = dist.all_reduce(torch.ones(5), group=group, async_op=True).get_future()
    check_equal(future.then(next_one).wait(), torch.full((5,), float(size * size)))


def check_async_calls_of_every_kind(group: Group) -> None:
    rank, size = group.rank(), group.size()
    outputs = [torch.empty(3) for _ in range(size)]
    whole, block = torch.empty(3 * size), torch.empty(3)
    works = [
        dist.barrier(group=group, async_op=True),
        dist.broadcast(torch.ones(2), group_src=0, group=group, async_op=True),
        dist.all_gather(outputs, torch.full((3,), float(rank)), group=group, async_op=True),
        dist.all_gather_into_tensor(whole, torch.ones(3), group=group, async_op=True),
        dist.reduce_scatter_tensor(block, torch.ones(3 * size), group=group, async_op=True),
    ]
    values = [work.get_future().wait() for work in works]
    assert [len(value) for value in values] == [0, 1, size, 1, 1]
    check_equal(torch.stack(outputs)[:, 0], torch.arange(float(size)))
    check_equal(block, torch.full((3,), float(size)))


# ---- torch's own layers ----


def check_functional_collectives(group: Group) -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = group.rank(), group.size()
    mine = torch.arange(6.0) + rank
    total = sum(torch.arange(6.0) + other for other in range(size))
    check_equal(functional.all_reduce(mine, "sum", group) + 0, total)
    check_close(functional.all_reduce(mine, "avg", group) + 0, wide(total / size))
    gathered = functional.all_gather_tensor(mine, 0, group) + 0
    check_equal(gathered, torch.cat([torch.arange(6.0) + other for other in range(size)]))
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group) + 0
    check_equal(scattered, size * mine)
    check_equal(functional.broadcast(mine, 0, group) + 0, torch.arange(6.0))
    pair = functional.all_reduce_coalesced([mine, 2 * mine], "sum", group)
    check_equal(pair[0] + 0, total)
    check_equal(pair[1] + 0, 2 * total)


def check_what_torch_asks_about_a_group(group: Group) -> None:
    assert dist.get_backend(group) == "shoal"
    assert group._get_backend(torch.device("cpu")).name() == "shoal"
    assert (group.rank(), group.size()) == (dist.get_rank(), dist.get_world_size())
    assert torch.device("cpu") in group._device_types
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    assert group.group_desc == "a group for checks"
    assert not group._get_backend(torch.device("cpu")).supports_tensor_alloc("cpu")
    before = group._get_sequence_number_for_group()
    barrier(group)
    assert group._get_sequence_number_for_group() == before + 1


def check_overloads_without_options(group: Group) -> None:
    size, timeout = group.size(), timedelta(seconds=5)
    tensor = torch.ones(3)
    group.allreduce(tensor, dist.ReduceOp.SUM, timeout).wait()
    group.allreduce([tensor], op=dist.ReduceOp.MAX).wait()
    group.broadcast(tensor, root=size - 1).wait()
    outputs = [torch.empty(3) for _ in range(size)]
    group.allgather(outputs, tensor, timeout=timeout).wait()
    block = torch.empty(3)
    group.reduce_scatter(block, outputs, dist.ReduceOp.AVG).wait()
    group.barrier(timeout=timeout).wait()
    check_equal(block, torch.full((3,), float(size)))


def check_groups_of_some_ranks(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for members in ([0], list(range(size)), list(range(size - 1)), list(range(1, size))):
        if not members:
            continue
        some = dist.new_group(members)
        if rank not in members:
            assert some is dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert (some.rank(), some.size()) == (members.index(rank), len(members))
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=some)
        assert tensor.item() == sum(members)
        dist.broadcast(tensor.fill_(rank), src=members[-1], group=some)
        assert tensor.item() == members[-1]


def check_a_gloo_group_beside_gives_the_same(group: Group) -> None:
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        ours, theirs = (given(dtype, group.rank(), 1001) for _ in range(2))
        dist.all_reduce(ours, group=group)
        dist.all_reduce(theirs, group=gloo)
        check_close(ours, wide(theirs))
    dist.destroy_process_group(gloo)


def check_a_group_can_be_destroyed_and_another_made(group: Group) -> None:
    barrier(group)
    dist.destroy_process_group(group)
    again = dist.new_group()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=again)
    assert tensor.tolist() == [float(dist.get_world_size())] * 2


# ---- what cannot be done ----


def check_folds_without_a_meaning_are_refused(group: Group) -> None:
    for dtype, fold in ((torch.float32, "BAND"), (torch.complex64, "MAX"), (torch.bool, "AVG")):
        error = raised(
            lambda dtype=dtype, fold=fold: reduced(group, torch.ones(2, dtype=dtype), fold)
        )
        assert type(error).__name__ == "UsageError", repr(error)
    barrier(group)


def check_wrong_lists_are_refused(group: Group) -> None:
    size, one = group.size(), torch.ones(2)
    parts = [torch.ones(2) for _ in range(size)]
    wrong: list[Callable[[], Any]] = [
        lambda: group.allreduce([one, one]),
        lambda: group.allgather([parts + parts], [one]),
        lambda: group.allgather([[torch.ones(3) for _ in parts]], [one]),
        lambda: group.allgather([[part.double() for part in parts]], [one]),
        lambda: group._allgather_base(torch.ones(2 * size + 1), one),
        lambda: group.reduce_scatter([one], [parts + parts]),
        lambda: group._reduce_scatter_base(one, torch.ones(2 * size + 1)),
        lambda: group.allgather_coalesced([[one]] * (size + 1), [one]),
        lambda: group.broadcast(one, root=size),
    ]
    for number, call in enumerate(wrong):
        assert type(raised(call)).__name__ == "UsageError", f"call {number}"
    barrier(group)


def check_a_mismatch_is_an_error_on_every_rank_and_names_both_sides(group: Group) -> None:
    if group.size() == 1:
        return
    tensor = torch.ones(3 if group.rank() == 0 else 4)
    error = raised(lambda: dist.all_reduce(tensor, group=group))
    assert type(error).__name__ == "UsageError", repr(error)
    assert "3" in str(error), str(error)
    assert "4" in str(error), str(error)
    again = raised(lambda: dist.all_reduce(torch.ones(1), group=group))
    assert again is not None


def check_a_deadline_that_passes_is_an_error(group: Group) -> None:
    if group.size() == 1:
        return
    hasty = dist.new_group(timeout=timedelta(seconds=0.3))
    if group.rank() != 0:
        error = raised(lambda: dist.all_reduce(torch.ones(1), group=hasty))
        assert type(error).__name__ == "TimedOut", repr(error)
        assert isinstance(error, TimeoutError)
        assert isinstance(error, RuntimeError)
        assert "timed out" in str(error)
    barrier(group)


def check_an_aborted_group_is_closed(group: Group) -> None:
    doomed = dist.new_group(timeout=timedelta(seconds=30))
    barrier(group)
    if group.rank() == 0:
        dist.distributed_c10d._abort_process_group(doomed)
    else:
        error = raised(lambda: dist.all_reduce(torch.ones(1), group=doomed))
        assert type(error).__name__ == "Closed", repr(error)
    barrier(group)


CHECKS = checks_in(globals())


def run_in_a_rank() -> dict[str, str]:
    return run_checks(CHECKS)


@pytest.fixture(scope="module", params=SIZES)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_ranks(run_in_a_rank, request.param, deadline_s=110)


@pytest.mark.parametrize("check", CHECKS)
def test_torch(failures: list[dict[str, str]], check: str) -> None:
    assert_passed(failures, check)
