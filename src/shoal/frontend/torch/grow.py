"""`shoal.torch.grow_group` and `join_group`: let newcomers into torch's default group."""

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

_CONNECT: Final = timedelta(seconds=10)  # limit to connect to rank 0's store, already listening
_N_ADDRESS: Final = 128
_TRIES: Final = 3  # attempts to reach that store, each in a new group


def join_address() -> str:
    """Return the address at which newcomers reach this rank, for `join_group`.

    It is `shoal.Group.address` of torch's default group. It does not change when the group shrinks
    or grows.

    Raises:
        UsageError: torch's default group is not a shoal group, or as for `shoal.Group.address`.
    """
    return default_of("join_address").address


def grow_group(*, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Let in all waiting newcomers and leave out lost ranks; return the default group.

    All ranks call it at the same place among their calls, like `shoal.Group.reform`. Without
    newcomers and losses the default group stays, at the cost of a small all-gather. Otherwise a
    larger or smaller one replaces it, as with `shrink_group`: old ranks first, newcomers after.

    Args:
        timeout: time within which all ranks must call it; None: the default group's timeout.

    Raises:
        UsageError: there is no default group.
        Unsupported: the default group has other backends than shoal.
        TimedOut, PeerLost, UsageError, Closed: as `shoal.Group.reform`; ShoalError: rank 0 cannot
            serve a store. torch's groups have not changed: call it again on all ranks.
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
    """Wait until a running job lets this process in with `grow_group`; return the default group.

    A newcomer calls it in place of `init_process_group`. It needs no RANK, WORLD_SIZE or store.

    Args:
        addresses: the addresses of one or more living ranks (`join_address`), separated by commas;
            None: `SHOAL_JOIN`, as for `shoal.init`.
        timeout: the limit for joining and for all later calls; None: torch's default.

    Raises:
        UsageError: there is a default group, or no address, or the job refuses this process; the
            text has the reason.
        TimedOut: the job did not let this process in.
        ShoalError: as for `shoal.init`, or rank 0 cannot serve a store to torch. No group is left.
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
    """Make `new` torch's default group, or the group in which its living ranks continue.

    Args:
        old: the group that a next call starts from if this one fails; None: close the new group.
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
            new.abort("a rank could not make it torch's default group")
        raise
    replace_default(new, store)


def _store_of(group: Group) -> Store:
    """Return a store that rank 0 serves to torch on all ranks; newcomers cannot use the old one."""
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
        store.set_timeout(timedelta(seconds=group.timeout_s))  # of later gets
    except RuntimeError as error:  # from shoal or torch
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
