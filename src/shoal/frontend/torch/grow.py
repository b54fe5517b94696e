"""`shoal.torch.grow_group` and `join_group`: torch's default group takes in newcomers."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from shoal.errors import ShoalError, UsageError
from shoal.frontend.torch.shrink import default_of, replace_default
from shoal.group.entering import enter
from shoal.rendezvous.listener import port_range
from shoal.settings import join_addresses

if TYPE_CHECKING:
    from shoal.group.group import Group

__all__ = ["grow_group", "join_address", "join_group"]

_CONNECT: Final = timedelta(seconds=10)  # to the store of rank 0, which listens already
_N_ADDRESS: Final = 128
_TRIES: Final = 3  # to reach that store, in one group after the other


def join_address() -> str:
    """Return the address at which newcomers reach this rank, for `join_group`.

    It is `shoal.Group.address` of torch's default group, and stays the same while that shrinks and
    grows.

    Raises:
        UsageError: there is no default group of shoal, or as for `shoal.Group.address`.
    """
    return default_of("join_address").address


def grow_group(*, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Let in all newcomers that wait, without the ranks that were lost; return the default group.

    All ranks call it at the same place among their calls, like `shoal.Group.reform`. Without
    newcomers and losses the default group stays, at the cost of a small all-gather. Otherwise a
    larger or smaller one replaces it, as with `shrink_group`: old ranks first, newcomers after.

    Args:
        timeout: until all ranks must have called it; None takes the default group's.

    Raises:
        Unsupported: the default group is not one of shoal's alone.
        TimedOut, PeerLost, UsageError: as `shoal.Group.reform`; ShoalError: rank 0 cannot serve a
            store. Call it again on all ranks.
    """
    old = default_of("grow_group")
    timeout_s = old.timeout_s if timeout is None else timeout.total_seconds()
    deadline = time.monotonic() + timeout_s
    new = old.reform(timeout_s=timeout_s)
    if new is not old:
        _replace(new, deadline, old)
    return cast("dist.ProcessGroup", dist.group.WORLD)


def join_group(
    addresses: str | None = None, *, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Wait to be let into a running job, whose ranks call `grow_group`; return the default group.

    A newcomer calls it in place of `init_process_group`. It needs no RANK, WORLD_SIZE or store.

    Args:
        addresses: of one or several living ranks (`join_address`), with commas between; None:
            `SHOAL_JOIN`, as for `shoal.init`.
        timeout: until it must be let in, and of all calls; None takes torch's default.

    Raises:
        UsageError: there is a default group, or no address, or the job refuses this process: why.
        TimedOut: nobody let this process in.
    """
    if dist.is_initialized():
        raise UsageError("join_group: there is a default group already; a member calls grow_group")
    found = join_addresses(os.environ, addresses)
    if not found:
        raise UsageError("join_group: give the address of a living rank, or set SHOAL_JOIN")
    timeout_s = (timeout or dist.default_pg_timeout).total_seconds()
    deadline = time.monotonic() + timeout_s
    _replace(enter(found, timeout_s=timeout_s), deadline)
    return cast("dist.ProcessGroup", dist.group.WORLD)


def _replace(new: Group, deadline: float, old: Group | None = None) -> None:
    """Make this group torch's default one, or the group in which its living ranks go on.

    Args:
        old: from which a next call goes on if this one fails; None: then the new group is closed.
    """
    try:
        for n_left in reversed(range(_TRIES)):
            try:
                store = _store_of(new)
                break
            except ShoalError:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not n_left:
                    raise
                new = new.reform(timeout_s=left_s)
    except BaseException:
        if old is None:
            new.close()
        else:
            new.abort("a rank did not get it as torch's default group")
        raise
    replace_default(new, store)


def _store_of(group: Group) -> Store:
    """Return a store that rank 0 serves to torch on all ranks: newcomers lack the one of old."""
    where, store = bytearray(_N_ADDRESS), None
    try:
        if group.rank == 0:
            host = group.address.rpartition(":")[0]
            store = _serve(host)
            where[:] = f"{host}:{store.port}".encode().ljust(_N_ADDRESS)
        group.broadcast(where, 0)
        if store is None:
            host, _, port = where.decode().strip().rpartition(":")
            store = TCPStore(host, int(port), is_master=False, timeout=_CONNECT)
        group.barrier()
    except RuntimeError as error:  # of shoal or torch
        why = f"rank {group.rank} has no store for torch: {error}"
        group.abort(why)
        raise ShoalError(why) from error
    return store


def _serve(host: str) -> TCPStore:
    error: RuntimeError | None = None
    for port in port_range(os.environ):
        try:
            return TCPStore(host, port, is_master=True, timeout=_CONNECT, wait_for_workers=False)
        except RuntimeError as found:  # noqa: PERF203 - the port is taken
            error = found
    raise ShoalError(f"no port is free: {error}")
