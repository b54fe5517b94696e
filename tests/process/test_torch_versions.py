"""Behaviour that differs between torch versions, on the installed one."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.shared_ranks import Case, SharedRanks, cases_in, in_torch
from process.stage import error_of
from torch._C import _distributed_c10d as c10d

from shoal.errors import TimedOut
from shoal.frontend.torch.work_holders import patch_work_holders

TIMEOUT = timedelta(seconds=20)
N_WAITS = 200


def case_a_rank_outside_a_split_gets_none() -> None:
    world = dist.group.WORLD
    how = {"group_name": "even", "group_desc": "the even ones"}
    if dist.get_rank() != 1:
        half = world.split_group([2, 0], **how)  # numbered in ascending order
        tensor = torch.ones(1)
        half.allreduce([tensor]).wait()
        found = [half.rank(), half.size(), half.group_name, half.group_desc, tensor.item()]
        assert found == [dist.get_rank() // 2, 2, "even", "the even ones", 2.0]
    else:
        assert world.split_group([0, 2], **how) is None


def split_by_torch() -> str:
    try:
        half = dist.split_group(None, [[0, 2], [1]])
    except RuntimeError as refused:
        return str(refused)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=half)
    members = [1] if dist.get_rank() == 1 else [0, 2]
    assert dist.get_process_group_ranks(half) == members
    assert tensor.item() == len(members)
    return ""


def test_split_group_works_where_torch_supports_it_on_cpu(three_ranks: SharedRanks) -> None:
    refused = three_ranks.run(split_by_torch)[0]
    if refused and "support" not in refused:
        pytest.skip(f"torch {torch.__version__} splits no groups of the CPU: {refused}")
    assert refused == ""


def meet_by_torch() -> str:
    return str(error_of(dist.monitored_barrier, dist.group.WORLD, TIMEOUT) or "")


def test_monitored_barrier_passes_where_torch_does_not_require_gloo(
    three_ranks: SharedRanks,
) -> None:
    errors = three_ranks.run(meet_by_torch)
    if "GLOO" in errors[0]:
        pytest.skip(f"torch {torch.__version__} refuses: {errors[0]}")
    assert errors == [""] * 3


def case_monitored_barriers_without_a_timeout_pass_when_all_ranks_call() -> None:
    dist.group.WORLD.monitored_barrier()


@pytest.mark.skipif(
    not hasattr(c10d.Backend, "_supports_time_estimate"), reason="this torch estimates no times"
)
@in_torch("three_ranks")
def test_a_time_estimate_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="estimator is not supported"):
        dist._time_estimator().__enter__()


def case_is_completed_is_true_only_after_completion() -> None:
    gate = dist.new_group([0, 1])
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        if dist.get_rank() == 1:
            dist.barrier(gate)
            dist.send(torch.ones(2), 0, group=group)
        elif dist.get_rank() == 0:
            work = dist.irecv(torch.zeros(2), 1, group=group)
            assert not work.is_completed()
            dist.barrier(gate)
            work.wait()
            assert (work.is_completed(), work.is_success()) == (True, True)
            if group is dist.group.WORLD:  # before torch 2.13 Gloo's raises TypeError
                assert work.exception() is None
    dist.barrier()  # until then rank 2 does not leave: Gloo's ranks 0 and 1 may be connecting


def case_a_timed_out_work_reports_the_timeout() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    if dist.get_rank() == 0:  # rank 1 stays away
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        raised = error_of(work.wait)
        assert isinstance(raised, TimedOut)
        assert isinstance(raised, TimeoutError)
        assert (work.is_completed(), work.is_success()) == (True, False)
        kept = work.exception()
        assert (type(kept), str(kept)) == (type(raised), str(raised))
    dist.barrier()  # until then rank 1 does not leave


def case_a_receive_from_any_source_returns_the_source() -> None:
    tensor = torch.zeros(1)
    if dist.get_rank() == 2:
        for value in (7.0, 8.0):
            dist.send(torch.tensor([value]), 0, tag=5)
    elif dist.get_rank() == 0:
        assert (dist.recv(tensor, tag=5), tensor.item()) == (2, 7.0)
        work = dist.irecv(tensor, tag=5)
        work.wait()
        assert (work.source_rank(), tensor.item()) == (2, 8.0)


def case_every_future_is_done_once_wait_returns() -> None:
    for _ in range(N_WAITS):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
        assert work.get_future().done()


def case_works_of_other_classes_keep_their_own_methods() -> None:
    """Works of other classes, some of which wrap a Work without naming its class."""
    patch_work_holders()  # as making a group does, from torch 2.14 on
    future: torch.futures.Future[Any] = torch.futures.Future()
    work = c10d._create_work_from_future(future)
    assert not work.is_completed()
    future.set_result([torch.ones(1)])
    assert work.is_completed()
    assert work.is_success()
    assert "sourceRank() not implemented" in str(error_of(work.source_rank))


def case_symmetric_memory_and_its_users_are_refused() -> None:
    from torch.distributed import _symmetric_memory as symmetric

    name = dist.group.WORLD.group_name
    refused = "SymmetricMemory does not support device type cpu"
    assert refused in str(error_of(symmetric.empty, 4, device="cpu"))
    assert refused in str(error_of(symmetric.rendezvous, torch.ones(4), name))
    # Asynchronous tensor parallelism replaces an all-gather and a product by this.
    one = torch.ones(2, 2)
    product = torch.ops.symm_mem.fused_all_gather_matmul
    assert isinstance(error_of(product, one, [one], 0, name), NotImplementedError)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_torch(case: Case, three_ranks: SharedRanks) -> None:
    three_ranks.run(case)
