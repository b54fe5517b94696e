"""The libraries under one interface: one function each that joins a group and says how to use it.

Each imports its library when it is called, because no process has all of them: MPI's ranks run in
environments with NumPy and mpi4py alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shoal.bench.collectives import CALLS, On
from shoal.bench.elements import ELEMENTS
from shoal.bench.values import FilledBuffer

if TYPE_CHECKING:
    from shoal.bench.collectives import Call, CallSpec
    from shoal.bench.torch_rank import TorchRank

# Each contribution is rounded once, and the result: half a unit in the last of 8 bits each.
_BF16_ERROR: Final = (1 + 2.0**-8) ** 2 - 1


@dataclass(frozen=True)
class LibraryRank:
    """One rank in the group of one library.

    Args:
        allocate: a tensor of so many elements in "private" memory, as people get it from torch or
            NumPy, or in "shared" memory, which is shoal.empty; of a type by shoal's name.
        barrier: waits for all ranks.
        bind: the call of a collective on two tensors.
        close: leaves the group.
        ranks: those that take part: whose tensors all_reduce sums.
        torch: what else a rank of torch.distributed can do.
        error: how far a sum of float32 may be off, as a part of it.
    """

    rank: int
    allocate: Callable[[int, str, str], FilledBuffer]
    barrier: Callable[[], object]
    bind: Callable[[CallSpec, Any, Any], Call]
    close: Callable[[], object]
    ranks: Sequence[int]
    torch: TorchRank | None = None
    error: float = 0.0


def join_torch(backend: str) -> LibraryRank:
    """`torch.distributed`, with Gloo or shoal below it."""
    import torch.distributed as dist

    from shoal.bench.torch_rank import TorchRank, allocate_torch

    torch_rank = TorchRank(backend)
    return LibraryRank(
        rank=torch_rank.rank,
        allocate=allocate_torch,
        barrier=dist.barrier,
        bind=torch_rank.bind,
        close=dist.destroy_process_group,
        ranks=range(torch_rank.size),
        torch=torch_rank,
        error=wire_error() if backend == "shoal" else 0.0,
    )


def wire_error() -> float:
    """How far a sum of float32 may be off by the wire that the environment asks for."""
    return _BF16_ERROR if os.environ.get("SHOAL_WIRE") == "bf16" else 0.0


def join_group(wire: str | None = None) -> LibraryRank:
    """A group of shoal's own on NumPy arrays, without a framework."""
    import shoal
    from shoal.bench.group_calls import GROUP_CALLS
    from shoal.dtypes import parse_op
    from shoal.plan import Planner
    from shoal.plan.settings import forced_from

    def allocate(n_elems: int, memory: str, dtype: str) -> FilledBuffer:
        new = shoal.empty if memory == "shared" else np.empty
        return _arrays(new, n_elems, dtype)

    group = shoal.init(wire=wire)
    chosen = group.planner

    def bind(what: CallSpec, data: Any, other: Any) -> Call:
        if what.collective not in GROUP_CALLS:
            raise NotImplementedError(f"a Group has no {what.collective}")
        forced = forced_from({"SHOAL_ALGO": what.algorithm})
        group.plan_by(Planner(chosen.cluster, forced) if what.algorithm else chosen)
        on = On(group, group.rank, group.size, parse_op(what.op), what.root)
        return GROUP_CALLS[what.collective](on, data, other)

    return LibraryRank(
        rank=group.rank,
        allocate=allocate,
        barrier=group.barrier,
        bind=bind,
        close=group.close,
        ranks=range(group.size),
        error=wire_error() if wire is None else _BF16_ERROR * (wire == "bf16"),
    )


def join_served_alone() -> LibraryRank:
    """The same, whose servers reduce all of it: what the planner need not choose."""
    from shoal.codec import Codec
    from shoal.group.pool import view as pool_view
    from shoal.plan.served import Served
    from shoal.schedule.weights import Weights

    def choose(_n: int, cluster: Any, pool: Any, _codec: Codec = Codec.IDENTITY) -> Served:
        weights = Weights((0,) * cluster.size, (1,) * len(pool.servers))
        return Served(weights, 0.0, 0.0, "", "the benchmark asks for it")

    vars(pool_view)["choose_with_servers"] = choose
    return join_group()


def join_with_channels(n_channels: int) -> LibraryRank:
    """Shoal as torch's backend, with so many channels, whatever its planner would choose."""
    os.environ["SHOAL_CHANNELS"] = str(n_channels)
    return join_torch("shoal")


def join_mpi() -> LibraryRank:
    """MPI on NumPy arrays."""
    import mpi4py  # type: ignore[import-not-found]  # only in the environments of MPI

    # One thread calls, so MPI may leave out its locks: its fastest mode, not mpi4py's default.
    mpi4py.rc.threads = False
    from mpi4py import MPI

    from shoal.bench.mpi_calls import MPI_CALLS, OPERATIONS

    def allocate(n_elems: int, _memory: str, dtype: str) -> FilledBuffer:
        return _arrays(np.empty, n_elems, dtype)

    world = MPI.COMM_WORLD

    def bind(what: CallSpec, data: Any, other: Any) -> Call:
        if what.collective not in MPI_CALLS or what.algorithm:
            raise NotImplementedError(f"MPI has no {what.collective} {what.algorithm}".strip())
        if CALLS[what.collective].folds and what.op not in OPERATIONS:
            raise NotImplementedError(f"MPI has no {what.op}")
        on = On(world, world.rank, world.size, OPERATIONS.get(what.op), what.root)
        return MPI_CALLS[what.collective](on, data, other)

    return LibraryRank(
        rank=world.rank,
        allocate=allocate,
        barrier=world.Barrier,
        bind=bind,
        close=MPI.Finalize,
        ranks=range(world.size),
    )


def _arrays(new: Callable[..., Any], n_elems: int, dtype: str) -> FilledBuffer:
    """A NumPy array as the library takes it, and as it is looked at."""
    element = ELEMENTS[dtype]
    if element.storage != element.name:
        raise NotImplementedError(f"NumPy has no {dtype}: measure it through torch")
    array = new(n_elems, np.dtype(element.storage))
    return FilledBuffer(array, array)


def join_nobody() -> LibraryRank:
    """No library: each rank, pinned to its own core, copies its buffer; what memory can do."""

    def allocate(n_elems: int, _memory: str, dtype: str) -> FilledBuffer:
        array = np.empty(n_elems, ELEMENTS[dtype].storage)
        return FilledBuffer((np.zeros_like(array), array), array)

    def bind(what: CallSpec, data: Any, _other: Any) -> Call:
        if what.collective != "all_reduce" or what.algorithm:
            raise NotImplementedError(f"{what.collective} {what.algorithm}".strip())
        return lambda: np.copyto(*data)

    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return LibraryRank(
        rank=rank,
        allocate=allocate,
        barrier=lambda: None,  # all get the command at once, and copy a thousand times as long
        bind=bind,
        close=lambda: None,
        ranks=(rank,),
    )


JOIN: Final[Mapping[str, Callable[[], LibraryRank]]] = {
    "gloo": lambda: join_torch("gloo"),
    "shoal": lambda: join_torch("shoal"),
    "group": join_group,
    "bf16": lambda: join_group("bf16"),
    "served": join_group,
    "served bf16": lambda: join_group("bf16"),
    "servers alone": join_served_alone,
    "served torch": lambda: join_torch("shoal"),
    "one channel": lambda: join_with_channels(1),
    "two channels": lambda: join_with_channels(2),
    "openmpi": join_mpi,
    "mpich": join_mpi,
    "copy": join_nobody,
}
