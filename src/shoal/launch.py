"""`shoal.init`: a group for programs without torch, from what the launcher left behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shoal.rendezvous import Store, TcpStoreClient, TcpStoreServer, find_place, job_key

if TYPE_CHECKING:
    from shoal.group import Group

DEFAULT_TIMEOUT_S = 300.0


def init(
    store: Store | None = None,
    rank: int | None = None,
    size: int | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Group:
    """Meet all ranks of this job and return their group; use it in a `with` statement.

    Under torchrun, mpirun or srun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by
    hand, it needs no arguments. Rank 0 serves the others at MASTER_ADDR:MASTER_PORT while they
    meet; afterwards nothing depends on it.

    Args:
        store: a meeting place of your own, together with `rank` and `size`.
        timeout_s: seconds for the meeting, and for every later call that names none of its own.

    Raises:
        UsageError: a variable is missing or wrong, the port is taken, or keys differ.
        TimedOut: names the ranks that did not come.
    """
    from shoal.group import form  # the native core loads with the first group

    if store is not None and rank is not None and size is not None:
        return form(store, rank, size, timeout_s=timeout_s)
    place = find_place()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from shoal.frontend.torch.store import agent_store  # torchrun itself holds that port

        agent = agent_store(place.master_addr, place.master_port, timeout_s)
        return form(agent, place.rank, place.size, timeout_s=timeout_s)
    key = job_key(os.environ)
    server = None
    if place.rank == 0:
        server = TcpStoreServer(place.master_addr, place.master_port, key=key)
    try:
        client = TcpStoreClient(place.master_addr, place.master_port, timeout_s=timeout_s, key=key)
        try:
            return form(client, place.rank, place.size, timeout_s=timeout_s)
        finally:
            client.close()
    finally:
        if server is not None:
            server.close()
