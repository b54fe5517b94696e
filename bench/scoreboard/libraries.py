"""The libraries of the tables: the libraries of `shoal bench`, and some more.

A function for each joins its group, in a separate process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shoal.bench.collectives import COLLECTIVES, On
from shoal.bench.elements import ELEMENTS
from shoal.bench.libraries import LibraryRank, allocate_array, group_library, torch_library
from shoal.bench.values import FilledBuffer

if TYPE_CHECKING:
    from bench.scoreboard.torch_rank import TorchRank
    from shoal.bench.collectives import Call, CallSpec

N_BUCKETS: Final = 8
NARROW: Final = ("bf16", "mxfp8", "mxfp4")
"""The narrow formats in tables, the one with the most bytes first."""


def _not_here(*_arguments: Any) -> Any:
    raise NotImplementedError("only shoal and torch support this command")


@dataclass(frozen=True)
class SuiteLibrary:
    """One rank of a library.

    Args:
        plain: the rank as `shoal bench` has it.
        by: returns that rank with the named algorithm.
        start: starts the all_reduce of a part of a tensor, and returns its work.
        torch: the commands that only a rank of torch.distributed obeys.
    """

    plain: LibraryRank
    by: Callable[[str], LibraryRank] = _not_here
    start: Callable[[Any], Any] = _not_here
    torch: TorchRank | None = None

    @property
    def in_buckets(self) -> LibraryRank:
        """Return the library with an all_reduce of several parts of the tensor at once."""

        def bind(_what: CallSpec, data: Any, _other: Any) -> Call:
            n = len(data) // N_BUCKETS
            parts = [data[n * i : n * (i + 1)] for i in range(N_BUCKETS)]

            def call() -> None:
                works = [self.start(part) for part in parts]
                for work in works:
                    work.wait()

            return call

        return replace(self.plain, bind=bind)


def join_torch(backend: str) -> SuiteLibrary:
    """Join `torch.distributed`, with Gloo or shoal below it."""
    import torch.distributed as dist

    from bench.scoreboard.torch_rank import TorchRank
    from shoal.bench.torch_calls import bind_torch

    rank = TorchRank(backend)
    plain = torch_library(backend, None, dist.destroy_process_group)
    return SuiteLibrary(
        plain,
        by=lambda algorithm: replace(plain, bind=partial(bind_torch, rank.group_by(algorithm))),
        start=partial(dist.all_reduce, async_op=True),
        torch=rank,
    )


def allocate_shared(n_elems: int, dtype: str) -> FilledBuffer:
    """Make a tensor in memory from shoal.empty."""
    import torch

    import shoal
    from shoal.bench.torch_calls import filled

    return filled(shoal.empty(n_elems, getattr(torch, dtype)))


def join_group(wire: str | None = None) -> SuiteLibrary:
    """Join a group of shoal's own on NumPy arrays."""
    import shoal
    from shoal.plan import Planner
    from shoal.plan.settings import forced_from

    group = shoal.init(wire=wire)
    chosen, called = group.planner, group_library(group, wire)

    def by(algorithm: str) -> LibraryRank:
        forced = forced_from({"SHOAL_ALGO": algorithm})
        planner = Planner(chosen.cluster, forced) if algorithm else chosen

        def bind(what: CallSpec, data: Any, other: Any) -> Call:
            group.plan_by(planner)
            return called.bind(what, data, other)

        return replace(called, bind=bind)

    return SuiteLibrary(by(""), by, partial(group.all_reduce, async_op=True))


def join_served_alone() -> SuiteLibrary:
    """Join a group whose servers reduce everything, instead of the planner's choice."""
    from shoal.codec import Codec
    from shoal.group.pool import view as pool_view
    from shoal.plan.served import Served
    from shoal.schedule.weights import Weights

    def choose(_n: int, cluster: Any, pool: Any, _codec: Codec = Codec.IDENTITY) -> Served:
        weights = Weights((0,) * cluster.size, (1,) * len(pool.servers))
        return Served(weights, 0.0, 0.0, "", "the benchmark asks for it")

    vars(pool_view)["choose_with_servers"] = choose
    return join_group()


def join_with_channels(n_channels: int) -> SuiteLibrary:
    """Join shoal as torch's backend, with a given number of channels."""
    os.environ["SHOAL_CHANNELS"] = str(n_channels)
    return join_torch("shoal")


def join_mpi() -> SuiteLibrary:
    """Join MPI, on NumPy arrays."""
    import mpi4py  # type: ignore[import-not-found]  # only in the environment of Open MPI

    # One thread calls, so MPI may leave out its locks: its fastest mode, not mpi4py's default.
    mpi4py.rc.threads = False
    from mpi4py import MPI

    from bench.scoreboard.mpi_calls import MPI_CALLS, OPERATIONS

    world = MPI.COMM_WORLD

    def bind(what: CallSpec, data: Any, other: Any) -> Call:
        if COLLECTIVES[what.collective].folds and what.op not in OPERATIONS:
            raise NotImplementedError(f"MPI has no {what.op}")
        on = On(world, world.rank, world.size, OPERATIONS.get(what.op), what.root)
        return MPI_CALLS[what.collective](on, data, other)

    rank = LibraryRank(
        rank=world.rank,
        allocate=allocate_array,
        barrier=world.Barrier,
        bind=bind,
        close=MPI.Finalize,
        ranks=range(world.size),
    )
    return SuiteLibrary(rank)


def join_nobody() -> SuiteLibrary:
    """Copy a buffer, each rank on a separate core: the speed of the memory, without a library."""

    def allocate(n_elems: int, dtype: str) -> FilledBuffer:
        array = np.empty(n_elems, ELEMENTS[dtype].storage)
        return FilledBuffer((np.zeros_like(array), array), array)

    def bind(what: CallSpec, data: Any, _other: Any) -> Call:
        if what.collective != "all_reduce":
            raise NotImplementedError(what.collective)
        return lambda: np.copyto(*data)

    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    copier = LibraryRank(
        rank=rank,
        allocate=allocate,
        barrier=lambda: None,  # commands arrive at once; a copy takes a thousand times as long
        bind=bind,
        close=lambda: None,
        ranks=(rank,),
    )
    return SuiteLibrary(copier)


JOIN: Final[Mapping[str, Callable[[], SuiteLibrary]]] = {
    "gloo": partial(join_torch, "gloo"),
    "shoal": partial(join_torch, "shoal"),
    "group": join_group,
    "served": join_group,
    **{wire: partial(join_group, wire) for wire in NARROW},
    **{f"served {wire}": partial(join_group, wire) for wire in NARROW},
    "servers alone": join_served_alone,
    "served torch": partial(join_torch, "shoal"),
    "one channel": partial(join_with_channels, 1),
    "two channels": partial(join_with_channels, 2),
    "openmpi": join_mpi,
    "copy": join_nobody,
}
