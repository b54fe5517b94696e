"""Time calls on a device's tensors, over shoal and over Gloo, in the same processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKENDS = ("shoal", "gloo")


def _calls(n: int, size: int, device: str) -> dict[str, Callable[..., Any]]:
    """Return the timed calls by name, each on a total of n elements."""
    whole = torch.ones(n, device=device)
    block = torch.ones(n // size, device=device)
    cut = whole[: n // size * size]
    return {
        "all_reduce": lambda **how: dist.all_reduce(whole, **how),
        "broadcast": lambda **how: dist.broadcast(whole, src=0, **how),
        "all_gather": lambda **how: dist.all_gather_into_tensor(cut, block, **how),
        "reduce_scatter": lambda **how: dist.reduce_scatter_tensor(block, cut, **how),
    }


def speeds(device: str, sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """Time all calls on this rank; return a row for each backend, collective and size.

    Args:
        seconds: the time to measure each row.
    """
    dist.init_process_group("shoal", timeout=timedelta(seconds=120))
    groups = {"shoal": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = []
    for n_bytes in sizes:
        for name, call in _calls(n_bytes // 4, dist.get_world_size(), device).items():
            for backend in BACKENDS:
                row: dict[str, Any] = {"backend": backend, "collective": name, "bytes": n_bytes}
                try:
                    row |= measure(call, groups[backend], device, seconds)
                except RuntimeError as error:  # Gloo lacks some of them on CUDA
                    row["refused"] = str(error).splitlines()[0]
                rows.append(row)
    dist.destroy_process_group()
    return rows


def measure(call: Callable[..., Any], group: Any, device: str, seconds: float) -> dict[str, Any]:
    """Time calls until they have taken `seconds` in total, and return medians in us.

    `us` is the time until the result is on the device, `start_us` until the call returns.
    """
    wholes: list[float] = []
    starts: list[float] = []
    for turn in range(200):
        # All ranks agree when to stop: if one stopped alone, the others would wait forever.
        spent = torch.tensor([sum(wholes)])
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if turn > 5 and spent.item() > seconds:
            break
        synchronize(device)
        begin_s = time.perf_counter()
        work = call(group=group, async_op=True)
        starts.append(time.perf_counter() - begin_s)
        work.wait()
        synchronize(device)
        wholes.append(time.perf_counter() - begin_s)
    return {
        "us": statistics.median(wholes[2:]) * 1e6,
        "start_us": statistics.median(starts[2:]) * 1e6,
        "n": len(wholes) - 2,
    }


def synchronize(device: str) -> None:
    """Wait until a device has done all work."""
    if device == "cuda":
        torch.cuda.synchronize()
