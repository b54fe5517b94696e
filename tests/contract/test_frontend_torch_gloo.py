"""What torch.distributed does over Gloo it does over shoal: the same calls, the same results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from contract.gloo_cases import (
    MOVED,
    ROWS,
    SIZE,
    assert_passed,
    cases_in,
    given,
    ours,
    run_cases,
)
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

if TYPE_CHECKING:
    Tensor = torch.Tensor
    Group = dist.ProcessGroup

# ---- several at once ----


def case_coalesced_calls(group: Group) -> Any:
    rank = group.rank()
    results: list[Tensor] = []
    for async_op in (False, True):
        folded = [given(rank, n) for n in (2, 5)]
        wholes = [torch.empty(3 * n) for n in (2, 5)]
        blocks = [torch.empty(n) for n in (2, 5)]
        managers = []
        with dist._coalescing_manager(group, async_ops=async_op) as manager:
            for tensor in folded:
                dist.all_reduce(tensor, group=group)
        managers.append(manager)
        with dist._coalescing_manager(group, async_ops=async_op) as manager:
            for n, whole in zip((2, 5), wholes, strict=True):
                dist.all_gather_into_tensor(whole, given(rank, n), group=group)
        managers.append(manager)
        with dist._coalescing_manager(group, async_ops=async_op) as manager:
            for n, block in zip((2, 5), blocks, strict=True):
                dist.reduce_scatter_tensor(block, given(rank, 3 * n), group=group)
        managers.append(manager)
        for manager in managers:
            manager.wait()
        results += [*folded, *wholes, *blocks]
    return results


def case_mixed_calls_between_start_and_end(group: Group) -> Any:
    """What backends of devices coalesce; Gloo does it one by one."""
    rank = group.rank()
    right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
    folded, moved, got = given(rank, 4), given(rank, 3), torch.empty(2)

    def calls() -> list[Any]:
        return [
            dist.all_reduce(folded, group=group, async_op=True) if not ours(group) else None,
            dist.isend(given(rank, 2), group_dst=right, group=group),
            dist.irecv(got, group_src=left, group=group),
            dist.broadcast(moved, group_src=1, group=group, async_op=True),
        ]

    if ours(group):
        with dist._coalescing_manager(group, torch.device("cpu")):
            dist.all_reduce(folded, group=group)
            calls()
    else:
        for work in filter(None, calls()):
            work.wait()
    return [folded, moved, got]


def case_coalesced_lists(group: Group) -> Any:
    rank = group.rank()
    folded = [given(rank, 2), given(rank, 3)]
    dist.all_reduce_coalesced(folded, group=group)
    outputs = [[torch.empty(2), torch.empty(3)] for _ in range(SIZE)]
    dist.all_gather_coalesced(outputs, [given(rank, 2), given(rank, 3)], group=group)
    return [*folded, *(tensor for row in outputs for tensor in row)]


# ---- objects ----


def case_objects(group: Group) -> Any:
    rank = group.rank()
    mine = {"rank": rank, "pad": "x" * (50 * rank), "tensor": [1.5] * rank}
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, mine, group=group)
    at_root = [None] * SIZE if rank == 1 else None
    dist.gather_object(mine, at_root, group_dst=1, group=group)
    dealt: list[Any] = [None]
    cards = [("for", i, "y" * i) for i in range(SIZE)] if rank == 2 else None
    dist.scatter_object_list(dealt, cards, group_src=2, group=group)
    told = [rank, {"from": rank}] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, group_src=0, group=group)
    passed: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([{"a": 1}, "text"], group_dst=2, group=group)
    elif rank == 2:
        assert dist.recv_object_list(passed, group_src=0, group=group) == 0
    return [everyone, at_root, dealt, told, passed]


# ---- one to one ----


def case_send_and_recv(group: Group) -> Any:
    rank = group.rank()
    got = []
    for dtype in MOVED:
        if rank == 0:
            dist.send(given(0, 5, dtype=dtype), 2, group=group)
        elif rank == 2:
            got.append(torch.empty(5, dtype=dtype))
            assert dist.recv(got[-1], 0, group=group) == 0
    return got


def case_tags(group: Group) -> Any:
    rank = group.rank()
    if rank == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, group, tag) for tag in (3, 1, 2)]
        for work in works:
            assert work is not None
            work.wait()
    got = [torch.empty(3) for _ in range(3)]
    if rank == 1:
        for tag, tensor in enumerate(got, start=1):
            dist.recv(tensor, 0, group, tag)
        return got
    return []


def case_recv_from_any_source(group: Group) -> Any:
    rank = group.rank()
    seen = []
    if rank == 0:
        for _ in range(SIZE - 1):
            tensor = torch.empty(2)
            source = dist.recv(tensor, group=group, tag=5)
            seen.append((source, tensor.tolist()))
        tensor = torch.empty(1, dtype=torch.int64)
        work = dist.irecv(tensor, group=group, tag=6)
        assert work is not None
        work.wait()
        seen.append((work.source_rank(), tensor.tolist()))
    else:
        dist.send(torch.full((2,), float(rank)), 0, group, tag=5)
        if rank == 2:
            dist.send(torch.tensor([77]), 0, group, tag=6)
    return sorted(seen)


def case_batches(group: Group) -> Any:
    rank = group.rank()
    right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
    got = [torch.empty(2), torch.empty(2)]
    ops = [
        dist.P2POp(dist.irecv, got[0], left, group),
        dist.P2POp(dist.isend, given(rank, 2), right, group),
        dist.P2POp(dist.irecv, got[1], group=group, group_peer=right, tag=9),
        dist.P2POp(dist.isend, given(rank, 2, seed=1), group=group, group_peer=left, tag=9),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


# ---- barriers ----


def case_barriers(group: Group) -> Any:
    dist.barrier(group=group)
    dist.barrier(group=group, device_ids=[0])
    work = dist.barrier(group=group, async_op=True, timeout=timedelta(seconds=20))
    assert work is not None
    work.wait()
    group.monitored_barrier(timedelta(seconds=20))
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    if not ours(group):  # tests/process/test_torch_versions.py has whether torch lets shoal's
        dist.monitored_barrier(group, timedelta(seconds=20), wait_all_ranks=True)
    return []


# ---- works and futures ----


def case_works(group: Group) -> Any:
    tensor = given(group.rank(), 9)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert not work.exception()
    outputs = [torch.empty(2) for _ in range(SIZE)]
    gathered = dist.all_gather(outputs, given(group.rank(), 2), group=group, async_op=True)
    doubled = gathered.get_future().then(lambda done: 2 * torch.cat(done.value()[-SIZE:]).flatten())
    return [tensor, work.result()[0], doubled.wait()]


# ---- functional collectives ----


def case_functional_collectives(group: Group) -> Any:
    rank = group.rank()
    mine, long = given(rank, 4), given(rank, 6, 2)
    n_given, n_taken = ROWS[rank], [row[rank] for row in ROWS]
    results = [
        functional.all_reduce(mine, "sum", group),
        functional.all_reduce(mine, "max", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.all_gather_tensor(long, 1, group),
        functional.reduce_scatter_tensor(long, "sum", 0, group),
        functional.broadcast(mine, 1, group),
        functional.all_to_all_single(long, None, None, group),
        functional.all_to_all_single(long, n_taken, n_given, group)
        if sum(n_given) == 6
        else functional.all_to_all_single(given(rank, sum(n_given), 2), n_taken, n_given, group),
        functional.permute_tensor(mine, [1, 2, 0], group),
        *functional.all_reduce_coalesced([mine, long], "sum", group),
        *functional.all_gather_into_tensor_coalesced([mine, long], group),
        *functional.reduce_scatter_tensor_coalesced([long, 2 * long], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(result).clone() for result in results]


def case_gradients_of_functional_collectives(group: Group) -> Any:
    rank = group.rank()
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        lambda x: functional.all_to_all_single_autograd(x, [1] * SIZE, [1] * SIZE, group),
    ]
    results = []
    for call in calls:
        leaf = given(rank, SIZE, 2).requires_grad_()
        output = call(leaf)
        weights = given(rank, *output.shape, seed=1)
        (output * weights).sum().backward()
        results += [output.detach().clone(), leaf.grad]
    return results


# ---- groups ----


def case_groups(group: Group) -> Any:
    name = dist.get_backend(group)
    pair = dist.new_group([0, 2], backend=name)
    own, _ = dist.new_subgroups(group_size=1, group=dist.group.WORLD)
    some, _ = dist.new_subgroups_by_enumeration([[2, 0], [1]], backend=name)
    results: list[Any] = [dist.get_world_size(own), dist.get_process_group_ranks(some)]
    tensor = given(group.rank(), 3)
    dist.all_reduce(tensor, group=some)
    results.append(tensor)
    if group.rank() != 1:
        results += [
            dist.get_process_group_ranks(pair),
            dist.get_group_rank(pair, 2),
            dist.get_global_rank(pair, 1),
            dist.get_rank(pair),
        ]
        moved = torch.tensor([float(group.rank())])
        dist.broadcast(moved, src=2, group=pair)
        dist.reduce(moved, dst=2, group=pair)
        results.append(moved if group.rank() == 2 else None)
    return results


def case_questions(group: Group) -> Any:
    name = dist.get_backend(group)
    assert dist.is_available()
    assert dist.is_initialized()
    assert dist.is_backend_available(name)
    assert dist.get_pg_count() >= 2
    served = "cpu:shoal" if ours(group) else "cpu:gloo,cuda:gloo"
    assert dist.get_backend_config(group) == served
    return [dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)]


CASES = cases_in(globals())


def run_in_a_rank() -> dict[str, str]:
    return run_cases(CASES)


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_in_a_rank, SIZE, deadline_s=110)


@pytest.mark.parametrize("case", CASES)
def test_shoal_does_what_gloo_does(failures: list[dict[str, str]], case: str) -> None:
    assert_passed(failures, case)
