"""Check and time calls that use NCCL among the GPUs of a host, and the network between hosts.

Each rank has its own GPU. All hosts are this machine under several names. Numbers are small
integers, so sums are exact.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from correct import Rank, lose_last, same, same_everywhere
from ranks import failure_of
from speed import measure


def _begin(device: str, n_hosts: int, longest: int) -> Rank:
    """Join the group, and return this rank with its own GPU."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["SHOAL_HOST_ID"] = f"host {rank * n_hosts // size}"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("shoal", timeout=timedelta(seconds=60))
    it = Rank(dist.group.WORLD, device, longest)
    it.device = torch.device(device, rank) if device == "cuda" else it.device
    return it


def checks(device: str, n_hosts: int, longest: int) -> dict[str, str]:
    """Run every check on this rank; return the traceback of each, or "" if it passed."""
    it = _begin(device, n_hosts, longest)
    failures = {name: failure_of(check, it) for name, check in _CHECKS.items()}
    if device == "cuda" and _calls_of(it.group) is None:
        failures["nccl_was_used"] = "all-reduces went through host memory; see the log"
    dist.destroy_process_group()
    return failures


def _calls_of(group: Any) -> Any:
    backend = group if hasattr(group, "_devices") else group._get_backend(torch.device("cuda"))
    return backend._devices and backend._devices._local


def _sums(it: Rank) -> None:
    for n in range(it.lengths[-1], it.lengths[-1] + 3):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            tensor = it.given(n, dtype=dtype)
            dist.all_reduce(tensor)
            same(tensor, it.total(n).to(dtype))
    mean = it.given(it.lengths[-1], dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    same(mean, it.total(it.lengths[-1]).double() / it.size)


def _many_in_flight(it: Rank) -> None:
    lengths = [it.lengths[-1] + k if k % 2 else 1000 + k for k in range(12)]
    tensors = [it.given(n) for n in lengths]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for n, tensor in zip(lengths, tensors, strict=True):
        same(tensor, it.total(n))


def _made_late_and_read_at_once(it: Rank) -> None:
    n = it.lengths[-1]
    tensor, seen = torch.empty(n, device=it.device), torch.empty(n, device=it.device)
    if it.rank == it.size - 1:
        it.slow()
    tensor.copy_(it.given(n))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    seen.copy_(tensor)
    same(seen, it.total(n))


def _same_bits_every_time(it: Rank) -> None:
    torch.manual_seed(it.rank)
    given = torch.randn(it.lengths[-1], device=it.device)
    first = given.clone()
    dist.all_reduce(first)
    for _ in range(5):
        again = given.clone()
        dist.all_reduce(again)
        same(again, first)
    same_everywhere(it, first)


def _ordinary_training(it: Rank) -> None:
    torch.manual_seed(0)
    width = 2048 if it.on_gpu else 64
    model = torch.nn.Linear(width, width).to(it.device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        model.zero_grad()
        wrapped(torch.full((4, width), float(it.rank + 1), device=it.device)).sum().backward()
        expected = 4 * sum(range(1, it.size + 1)) / it.size
        same(model.weight.grad, torch.full_like(model.weight, expected))


_CHECKS: dict[str, Callable[[Rank], None]] = {
    "sums": _sums,
    "many_in_flight": _many_in_flight,
    "made_late_and_read_at_once": _made_late_and_read_at_once,
    "same_bits_every_time": _same_bits_every_time,
    "ordinary_training": _ordinary_training,
}


def lost_peer(device: str, n_hosts: int, longest: int) -> dict[str, str]:
    """Form a group on this rank, and run `lose_last`."""
    return lose_last(_begin(device, n_hosts, longest), longest)


def speeds(
    device: str, n_hosts: int, longest: int, seconds: float, sizes: list[int]
) -> list[dict[str, Any]]:
    """Time an all-reduce with and without NCCL in hosts; return a row of medians for each size."""
    it = _begin(device, n_hosts, longest)
    dist.all_reduce(it.given(it.lengths[-1]))  # ranks agree on NCCL at a group's first call
    os.environ["SHOAL_LOCAL_NCCL"] = "0"
    without = dist.new_group(list(range(it.size)))
    dist.all_reduce(it.given(it.lengths[-1]), group=without)
    rows = []
    for n_bytes in sizes:
        tensor = torch.ones(n_bytes // 4, device=it.device)
        row: dict[str, Any] = {"bytes": n_bytes}
        for name, group in (("with_us", it.group), ("without_us", without)):
            call = functools.partial(dist.all_reduce, tensor)
            row[name] = measure(call, group, device, seconds)["us"]
        rows.append(row)
    dist.destroy_process_group()
    return rows
