"""Ranks that a launcher has started: torchrun, mpirun, srun, `shoal lab run`.

Every rank makes the same run and measures its own part; ranks exchange answers, so that all make
the same decisions. All libraries are in one process, take turns, and meet as the launcher set up.
"""

from __future__ import annotations

import datetime as dt
import gc
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.bench.collectives import CallSpec
from shoal.bench.job import Failure
from shoal.bench.launch import require_torch
from shoal.bench.libraries import LibraryRank, join_group, torch_library
from shoal.bench.worker import Rank
from shoal.rendezvous.environment import find_place


class JoinedRanks:
    """The libraries of this process while the context lasts; call shoal before the others.

    Calls through torch have the deadline `timeout_s`.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ranks: dict[str, Rank] = {}
        self._shoal: LibraryRank | None = None

    def __enter__(self) -> JoinedRanks:
        gc.disable()  # all ranks would wait for a collection in one
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        gc.enable()
        for rank in reversed(self._ranks.values()) if kind is None else ():
            rank.stop()

    def ask(self, library: str, task: str, **arguments: Any) -> list[dict[str, Any]]:
        """Run a command on every rank; return the answers by rank. All ranks make the same call.

        Raises Failure if torch is missing, or a rank failed.
        """
        if library not in self._ranks:
            joined = self._join(library)
            self._shoal = self._shoal or joined
            self._ranks[library] = Rank(joined)
        try:
            answer = getattr(self._ranks[library], task)(**arguments)
        except Exception as error:  # noqa: BLE001 - all ranks raise it
            answer = {"error": f"{type(error).__name__}: {error}"}
        assert self._shoal is not None  # shoal is called first
        answers = _exchange(self._shoal, answer)
        for one in answers:
            if "error" in one:
                raise Failure(one["error"])
        return answers

    def _join(self, library: str) -> LibraryRank:
        if library == "group":
            return join_group()
        require_torch(library)
        return _joined_torch(library, self._timeout_s)


def _joined_torch(library: str, timeout_s: float) -> LibraryRank:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = dt.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group(library, timeout=timeout, **_meeting())
        return torch_library(library, None, dist.destroy_process_group)
    group = dist.new_group(backend=library, timeout=timeout)
    return torch_library(library, group, lambda: None)


def _meeting() -> dict[str, Any]:
    """Return torch's rendezvous arguments, which it reads itself only under torchrun."""
    if os.environ.get("RANK"):
        return {}
    place = find_place()
    where = f"tcp://{place.master_addr}:{place.master_port}"
    return {"init_method": where, "rank": place.rank, "world_size": place.size}


def _exchange(library: LibraryRank, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    longest = library.allocate(1, "int64")
    longest.values[0] = len(text)
    most = CallSpec(8, dtype="int64", op="max")
    library.bind(most, longest.data, longest.data)()
    n_each, n_ranks = int(longest.values[0]), len(library.ranks)
    gathered = library.allocate(n_each * n_ranks, "uint8")
    blocks = gathered.values.reshape(n_ranks, n_each)
    blocks[library.rank] = 0
    blocks[library.rank, : len(text)] = text
    gather = CallSpec(n_each * n_ranks, collective="all_gather", dtype="uint8", in_place=True)
    library.bind(gather, gathered.data, gathered.data)()
    return [json.loads(block.tobytes().rstrip(b"\0")) for block in blocks]
