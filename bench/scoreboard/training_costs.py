"""The costs of averaging besides the network: memory, copies, agreement, interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from bench.scoreboard.training_models import MODELS
from bench.scoreboard.training_steps import RankTrainings, Variant, wrap
from bench.scoreboard.worker import peak_resident_bytes

_M_MMAP_THRESHOLD: Final = -3  # of <malloc.h>
_BLOCK_BYTES: Final = 256 << 10

_SMALL_ELEMS: Final = 16
_BATCH: Final = 4


class _Sums(nn.Module):
    """Many small parameters, each used once."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(_SMALL_ELEMS) for _ in range(n))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Return a sum that uses every parameter."""
        for weight in self.weights:
            data = data + weight
        return data


def added_cpu_s(trainings: RankTrainings, n_parameters: int, n_steps: int) -> dict[str, float]:
    """Return the CPU seconds that each wrapper adds to a step; steps take turns."""
    gloo = trainings.group("gloo")
    models: dict[str, nn.Module] = {
        "bare": _Sums(n_parameters),
        "torch": wrap(_Sums(n_parameters), Variant("", "torch"), gloo),
        "shoal": wrap(_Sums(n_parameters), Variant(""), dist.group.WORLD),
    }
    data = torch.ones(_BATCH, _SMALL_ELEMS)
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(n_steps + 3):
        for name, model in models.items():
            begin_s = time.process_time()
            model(data).sum().backward()
            taken[name].append(time.process_time() - begin_s)
            model.zero_grad()
    medians = {name: statistics.median(times_s[3:]) for name, times_s in taken.items()}
    return {name: medians[name] - medians["bare"] for name in ("torch", "shoal")}


def order_costs(n_arrays: int, n_elems: int, n_steps: int) -> dict[str, Any]:
    """Average arrays in an unexpected order.

    Returns: the seconds of `begin` beyond its median in the second step, which learns the order of
    the first; the number of new layouts; and the seconds of the steps.
    """
    from shoal.average import Averager
    from shoal.frontend.torch import group_in

    group = group_in(dist.group.WORLD)
    assert group is not None  # the default group is shoal's
    arrays = {str(number): ((n_elems,), "float32") for number in range(n_arrays)}
    averager = Averager(group, arrays)
    begins, steps, layouts = [], [], [averager.layout]
    last_first = list(arrays)[::-1]
    order = last_first[n_arrays // 2 :] + last_first[: n_arrays // 2]
    for _ in range(n_steps):
        dist.barrier()
        begin_s = time.perf_counter()
        averager.begin()
        begins.append(time.perf_counter() - begin_s)
        for name in order:
            averager.ready(name)
        averager.wait()
        steps.append(time.perf_counter() - begin_s)
        layouts.append(averager.layout)
    return {
        "agree_s": max(0.0, begins[1] - statistics.median(begins)),
        "n_layouts": sum(new is not old for old, new in itertools.pairwise(layouts)),
        "times_s": steps[1:],
    }


def memory_beyond(model: str, n_steps: int, as_views: bool) -> dict[str, int]:
    """Return the peak resident bytes that a wrapper adds to a step, and the gradients' bytes.

    The bare model is trained first, after all wrappers' modules are loaded. Memory that tensors
    have freed is not counted, though the C library may keep it.
    """
    _give_back_at_once()
    small = wrap(nn.Linear(4, 4), Variant(model), dist.group.WORLD)
    for _ in range(2):
        small(torch.ones(4)).sum().backward()
    del small
    peaks, sizes = [], {}
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        made = MODELS[model]()
        trained: Any = (
            wrap(made.module, Variant(model), dist.group.WORLD, gradient_as_bucket_view=as_views)
            if is_wrapped
            else made.module
        )
        optimizer = made.optimizer(trained.parameters())
        batch = made.batch(torch.Generator().manual_seed(1))
        dist.barrier()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
        for _ in range(n_steps):
            loss = made.loss(trained, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch
            optimizer.step()
        peaks.append(peak_resident_bytes())
        if is_wrapped:
            averager = trained.reducer.averaging.averager
            sizes["buffer_bytes"] = averager.fusion_bytes
            sizes["gradient_bytes"] = sum(entry.n_bytes for entry in averager.entries)
        del made, trained, optimizer, loss
        gc.collect()
    from shoal.limits import STAGING_BYTES

    sizes["bound_bytes"] = sizes["buffer_bytes"] + STAGING_BYTES
    return {"grown_bytes": max(0, peaks[1] - peaks[0]), **sizes}


def _give_back_at_once() -> None:
    """Make the C library return the memory of dropped tensors to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has it
        mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES)


def in_flight_s(
    trainings: RankTrainings, over: str, n_groups: int, n_buffers: int, n_bytes: int, depth: int
) -> float:
    """Return the seconds in which buffers are averaged, `depth` at once, by groups in turn."""
    groups = trainings.groups(over, n_groups)
    tensors = [torch.zeros(n_bytes // 4) for _ in range(n_buffers)]
    dist.barrier()
    begin_s = time.perf_counter()
    works: list[Any] = []
    for number, tensor in enumerate(tensors):
        if len(works) == depth:
            works.pop(0).wait()
        group = groups[number % n_groups]
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in works:
        work.wait()
    return time.perf_counter() - begin_s


def copied_bytes(model: str, wrapper: str, keeps: bool, n_steps: int) -> dict[str, int]:
    """Return the bytes of gradients that a step copies, on new ranks.

    Returns: `copied`: bytes that shoal's wrapper copies from tensor to tensor in the last step;
    `slots`: bytes that the engine copies for ranks of the host in all steps; the gradients' bytes.
    """
    made = MODELS[model]()
    options = {"init_sync": False, "gradient_as_bucket_view": True}
    trained = wrap(made.module, Variant(model, wrapper), dist.group.WORLD, **options)
    optimizer = made.optimizer(trained.parameters())
    batch = made.batch(torch.Generator().manual_seed(1))
    before = _slot_bytes()
    for _ in range(n_steps):
        with _counting_copies() as copied:
            loss = made.loss(trained, batch)
            optimizer.zero_grad(set_to_none=not keeps)
            loss.backward()  # type: ignore[no-untyped-call]  # torch
            optimizer.step()
    gradients = sum(p.grad.nbytes for p in trained.parameters() if p.grad is not None)
    return {"copied": copied[0], "gradients": gradients, "slots": _slot_bytes() - before}


def _slot_bytes() -> int:
    """Return the bytes that the engine has copied into slots for ranks of the host."""
    import shoal

    worlds = shoal.dump().state["worlds"]
    return sum(peer["slot_bytes_out"] for world in worlds for peer in world.get("peers", ()))


@contextlib.contextmanager
def _counting_copies() -> Iterator[list[int]]:
    from shoal.frontend.torch.ddp import gradients

    copied = [0]
    real = gradients.copy_tensors

    def count(to: Any, given: Any) -> None:
        copied[0] += sum(tensor.nbytes for tensor in given)
        real(to, given)

    gradients.copy_tensors = count
    try:
        yield copied
    finally:
        gradients.copy_tensors = real
