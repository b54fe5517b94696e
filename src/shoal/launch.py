"""`shoal.init`: a group for programs without torch, from what the launcher left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from shoal.errors import PeerLost, TimedOut, UsageError, without_internals
from shoal.rendezvous import (
    Caller,
    LaunchInfo,
    Store,
    TcpStoreClient,
    TcpStoreServer,
    find_place,
    job_key,
)
from shoal.settings import warn_of_unknown

if TYPE_CHECKING:
    from shoal.group.group import Group

DEFAULT_TIMEOUT_S = 300.0


@without_internals
def init(
    store: Store | None = None,
    rank: int | None = None,
    size: int | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    wire: str | None = None,
) -> Group:
    """Meet all ranks of this job and return their group; use it in a `with` statement.

    Under torchrun, mpirun or srun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by
    hand, it needs no arguments. Rank 0 serves the others at MASTER_ADDR:MASTER_PORT while they
    meet; afterwards nothing depends on it.

    Args:
        store: a meeting place of your own, together with `rank` and `size`.
        timeout_s: seconds for the meeting, and for every later call that names none of its own.
        wire: how large sums travel between hosts: "bf16" sends float32 as bfloat16, in half the
            bytes; "identity" as they are. None: as `SHOAL_WIRE` says, else as they are. `Group`
            tells more. The same on every rank.

    Raises:
        UsageError: a variable is missing or wrong, the port is taken, or keys differ.
        TimedOut: names the ranks that did not come.
        PeerLost: rank 0 ended the meeting before it was complete.
    """
    from shoal.group.group import form  # the native core loads with the first group

    warn_of_unknown(os.environ)  # NOT only when the group forms: meeting may fail for such a slip
    if store is not None and rank is not None and size is not None:
        return form(store, rank, size, timeout_s=timeout_s, wire=wire)
    if store is not None or rank is not None or size is not None:
        raise UsageError("shoal.init takes store, rank and size together, or none of them")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s} is not a positive number of seconds")
    place = find_place()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from shoal.frontend.torch.store import agent_store  # torchrun itself holds that port

        where, port, deadline = place.master_addr, place.master_port, time.monotonic() + timeout_s
        # torch looks at its timeout only until it is connected, not while it awaits an answer.
        with contextlib.closing(Caller(f"torchrun's store at {where}", deadline)) as caller:
            agent = caller.call("connecting", agent_store, where, port, timeout_s)
        left_s = max(0.001, deadline - time.monotonic())
        group = form(agent, place.rank, place.size, timeout_s=left_s, wire=wire)
        group.timeout_s = timeout_s
        return group
    return _meet_at_rank_0(place, timeout_s, wire)


# How long rank 0 serves the others when it could not join: they look every second why not,
# and leave. Only those that came after a rank had failed stay, and wait for it to come again.
_LAST_SERVICE_S: Final = 5.0
# How long it serves even if nobody is there: the others may be on their way still.
_LEAST_SERVICE_S: Final = 1.0

# Whether this process has met others before: then rank 0 may still be about to close that meeting.
_has_met = False


def _meet_at_rank_0(place: LaunchInfo, timeout_s: float, wire: str | None) -> Group:
    """Form a group through a store that rank 0 serves for as long as it takes."""
    from shoal.group.group import form

    global _has_met  # noqa: PLW0603 - the history of this process
    key = job_key(os.environ)
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as on_exit:
        if place.rank == 0:
            server = TcpStoreServer(place.master_addr, place.master_port, key=key)
            on_exit.push(functools.partial(_end_service, server))
        while True:
            left_s = max(0.001, deadline - time.monotonic())
            client = TcpStoreClient(place.master_addr, place.master_port, timeout_s=left_s, key=key)
            try:
                group = form(client, place.rank, place.size, timeout_s=left_s, wire=wire)
            except PeerLost:
                if client.is_open or not _has_met or time.monotonic() >= deadline:
                    raise
                continue  # that was the meeting before: rank 0 will be back for ours
            finally:
                client.close()
            group.timeout_s = timeout_s
            _has_met = True
            return group


def _end_service(server: TcpStoreServer, kind: type[BaseException] | None, *_: object) -> None:
    """Close the store of rank 0; if it could not join, once the others have read why."""
    if kind is not None and not issubclass(kind, TimedOut):
        threading.Event().wait(_LEAST_SERVICE_S)
        server.await_leavers(_LAST_SERVICE_S - _LEAST_SERVICE_S)
    server.close()
