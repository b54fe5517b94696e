"""The libraries under one interface: one function each that joins a group and says how to use it.

Each imports its library when it is called, because no process has all of them: Open MPI's ranks run
in an environment with NumPy and mpi4py alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shoal.bench.values import FilledBuffer

if TYPE_CHECKING:
    from shoal.bench.collectives import Call
    from shoal.bench.torch_rank import TorchRank


@dataclass(frozen=True)
class LibraryRank:
    """One rank in the group of one library.

    Args:
        allocate: a tensor of so many elements in "private" memory, as people get it from torch or
            NumPy, or in "shared" memory, which is shoal.empty.
        barrier: waits for all ranks.
        bind: the call of a collective, by its name, on two tensors; by the named algorithm, which
            is empty for the library's own choice.
        close: leaves the group.
        ranks: those that take part: whose tensors all_reduce sums.
        torch: what else a rank of torch.distributed can do.
        error: how far a sum may be off, as a part of it.
    """

    rank: int
    allocate: Callable[[int, str], FilledBuffer]
    barrier: Callable[[], object]
    bind: Callable[[str, str, Any, Any], Call]
    close: Callable[[], object]
    ranks: Sequence[int]
    torch: TorchRank | None = None
    error: float = 0.0


def join_torch(backend: str) -> LibraryRank:
    """`torch.distributed`, with Gloo or shoal below it."""
    import torch.distributed as dist

    from shoal.bench.torch_rank import TorchRank

    torch_rank = TorchRank(backend)
    return LibraryRank(
        rank=torch_rank.rank,
        allocate=torch_rank.allocate,
        barrier=dist.barrier,
        bind=torch_rank.bind,
        close=dist.destroy_process_group,
        ranks=range(torch_rank.size),
        torch=torch_rank,
    )


def join_group(wire: str = "identity", error: float = 0.0) -> LibraryRank:
    """A group of shoal's own on NumPy arrays, without a framework."""
    import shoal
    from shoal.plan import Planner
    from shoal.plan.settings import forced_from

    def allocate(n_elems: int, memory: str) -> FilledBuffer:
        new = shoal.empty if memory == "shared" else np.empty
        array = new(n_elems, np.float32)
        return FilledBuffer(array, array)

    group = shoal.init(wire=wire)
    chosen = group.planner

    def bind(collective: str, algorithm: str, data: Any, _other: Any) -> Call:
        forced = forced_from({"SHOAL_ALGO": algorithm})
        group.plan_by(Planner(chosen.cluster, forced) if algorithm else chosen)
        return _only_all_reduce(group.all_reduce)(collective, "", data, None)

    return LibraryRank(
        rank=group.rank,
        allocate=allocate,
        barrier=group.barrier,
        bind=bind,
        close=group.close,
        ranks=range(group.size),
        error=error,
    )


def join_with_channels(n_channels: int) -> LibraryRank:
    """Shoal as torch's backend, with so many channels, whatever its planner would choose."""
    os.environ["SHOAL_CHANNELS"] = str(n_channels)
    return join_torch("shoal")


def join_mpi() -> LibraryRank:
    """MPI's Allreduce, in place, on NumPy arrays."""
    import mpi4py  # type: ignore[import-not-found]  # only in Open MPI's environment

    # One thread calls, so MPI may leave out its locks: its fastest mode, not mpi4py's default.
    mpi4py.rc.threads = False
    from mpi4py import MPI

    def allocate(n_elems: int, _memory: str) -> FilledBuffer:
        array = np.empty(n_elems, np.float32)
        return FilledBuffer(array, array)

    world, in_place = MPI.COMM_WORLD, MPI.IN_PLACE
    return LibraryRank(
        rank=world.rank,
        allocate=allocate,
        barrier=world.Barrier,
        bind=_only_all_reduce(partial(world.Allreduce, in_place)),
        close=MPI.Finalize,
        ranks=range(world.size),
    )


def join_nobody() -> LibraryRank:
    """No library: each rank, pinned to its own core, copies its buffer; what memory can do."""

    def allocate(n_elems: int, _memory: str) -> FilledBuffer:
        array = np.empty(n_elems, np.float32)
        return FilledBuffer((np.zeros_like(array), array), array)

    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return LibraryRank(
        rank=rank,
        allocate=allocate,
        barrier=lambda: None,  # all get the command at once, and copy a thousand times as long
        bind=_only_all_reduce(lambda data: np.copyto(*data)),
        close=lambda: None,
        ranks=(rank,),
    )


def _only_all_reduce(function: Callable[[Any], object]) -> Callable[[str, str, Any, Any], Call]:
    def bind(collective: str, algorithm: str, data: Any, _other: Any) -> Call:
        if collective != "all_reduce" or algorithm:
            raise NotImplementedError(f"{collective} {algorithm}".strip())
        return partial(function, data)

    return bind


JOIN: Final[Mapping[str, Callable[[], LibraryRank]]] = {
    "gloo": lambda: join_torch("gloo"),
    "shoal": lambda: join_torch("shoal"),
    "group": join_group,
    # Each contribution is rounded once, and the result: half a unit in the last of 8 bits each.
    "bf16": lambda: join_group("bf16", error=(1 + 2.0**-8) ** 2 - 1),
    "one channel": lambda: join_with_channels(1),
    "two channels": lambda: join_with_channels(2),
    "openmpi": join_mpi,
    "copy": join_nobody,
}
