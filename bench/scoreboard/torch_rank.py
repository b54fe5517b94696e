"""One rank of torch.distributed, with Gloo or shoal below it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.collectives import COLLECTIVES


class TorchRank:
    """A rank of a default group, which is formed once all processes are ready.

    Methods that return a dictionary are commands of `SuiteRank`.
    """

    def __init__(self, backend: str) -> None:
        torch.set_num_threads(1)
        self._backend = backend
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # as `env://` makes it
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self.size,
            is_master=self.rank == 0,
        )
        self._n_formed = 0
        self._groups: dict[str, Any] = {}
        self._start_s = self._form()

    def started(self) -> dict[str, Any]:
        """Return the seconds in which the group was formed, once all processes were ready."""
        return {"start_s": self._start_s}

    def restart(self) -> dict[str, Any]:
        """Return the seconds in which a second group forms after the first was destroyed."""
        self._groups.clear()
        dist.destroy_process_group()
        return {"time_s": self._form()}

    def group_by(self, algorithm: str) -> Any:
        """Return a group of all ranks whose collectives use an algorithm if they have it."""
        if algorithm not in self._groups:
            self._groups[algorithm] = _group_by(algorithm)
        return self._groups[algorithm]

    def choice(self, collective: str, n_bytes: int) -> dict[str, Any]:
        """Return the planner's algorithm for a collective and a number of bytes."""
        block = n_bytes // self.size if COLLECTIVES[collective].cut else n_bytes
        planner = _shoal_group(dist.group.WORLD).planner
        return {"name": planner.choose(collective, block).name}

    def subgroups(self, n_groups: int, n_members: int) -> dict[str, Any]:
        """Return the seconds to form groups of neighbouring ranks in turn, and to use each once."""
        members = [[(n + i) % self.size for i in range(n_members)] for n in range(n_groups)]
        dist.barrier()
        begin_s = time.perf_counter()
        groups = [dist.new_group(sorted(ranks)) for ranks in members]
        formed_s = time.perf_counter()
        own = [group for group, ranks in zip(groups, members, strict=True) if self.rank in ranks]
        for group in own:
            dist.barrier(group=group)
        used_s = time.perf_counter()
        for group in own:
            dist.destroy_process_group(group)
        return {"form_s": formed_s - begin_s, "use_s": used_s - formed_s}

    def _form(self) -> float:
        """Form the default group, with its own part of the store."""
        self._n_formed += 1
        store = dist.PrefixStore(str(self._n_formed), self._store)  # type: ignore[attr-defined]
        if store.add("ready", 1) == self.size:
            store.set("all are ready", "")
        store.wait(["all are ready"])
        begin_s = time.perf_counter()
        dist.init_process_group(self._backend, store=store, rank=self.rank, world_size=self.size)
        return time.perf_counter() - begin_s


def _group_by(algorithm: str) -> Any:
    from shoal.plan import Planner
    from shoal.plan.settings import Forced

    made = dist.new_group()
    group = _shoal_group(made)
    group.plan_by(Planner(group.planner.cluster, Forced(algorithm, algorithm)))
    return made


def _shoal_group(group: Any) -> Any:
    """Return the shoal group in torch's group, which is our ProcessGroup or has our Backend."""
    ours = group if hasattr(group, "group") else group._get_backend(torch.device("cpu"))
    return ours.group
