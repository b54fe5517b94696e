"""Measure how much of DDP's communication is hidden behind backward, for a model on a device."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from speed import synchronize
from torch import nn


def steps(device: str, width: int, batch: int, n_steps: int) -> list[dict[str, Any]]:
    """Time steps on this rank; return a row for each backend, with medians in ms.

    `compute_ms` is a step without communication. `communicate_ms` is the gradients' all-reduces
    alone, in buckets of DDP's size. `step_ms` is both together.
    """
    dist.init_process_group("shoal", timeout=timedelta(seconds=120))
    rows = []
    for backend in ("shoal", "gloo"):
        group = dist.group.WORLD if backend == "shoal" else dist.new_group(backend="gloo")
        torch.manual_seed(0)
        layers = [each for _ in range(6) for each in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers).to(device)
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
        data = torch.randn(batch, width, device=device)
        n_bytes = sum(parameter.nbytes for parameter in model.parameters())
        row: dict[str, Any] = {"backend": backend, "gradient_bytes": n_bytes}
        steps_of = {
            "compute_ms": functools.partial(_step, wrapped, data, communicates=False),
            "step_ms": functools.partial(_step, wrapped, data, communicates=True),
            "communicate_ms": functools.partial(_reduce, n_bytes, group, device),
        }
        row |= {name: _median_ms(step, device, n_steps) for name, step in steps_of.items()}
        together = row["compute_ms"] + row["communicate_ms"]
        could = min(row["compute_ms"], row["communicate_ms"])
        row["hidden_of_what_could_be"] = (together - row["step_ms"]) / could
        rows.append(row)
    dist.destroy_process_group()
    return rows


def _step(model: Any, data: torch.Tensor, *, communicates: bool) -> None:
    with contextlib.nullcontext() if communicates else model.no_sync():
        model(data).sum().backward()
    model.zero_grad()


def _reduce(n_bytes: int, group: Any, device: str) -> None:
    bucket = 25 << 20
    lengths = [min(bucket, n_bytes - at) // 4 for at in range(0, n_bytes, bucket)]
    tensors = [torch.ones(n, device=device) for n in lengths]
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        work.wait()


def _median_ms(step: Callable[[], None], device: str, n_steps: int) -> float:
    times = []
    for _ in range(n_steps + 3):
        dist.barrier()
        synchronize(device)
        begin_s = time.perf_counter()
        step()
        synchronize(device)
        times.append((time.perf_counter() - begin_s) * 1e3)
    return statistics.median(times[3:])
