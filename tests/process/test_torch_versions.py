"""Works, barriers that name missing ranks, profiles, hooks, costs of groups; on any torch."""

import time
from collections.abc import Callable
from datetime import timedelta
from types import NoneType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.ranks import on_survivors
from process.shared_ranks import Case, SharedRanks, cases_in, gloo_group, in_torch
from process.stage import die, error_of, holdings
from torch import nn
from torch._C import _distributed_c10d as c10d

from shoal.errors import PeerLost, TimedOut
from shoal.frontend.torch import monitored_barrier
from shoal.frontend.torch.hooks import bf16_hook
from shoal.frontend.torch.work_holders import patch_work_holders

TIMEOUT = timedelta(seconds=20)


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


N_GROUPS = 64


def receive_after_all_but(absent: int) -> Callable[..., Any]:
    receive = monitored_barrier._receive

    def patient(group: Any, rank: int, timeout_s: float) -> Any:
        work = receive(group, rank, 20.0)
        if rank != absent:
            work.wait(20.0)
        return work

    return patient


@pytest.mark.parametrize(
    ("absent", "words"),
    [(2, "these ranks had not arrived: 2"), (0, "received nothing from rank 0 for 0.3 s")],
)
@in_torch("three_ranks")
def test_a_monitored_barrier_names_a_missing_rank_and_keeps_its_deadline(
    absent: int, words: str
) -> None:
    """Rank `absent` calls only after the others have given up.

    Rank 0 checks for late ranks once the others have called, and they leave that to it.
    """
    store, group = dist.distributed_c10d._get_default_store(), dist.group.WORLD
    rank = group.rank()
    group.monitored_barrier(timedelta(seconds=20))
    if rank == absent:
        store.wait([f"rank {other} gave rank {absent} up" for other in {0, 1, 2} - {absent}])
    begin = time.monotonic()
    timeout = timedelta(seconds=0.3 if 0 in (rank, absent) else 10)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0 != absent:
            patch.setattr(monitored_barrier, "_receive", receive_after_all_but(absent))
        error = error_of(group.monitored_barrier, timeout, wait_all_ranks=True)
    took_s = time.monotonic() - begin
    store.set(f"rank {rank} gave rank {absent} up", "")
    dist.barrier()  # the group is still usable
    group.monitored_barrier(timedelta(seconds=20))
    assert isinstance(error, TimedOut), error
    assert took_s < 20, "that of the group, or of the barriers that all pass"
    assert words in str(error) or rank == absent
    assert "aborted the group" not in str(error) or "only the barrier's group ended" in str(error)


@in_torch("three_ranks")
def test_monitored_barriers_match_after_one_that_failed_on_some_ranks() -> None:
    """Rank 2 gives the first barrier up when rank 1 has passed it."""
    store, group = dist.distributed_c10d._get_default_store(), dist.group.WORLD
    rank = group.rank()

    def give_up(*_args: Any) -> Any:
        store.wait(["rank 1 has passed"])
        raise TimedOut("too late")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(monitored_barrier, "_receive", give_up)
        error = error_of(group.monitored_barrier, timedelta(seconds=20))
    if rank == 1:
        store.set("rank 1 has passed", "")
    assert isinstance(error, NoneType if rank == 1 else TimedOut), error
    for _ in range(3):
        group.monitored_barrier(timedelta(seconds=20))


@on_survivors(3, 1)
def test_a_monitored_barrier_does_not_wait_for_dead_ranks() -> None:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    if dist.get_rank() == 1:
        die()
    with pytest.raises(PeerLost, match="rank 1"):
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))


def case_a_profile_shows_the_same_ranges_as_with_gloo() -> None:
    ours = profile("shoal", dist.new_group(backend="shoal"))
    with gloo_group() as gloo:
        theirs = profile("gloo", gloo)
    assert "sparse_all_reduce" in ours
    assert ours - {"wait"} == theirs


def profile(backend: str, group: dist.ProcessGroup) -> set[str]:
    rank, size = group.rank(), group.size()
    parts = [torch.ones(2) for _ in range(size)]
    entries = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=False)
    with torch.autograd.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(2), group=group)
        dist.broadcast(torch.ones(2), 0, group=group)
        dist.all_gather(parts, torch.ones(2), group=group, async_op=True).wait()
        dist.gather(torch.ones(2), parts if rank == 0 else None, group=group)
        dist.scatter(torch.ones(2), parts if rank == 0 else None, group=group)
        dist.reduce(torch.ones(2), 0, group=group)
        dist.all_to_all_single(torch.ones(size), torch.ones(size), group=group)
        dist.all_reduce(entries, group=group)
        dist.barrier(group=group)
        if rank == 0:
            dist.send(torch.ones(2), 1, group=group)
        elif rank == 1:
            dist.recv(torch.ones(2), 0, group=group)
    found = (event.key.partition(f"{backend}:") for event in profiler.key_averages())
    return {name for before, prefix, name in found if prefix and not before}


def case_subgroups_cost_no_thread_no_descriptor_and_no_shared_memory() -> None:
    dist.barrier()
    before = holdings()
    groups = [dist.new_group(use_local_synchronization=True) for _ in range(N_GROUPS)]
    after = holdings()
    total = torch.zeros(1)
    for number, group in enumerate(groups):
        tensor = torch.tensor([float(number)])
        dist.all_reduce(tensor, group=group)
        total += tensor
    # A thread that began with the first group may have ended since.
    for what in ("threads", "descriptors", "shared mappings", "shared KiB"):
        assert after[what] <= before[what], (what, before, after)
    assert total.item() == dist.get_world_size() * sum(range(N_GROUPS))


def trained(rank: int, module: nn.Module) -> torch.Tensor:
    """Return the gradients of one pass over the inputs of a rank."""
    data = torch.randn(6, 40, generator=torch.Generator().manual_seed(rank))
    module(data).square().mean().backward()
    return torch.cat([each.grad.flatten() for each in module.parameters()])


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(40, 30)


def case_the_hook_divides_rounds_sums_and_widens() -> None:
    group = dist.new_group([0, 1])  # two ranks, so a sum has only one right result
    if dist.get_rank() == 2:
        return
    expected = sum((trained(rank, layer()) / 2).to(torch.bfloat16) for rank in range(2))
    wrapped = nn.parallel.DistributedDataParallel(layer(), bucket_cap_mb=0.001, process_group=group)
    wrapped.register_comm_hook(group, bf16_hook)
    assert torch.equal(trained(dist.get_rank(), wrapped), expected.float())


@pytest.mark.parametrize("case", cases_in(globals()))
def test_torch(case: Case, three_ranks: SharedRanks) -> None:
    three_ranks.run(case)
