"""Ranks that a launcher has started: torchrun, mpirun, srun, `shoal lab run`.

Every rank makes the same run and measures its own part; answers go round, so that all decide alike.
The libraries live in one process, one after the other at work. They meet as the launcher says; a
library that this launcher cannot start says so.
"""

from __future__ import annotations

import datetime as dt
import gc
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shoal.bench.collectives import CallSpec
from shoal.bench.endpoints import LibraryRank, join_group, join_mpi, wire_error
from shoal.bench.failure import Failure
from shoal.bench.launch import require_torch
from shoal.bench.worker import Rank
from shoal.rendezvous import find_place

if TYPE_CHECKING:
    from shoal.bench.job import JobSpec

_MPI_MARKS: Final[Mapping[str, tuple[str, str]]] = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "Open MPI's mpirun"),
    "mpich": ("PMI_RANK", "MPICH's mpiexec"),
}

Exchange = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
"""Gives every rank the words of all, by rank."""


class JoinedPools:
    """The libraries of this process. The first one that is asked for must be shoal.

    Leaving the context leaves their groups.

    Args:
        timeout_s: of each call that can have one: MPI's have none.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pools: dict[str, JoinedPool] = {}
        self._shoal: LibraryRank | None = None
        self._closes: list[Callable[[], object]] = []

    def __enter__(self) -> JoinedPools:
        gc.disable()  # a collection in one rank is waited for by all
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        gc.enable()
        for close in reversed(self._closes) if kind is None else ():
            close()

    def start(self, spec: JobSpec) -> JoinedPool:
        """The pool of a library, which is kept.

        Raises:
            Failure: it is not to be had here.
        """
        if spec.library not in self._pools:
            endpoint = self._join(spec.library)
            self._closes.append(endpoint.close)
            self._shoal = self._shoal or endpoint
            self._pools[spec.library] = JoinedPool(Rank(endpoint), partial(_exchange, self._shoal))
        return self._pools[spec.library]

    def _join(self, library: str) -> LibraryRank:
        if library in _MPI_MARKS:
            return _joined_mpi(library)
        if library == "group":
            return join_group()
        require_torch(library)
        return _joined_torch(library, self._timeout_s, is_first=self._shoal is None)


class JoinedPool:
    """All ranks of a library, as each of them holds them."""

    def __init__(self, rank: Rank, exchange: Exchange) -> None:
        self._rank, self._exchange = rank, exchange

    def ask(self, task: str, **arguments: Any) -> list[dict[str, Any]]:
        """See RankPool: every rank calls it alike."""
        try:
            answer = getattr(self._rank, task)(**arguments)
        except Exception as error:  # noqa: BLE001 - told to all
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers = self._exchange(answer)
        for one in answers:
            if "error" in one:
                raise Failure(one["error"])
        return answers

    def close(self) -> None:
        """The ranks belong to the launcher."""


def _joined_torch(library: str, timeout_s: float, *, is_first: bool) -> LibraryRank:
    import torch
    import torch.distributed as dist

    from shoal.bench.torch_rank import allocate_torch, bind_torch

    torch.set_num_threads(1)
    timeout = dt.timedelta(seconds=timeout_s)
    if is_first:
        dist.init_process_group(library, timeout=timeout, **_meeting())
        group: Any = dist.group.WORLD
    else:
        group = dist.new_group(backend=library, timeout=timeout)
    return LibraryRank(
        rank=dist.get_rank(),
        allocate=allocate_torch,
        barrier=partial(dist.barrier, group=group),
        bind=lambda what, data, other: bind_torch(what, group, data, other),
        close=dist.destroy_process_group if is_first else lambda: None,
        ranks=range(dist.get_world_size()),
        error=wire_error() if library == "shoal" else 0.0,
    )


def _meeting() -> dict[str, Any]:
    """Where torch meets: by itself it knows what torchrun sets, and no other launcher."""
    if os.environ.get("RANK"):
        return {}
    place = find_place()
    where = f"tcp://{place.master_addr}:{place.master_port}"
    return {"init_method": where, "rank": place.rank, "world_size": place.size}


def _joined_mpi(library: str) -> LibraryRank:
    mark, launcher = _MPI_MARKS[library]
    if mark not in os.environ:
        raise Failure(f"start the ranks with {launcher} to measure it too: {mark} is not set")
    try:
        return join_mpi()
    except ImportError as error:
        raise Failure(f"{error}: pip install mpi4py into this environment") from None


def _exchange(endpoint: LibraryRank, words: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The words of all ranks, by rank."""
    text = np.frombuffer(json.dumps(words).encode(), np.uint8)
    longest = endpoint.allocate(1, "private", "int64")
    longest.values[0] = len(text)
    most = CallSpec(8, dtype="int64", op="max")
    endpoint.bind(most, longest.data, longest.data)()
    n_each, n_ranks = int(longest.values[0]), len(endpoint.ranks)
    told = endpoint.allocate(n_each * n_ranks, "private", "uint8")
    blocks = told.values.reshape(n_ranks, n_each)
    blocks[endpoint.rank] = 0
    blocks[endpoint.rank, : len(text)] = text
    gather = CallSpec(n_each * n_ranks, collective="all_gather", dtype="uint8", in_place=True)
    endpoint.bind(gather, told.data, told.data)()
    return [json.loads(block.tobytes().rstrip(b"\0")) for block in blocks]
