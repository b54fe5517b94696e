"""`shoal.init`: forms a group for programs without torch, from the launcher's variables."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from shoal.errors import PeerLost, TimedOut, UsageError, without_internals
from shoal.rendezvous import Store, job_key
from shoal.rendezvous.environment import LaunchInfo, find_place
from shoal.rendezvous.store.asking import Caller
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer
from shoal.settings import join_addresses, warn_of_unknown

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
    join: str | None = None,
) -> Group:
    """Form the group of all ranks of this job and return it; use it in a `with` statement.

    Under torchrun, mpirun or srun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by
    hand, it needs no arguments. Rank 0 serves a store at MASTER_ADDR:MASTER_PORT until the group
    has formed; nothing needs the store afterwards.

    Args:
        store: your own store, together with `rank` and `size`; needed until this returns.
        timeout_s: seconds for forming the group, more than 0, and the default timeout of its calls.
        wire: the encoding of large sums between hosts: "bf16" sends float32 as bfloat16, in half
            the bytes; "identity" sends elements as they are. None: `SHOAL_WIRE`, else "identity".
            The same on every rank; see `Group`.
        join: enter a running group as a newcomer: the address of a member (`group.address`), or
            several separated by commas. Waits until the members call `group.grow()`. "1" takes
            MASTER_ADDR:MASTER_PORT. None: `SHOAL_JOIN`, if set.

    After an error no group is left, and all ranks may call it again.

    Raises:
        UsageError: an argument or a variable is missing or wrong, the port is taken, or keys
            differ; or the running group refuses this process, for the reason given.
        TimedOut: some ranks did not join; the message names them. Or no member let this process in.
        PeerLost: a rank failed, or rank 0 left, before the group had formed.
        ShoalError: this machine has no memory or threads left.
    """
    from shoal.group.form import form  # the native core loads with the first group

    warn_of_unknown(os.environ)  # NOT only once the group forms: a misspelt name may prevent that
    if join is not None and (store, rank, size) != (None, None, None):
        raise UsageError("shoal.init takes either join, or store, rank and size")
    if store is not None and rank is not None and size is not None:
        return form(store, rank, size, timeout_s=timeout_s, wire=wire)
    if store is not None or rank is not None or size is not None:
        raise UsageError("shoal.init takes store, rank and size together, or leaves all out")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s} is not a positive number of seconds")
    if addresses := join_addresses(os.environ, join):
        from shoal.group.entering import enter

        return enter(addresses, timeout_s=timeout_s, wire=wire)
    place = find_place()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from shoal.frontend.torch.launched import agent_store  # torchrun itself holds that port

        where, port, deadline = place.master_addr, place.master_port, time.monotonic() + timeout_s
        # torch applies its timeout only to connecting, not to waiting for an answer.
        with contextlib.closing(Caller(f"torchrun's store at {where}", deadline)) as caller:
            agent = caller.call("connecting", agent_store, where, port, timeout_s)
        left_s = max(0.001, deadline - time.monotonic())
        group = form(agent, place.rank, place.size, timeout_s=left_s, wire=wire)
        group.timeout_s = timeout_s
        return group
    return _meet_at_rank_0(place, timeout_s, wire)


# How long rank 0 serves its store after its own join has failed. The other ranks read the reason
# within a second and leave; only ranks that joined after the failure stay, and wait for a retry.
_LAST_SERVICE_S: Final = 5.0
# How long it serves at least, since other ranks may still be about to connect.
_LEAST_SERVICE_S: Final = 1.0

# True once this process has formed a group: rank 0 may still be closing the store of that group.
_has_met = False


def _meet_at_rank_0(place: LaunchInfo, timeout_s: float, wire: str | None) -> Group:
    """Form a group through a store that rank 0 serves until the group has formed."""
    from shoal.group.form import form

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
                continue  # that was the previous group's store: rank 0 will open ours
            finally:
                client.close()
            group.timeout_s = timeout_s
            _has_met = True
            return group


def _end_service(server: TcpStoreServer, kind: type[BaseException] | None, *_: object) -> None:
    """Close rank 0's store. If its join failed, let the other ranks read the reason first."""
    try:
        if kind is not None and not issubclass(kind, TimedOut):
            threading.Event().wait(_LEAST_SERVICE_S)
            server.await_leavers(_LAST_SERVICE_S - _LEAST_SERVICE_S)
    finally:  # also after Ctrl-C: the next join needs the port
        server.close()
