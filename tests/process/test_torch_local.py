"""All-reduces that first sum among a host's devices, over real ranks: Gloo stands in for NCCL."""

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.ranks import on_survivors
from process.shared_ranks import SharedRanks, in_torch
from process.stage import Stage, die, error_of
from process.staged import ThreadDevice, staging

import shoal.torch
from shoal.errors import Closed, PeerLost

SIZE = 4


@contextlib.contextmanager
def placed(hosts: str, timeout_s: float = 30.0) -> Iterator[ThreadDevice]:
    """Form the default group anew, with each rank on the host of its letter, and stage tensors."""
    rank = dist.get_rank()
    store = dist.PrefixStore("placed", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    os.environ["SHOAL_HOST_ID"] = hosts[rank]
    dist.init_process_group(
        "shoal", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=timeout_s)
    )
    with staging(4096, local_bytes=4096) as device:
        yield device
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[SharedRanks]:
    with Stage() as stage, SharedRanks(SIZE, **stage.env) as four:
        yield four


def given(n: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(n) + rank) % 5).to(dtype)


def total(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([given(n, rank, torch.float64) for rank in range(SIZE)]).sum(0).to(dtype)


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
        assert torch.equal(mean, total(9001, torch.float64) / SIZE)
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


@on_survivors(SIZE, 3, has_stage=True)
def test_a_rank_that_dies_in_mid_call_is_named_on_all_hosts() -> None:
    dist.init_process_group("shoal")
    with placed("aabb"):
        tensor = torch.ones(1 << 18)
        dist.all_reduce(tensor)
        Stage.from_environment().meet(dist.get_rank(), SIZE, "reduced")
        if dist.get_rank() == 3:
            dist.all_reduce(tensor, async_op=True)
            die()
        errors = [error_of(reduce_and_wait, tensor) for _ in range(3)]
        lost = shoal.torch.peer_lost()
    assert isinstance(errors[-1], PeerLost)
    assert {type(error) for error in errors} <= {PeerLost, type(None)}
    assert lost.rank == 3
    assert left_running() == ""


@in_torch("four_ranks")
def test_a_device_that_fails_ends_the_group_on_every_rank() -> None:
    def fail(*_given: Any) -> None:
        raise RuntimeError("NCCL has failed")

    with placed("aabb"):
        tensor = torch.ones(1 << 18)
        dist.all_reduce(tensor)
        Stage.from_environment().meet(dist.get_rank(), SIZE, "reduced")
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
        Stage.from_environment().meet(dist.get_rank(), SIZE, "called")
    if work is not None:
        assert isinstance(error_of(work.wait), (Closed, PeerLost))
    assert left_running() == ""
