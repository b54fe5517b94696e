"""The torch front end works through host memory as on the CPU, over real ranks too."""

import threading
from collections.abc import Callable
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
from process.staged import staging
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import shoal.torch
from shoal.errors import PeerLost, UsageError

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


@on_survivors(SIZE, 1, has_stage=True)
def test_a_rank_that_dies_in_mid_call_leaves_no_work_running_on_the_others() -> None:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    with staging():
        tensor = torch.ones(1 << 18)
        dist.all_reduce(tensor)
        Stage.from_environment().meet(dist.get_rank(), SIZE, "reduced")
        if dist.get_rank() == 1:
            dist.all_reduce(tensor, async_op=True)
            die()
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        errors = [error_of(work.wait) for work in works]
        first = next((at for at, error in enumerate(errors) if error), 3)
        assert all(errors[first:]), "a call went well after one that did not"
        lost = shoal.torch.peer_lost()
        dist.destroy_process_group()
    assert isinstance(errors[-1], PeerLost)
    assert lost.rank == 1
    assert not [thread for thread in threading.enumerate() if "staging" in thread.name]
