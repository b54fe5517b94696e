"""The torch front end works through host memory as on the CPU, over real ranks too."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract import test_frontend_torch
from process.ddp_training import Gradients, gradients, randoms
from process.ranks import on_survivors
from process.shared_ranks import Case, SharedRanks, cases_in, in_torch
from process.stage import Stage, die, error_of
from process.staged import ThreadDevice, staging
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import shoal.torch
from shoal.errors import Closed, PeerLost, UsageError

SIZE = 3
# Checks of a call that waits at once: here its Work waits.
NOT_SO = "futures_hold_the_list_of_tensors"
WITHOUT_COPIES = {  # on some rank
    test_frontend_torch.case_torchs_queries_about_a_group,
    test_frontend_torch.case_an_aborted_group_is_closed,
    test_frontend_torch.case_lazily_conjugated_and_negated_tensors,
}


def check_staged(case: str) -> int:
    """Run a check, and return the number of copies."""
    with staging() as device:
        test_frontend_torch.in_rank(case)
    return device.n_copies


@pytest.mark.parametrize(
    "case", [one for one in cases_in(vars(test_frontend_torch)) if one.id != NOT_SO]
)
def test_a_check_of_the_front_end_passes(case: Case, three_ranks: SharedRanks) -> None:
    copies = three_ranks.run(check_staged, case.__name__)
    assert min(copies) > 0 or case in WITHOUT_COPIES


@in_torch("three_ranks")
def test_only_read_memory_is_copied_out_and_only_written_memory_back() -> None:
    """Make calls of two pieces, and an all-gather of four, beside ranks with other forms of it."""
    rank, own, whole = dist.get_rank(), torch.full((200,), 1.0 + dist.get_rank()), torch.empty(600)
    peer, calls = 2 - rank, dist.send if rank == 0 else dist.recv

    def gather() -> None:
        if rank == 1:
            dist.all_gather(list(whole.split(200)), own)
        else:
            dist.all_gather_into_tensor(whole, own)

    expected: list[tuple[Callable[[], object], int]] = [
        (lambda: dist.broadcast(own.clone(), 1), 2),
        (lambda: dist.reduce(own.clone(), 1), 4 if rank == 1 else 2),
        (lambda: dist.all_reduce(own.clone()), 4),
        (lambda: calls(own.clone(), peer) if rank != 1 else None, 1 if rank != 1 else 0),
        (gather, 4 * (1 + SIZE)),
    ]
    with staging(piece_bytes=512) as device:
        for call, n_copies in expected:
            before = device.n_copies
            call()
            assert device.n_copies - before == n_copies
    assert whole.tolist() == [1.0] * 200 + [2.0] * 200 + [3.0] * 200


@in_torch("three_ranks")
def test_an_input_that_overlaps_the_output_is_refused_unless_it_is_this_ranks_block() -> None:
    """Otherwise the first piece, copied back, would change the input of the second."""
    whole = torch.arange(600.0)
    with staging(piece_bytes=512):
        with pytest.raises(UsageError, match="and input overlap in memory"):
            dist.all_gather_into_tensor(whole, whole[1:201])
        own = whole.split(200)[dist.get_rank()].fill_(dist.get_rank())
        dist.all_gather_into_tensor(whole, own)
    assert whole.tolist() == [0.0] * 200 + [1.0] * 200 + [2.0] * 200


def trained(group: dist.ProcessGroup, hook: Any = None) -> list[Gradients]:
    """Return the gradients of three steps with torch's wrapper."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 5)).double()
    wrapped = nn.parallel.DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.0005)
    if hook is not None:
        wrapped.register_comm_hook(group, hook)
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        wrapped(randoms(step)).square().mean().backward()
        optimizer.step()
        found.append(gradients(net))
    return found


@in_torch("three_ranks")
def test_ddp_trains_as_over_gloo() -> None:
    expected = trained(dist.new_group(backend="gloo"))
    with staging(piece_bytes=256) as device:
        torch.testing.assert_close(trained(dist.group.WORLD), expected)
        torch.testing.assert_close(trained(dist.group.WORLD, allreduce_hook), expected)
    assert device.n_copies > 100


# All-reduces that first sum among a host's devices: Gloo stands in for NCCL.


N_RANKS = 4


@contextlib.contextmanager
def placed(hosts: str, timeout_s: float = 30.0) -> Iterator[ThreadDevice]:
    """Form the default group anew, with each rank on the host of its letter, and stage tensors."""
    rank = dist.get_rank()
    store = dist.PrefixStore("placed", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    os.environ["SHOAL_HOST_ID"] = hosts[rank]
    dist.init_process_group(
        "shoal", store=store, rank=rank, world_size=N_RANKS, timeout=timedelta(seconds=timeout_s)
    )
    with staging(4096, local_bytes=4096) as device:
        yield device
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[SharedRanks]:
    with Stage() as stage, SharedRanks(N_RANKS, **stage.env) as four:
        yield four


def given(n: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(n) + rank) % 5).to(dtype)


