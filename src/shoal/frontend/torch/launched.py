"""Rendezvous under launchers: torch's `init_process_group` under any, and torchrun's own store."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from shoal.errors import without_internals
from shoal.rendezvous import TorchStore
from shoal.rendezvous.environment import find_place


@without_internals
def init_process_group(backend: str = "shoal", **options: Any) -> None:
    """Call `torch.distributed.init_process_group`, under any launcher.

    Sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torch reads, from the variables of
    torchrun, Open MPI, MPICH or Slurm, as `shoal.init` reads them.

    Args:
        backend, options: torch's arguments.

    Raises:
        UsageError: a variable is missing or wrong, or no launcher is found.
        ShoalError: the ranks could not form a group, as for `shoal.init`; no group is left.
        RuntimeError, ValueError: as torch's function.
    """
    place = find_place()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(place.rank), str(place.size)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.master_addr, str(place.master_port)
    dist.init_process_group(backend, **options)


def agent_store(host: str, port: int, timeout_s: float) -> TorchStore:
    """Connect to torchrun's own store within `timeout_s`; RuntimeError if that fails.

    Its keys outlive a restart of the workers, so each attempt has its own keys.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return TorchStore(PrefixStore(f"/shoal/attempt_{attempt}", store))
