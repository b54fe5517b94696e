"""Works and futures, torch's own layers, and what cannot be done, over real processes."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from contract.torch_checks import (
    barrier,
    check_equal,
    reduced,
)
from process.shared_ranks import Case, SharedRanks, cases_in
from process.stage import error_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    Tensor = torch.Tensor
    Group = dist.ProcessGroup


# ---- works and futures ----


def case_async_works(group: Group) -> None:
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


def case_futures_hold_the_list_of_tensors(group: Group) -> None:
    size = group.size()
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    check_equal(doubled.wait(), torch.full((10,), 2.0 * size))
    assert future.value()[0] is tensor
    at_once = dist.AllreduceOptions()
    at_once.asyncOp = False
    finished = group.allreduce([tensor], at_once).get_future()
    assert finished.done()
    assert finished.value()[0] is tensor


def case_a_future_is_done_after_the_copy_back(group: Group) -> None:
    size = group.size()
    matrix = torch.ones(300, 200)
    future = dist.all_reduce(matrix.t()[::3], group=group, async_op=True).get_future()
    seen = future.then(lambda _: matrix.clone()).wait()
    assert seen[:, ::3].unique().tolist() == [float(size)]
    assert seen[:, 1::3].unique().tolist() == [1.0]


def case_a_callback_may_wait_for_another_future(group: Group) -> None:
    """What DDP's PowerSGD hook does."""
    size = group.size()

    def next_one(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        again = dist.all_reduce(done.value()[0], group=group, async_op=True)
        return again.get_future().wait()[0]

    future = dist.all_reduce(torch.ones(5), group=group, async_op=True).get_future()
    check_equal(future.then(next_one).wait(), torch.full((5,), float(size * size)))


def case_async_calls_of_every_kind(group: Group) -> None:
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


def case_what_torch_asks_about_a_group(_world: Group) -> None:
    group = dist.new_group(group_desc="a group for checks")
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


def case_overloads_without_options(group: Group) -> None:
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


def case_a_group_can_be_destroyed_and_another_made(_world: Group) -> None:
    some = dist.new_group()
    barrier(some)
    dist.destroy_process_group(some)
    again = dist.new_group()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=again)
    assert tensor.tolist() == [float(dist.get_world_size())] * 2


# ---- what cannot be done ----


def case_folds_without_a_meaning_are_refused(group: Group) -> None:
    for dtype, fold in ((torch.float32, "BAND"), (torch.complex64, "MAX"), (torch.bool, "AVG")):
        error = error_of(
            lambda dtype=dtype, fold=fold: reduced(group, torch.ones(2, dtype=dtype), fold)
        )
        assert type(error).__name__ == "UsageError", repr(error)
    barrier(group)


def case_an_aborted_group_is_closed(group: Group) -> None:
    doomed = dist.new_group(timeout=timedelta(seconds=30))
    barrier(group)
    if group.rank() == 0:
        dist.distributed_c10d._abort_process_group(doomed)
    else:
        error = error_of(lambda: dist.all_reduce(torch.ones(1), group=doomed))
        assert type(error).__name__ == "Closed", repr(error)
    barrier(group)


def in_rank(case: str) -> None:
    globals()[case](dist.group.WORLD)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_torch(case: Case, one_or_three_ranks: SharedRanks) -> None:
    one_or_three_ranks.run(in_rank, case.__name__)