def total(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([given(n, rank, torch.float64) for rank in range(N_RANKS)]).sum(0).to(dtype)


@pytest.mark.parametrize(("hosts", "is_local"), [("abab", True), ("aaaa", True), ("aaab", False)])
@in_torch("four_ranks")
def test_sums_are_right_for_any_placement_of_ranks(hosts: str, is_local: bool) -> None:
    with placed(hosts, timeout_s=60) as device:
        rank = dist.get_rank()
        for n, dtype in [(8192, torch.float32), (8191, torch.float64), (40_003, torch.int64)]:
            tensor = given(n, rank, dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, total(n, dtype))
        mean = given(9001, rank, torch.float64)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        assert torch.equal(mean, total(9001, torch.float64) / N_RANKS)
        strided = given(10_000, rank, torch.float32).reshape(100, 100)
        dist.all_reduce(strided.t())
        assert torch.equal(strided, total(10_000, torch.float32).reshape(100, 100))
        # Long and short calls in flight, waited for in reverse.
        lengths = [2000 * k + 1 if k % 3 else k for k in range(1, 20)]
        tensors = [given(n, rank, torch.float32) for n in lengths]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works[::2]]
        for work in reversed(works):
            work.wait()
        for n, tensor in zip(lengths, tensors, strict=True):
            assert torch.equal(tensor, total(n, torch.float32))
        assert all(future.done() for future in futures)
        assert (local_calls() is not None) == is_local
        before = device.n_bytes
        dist.all_reduce(torch.ones(8192))
        if is_local:  # to the wire and back: only this rank's half, or zero
            assert device.n_bytes - before == (2 * 4096 * 4 if "b" in hosts else 0)
    # 6 single calls, and the 13 of 19 that are long enough.
    assert device.n_sums == (6 + 13 if is_local else 0)
    assert left_running() == ""


def local_calls() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))._devices._local


def reduce_and_wait(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, async_op=True).wait()


def left_running() -> str:
    names = [each.name for each in threading.enumerate()]
    return ",".join(name for name in names if name.startswith(("shoal-local", "shoal-staging")))


@pytest.mark.parametrize("hosts", ["aabb", "abbb"])
@on_survivors(N_RANKS, 3, has_stage=True)
def test_a_rank_that_dies_in_mid_call_is_named_and_leaves_no_work_running(hosts: str) -> None:
    """Devices of a host sum among themselves only if the hosts have equally many."""
    dist.init_process_group("shoal")
    with placed(hosts):
        tensor = torch.ones(1 << 18)
        dist.all_reduce(tensor)
        Stage.from_environment().meet(dist.get_rank(), N_RANKS, "reduced")
        if dist.get_rank() == 3:
            dist.all_reduce(tensor, async_op=True)
            die()
        if hosts == "aabb":
            errors = [error_of(reduce_and_wait, tensor) for _ in range(3)]
            assert {type(error) for error in errors} <= {PeerLost, type(None)}
        else:
            works: list[Any] = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
            errors = [error_of(work.wait) for work in works]
            first = next((at for at, error in enumerate(errors) if error), 3)
            assert all(errors[first:]), "a call went well after one that did not"
        lost = shoal.torch.peer_lost()
    assert isinstance(errors[-1], PeerLost)
    assert lost.rank == 3
    assert left_running() == ""


@in_torch("four_ranks")
def test_a_device_that_fails_ends_the_group_on_every_rank() -> None:
    def fail(*_given: Any) -> None:
        raise RuntimeError("NCCL has failed")

    with placed("aabb"):
        tensor = torch.ones(1 << 18)
        dist.all_reduce(tensor)
        Stage.from_environment().meet(dist.get_rank(), N_RANKS, "reduced")
        if dist.get_rank() == 2:
            local_calls()._collectives.reduce_scatter = fail
        errors = [error_of(reduce_and_wait, tensor) for _ in range(2)]
    assert all(errors)
    assert "NCCL has failed" in str(errors[0])
    assert left_running() == ""


@in_torch("four_ranks")
def test_closing_fails_a_call_in_flight_and_ends_its_thread() -> None:
    """Rank 3 has not made the call when the group closes."""
    with placed("aabb"):
        tensor = torch.ones(1 << 18)
        dist.all_reduce(tensor)
        work: Any = dist.all_reduce(tensor, async_op=True) if dist.get_rank() != 3 else None
        Stage.from_environment().meet(dist.get_rank(), N_RANKS, "called")
    if work is not None:
        assert isinstance(error_of(work.wait), (Closed, PeerLost))
    assert left_running() == ""
