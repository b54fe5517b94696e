"""`shoal.torch.init_process_group`: torch's function, also under mpirun and srun."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from shoal.errors import without_internals
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
    """
    place = find_place()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(place.rank), str(place.size)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.master_addr, str(place.master_port)
    dist.init_process_group(backend, **options)
