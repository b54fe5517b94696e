"""Form a group: meet the other ranks, agree on a planner, and make the group of all ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.codec import parse_wire
from shoal.errors import UsageError
from shoal.group.agreeing import agreed_planner, digest_of, monitor_of
from shoal.group.announce import log_algorithms, log_members
from shoal.group.context import meet
from shoal.group.group import Group
from shoal.lazy import load
from shoal.plan import Settings, reported_mbit
from shoal.rendezvous import job_key, reporting_failure
from shoal.rendezvous.interface import choose_addresses
from shoal.rendezvous.listener import is_out_of_descriptors, listen_at, port_range
from shoal.settings import monitored, warn_of_unknown

if TYPE_CHECKING:
    import socket

    from shoal.group.context import Context
    from shoal.plan import Planner
    from shoal.rendezvous import Membership, Store
    from shoal.rendezvous.door import Door
    from shoal.rendezvous.interface import Advertised
    from shoal.rendezvous.record import Endpoint
    from shoal.state.monitor import Monitor

DEFAULT_TIMEOUT_S: Final = 300.0

_LOG: Final = logging.getLogger("shoal")


class Growing(NamedTuple):
    """Options with which `Group.grow` and its newcomers form a group.

    Attributes:
        before: the old group's monitor, whose listener the new group takes over.
    """

    before: Monitor | None = None


def form(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    name: str = "world",
    wire: str | None = None,
    growing: Growing | None = None,
) -> Group:
    """Meet all ranks through `store` and return the group of all of them.

    Args:
        store: shared by all ranks, and needed until this returns.
        timeout_s: seconds for the meeting, and the default timeout of calls.
        wire: the encoding of large sums between hosts, see `Group`; None: `SHOAL_WIRE`.
        growing: set by `Group.grow` and its newcomers, which begin the group themselves.

    Raises (nothing is left open):
        UsageError: a variable or the tuning file is wrong, or differs between ranks; keys differ;
            no file descriptor is left.
        TimedOut: names the ranks that did not join.
        PeerLost: the store is gone.
        ShoalError: no shared memory is left.
    """
    title = f"group {name!r}"
    with reporting_failure(store, rank, size):
        warn_of_unknown(os.environ)
        settings = Settings.read()  # refuses wrong settings before other ranks wait
        if wire is not None:
            settings = settings._replace(wire=parse_wire(wire))
        kind = _kind_of_group(settings, name)
        advertised, mbit = _advertised(store, settings) if size > 1 else ([], None)
        key = job_key() if monitored(os.environ) and advertised else None
        before = growing.before if growing is not None else None
        readers, place = None, before.place if before is not None else None
        if key and place is None:
            readers, place = _listen_to_readers(advertised[0], size)
        digest = digest_of(settings, mbit, monitor=place[:2] if place else None)

    def agree(met: Membership) -> Planner:
        log_members(title, rank, met.names, settings.wire, advertised)
        host_ids = [rank_info.host_id for rank_info in met.names]
        return agreed_planner(rank, settings, host_ids, met.digests, title)

    with readers or contextlib.nullcontext():
        context, planner = meet(store, rank, size, timeout_s, digest, agree)
        try:
            if rank == 0:
                log_algorithms(title, planner, settings.wire)
            context.pace(1 / planner.cluster.wire.us_per_byte if planner.cluster.n_hosts > 1 else 0)
            members = list(range(size))
            group = kind(context, members, name, timeout_s, planner, settings.wire)
            group.owns_context = True
            if place is not None and context.monitor is not None:
                context.monitor.answer(readers or before, place, key, _places_of_monitors(context))
                if rank == 0:
                    _LOG.info("%s: `shoal top %s` shows all ranks", title, place)
        except BaseException:
            context.close()
            raise
    if growing is None:
        group.begin()
    if size > 1:
        load("shoal.plan.choose")  # the first call may have no file descriptor left
    return group


def form_at(
    door: Door,
    addresses: Sequence[str],
    uuid: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    name: str = "world",
) -> Group:
    """Form the group of the processes whose doors have these addresses; ranks in their order.

    Needs no other store: the processes meet at the first door. A process may be in other groups,
    living or ended, which do not change.

    Args:
        door: this process's door.
        addresses: the `Door.address` of each member, in the same order on every member.
        uuid: a name for this meeting, the same on every member, that no earlier meeting had.
        timeout_s, name: as for `form`.

    Raises (nothing is left open but the door):
        UsageError: as for `form`; or `addresses` repeats a door or leaves out this one.
        TimedOut: the process of the first address did not answer or did not call this; or other
            processes did not, and the message names them.
        PeerLost: a member ended or failed while the group formed, or before.
        ShoalError: as for `form`.
    """
    if len(set(addresses)) != len(addresses) or door.address not in addresses:
        raise UsageError(
            f"the addresses {', '.join(addresses)} repeat one, or leave out this process's own, "
            f"{door.address}"
        )
    from shoal.rendezvous.door import visit  # most groups form without a door

    rank, deadline = addresses.index(door.address), time.monotonic() + timeout_s
    if rank == 0:
        door.open(uuid)
    with visit(addresses[0], uuid, timeout_s) as store:
        left_s = max(0.001, deadline - time.monotonic())
        group = form(store, rank, len(addresses), timeout_s=left_s, name=name)
    group.timeout_s = timeout_s
    return group


def _kind_of_group(settings: Settings, name: str) -> type[Group]:
    if not settings.servers or name != "world":
        return Group
    from shoal.group.pool.served_group import ServedGroup  # slow to load, and few jobs have servers

    ServedGroup.check(os.environ)
    return ServedGroup


def _advertised(store: Store, settings: Settings) -> tuple[list[Advertised], int | None]:
    """Return this rank's addresses for other hosts, and their rate in Mbit/s; None: unknown.

    Raises:
        UsageError: `SHOAL_SOCKET_IFNAME` names no interface, or no file descriptor is left.
    """
    try:
        master = os.environ.get("MASTER_ADDR") or store.host
        found = choose_addresses(settings.n_paths, master)
        return found, reported_mbit(found[0].interface) if settings.link is None else None
    except UsageError:
        # A mistyped name is an error even if all ranks share a host. An exclusion (^) is not: it
        # may exclude all interfaces of that host.
        if not (os.environ.get("SHOAL_SOCKET_IFNAME") or "^").startswith("^"):
            raise
        return [], None  # joining ranks of other hosts raises the error
    except OSError as error:
        if not is_out_of_descriptors(error):
            return [], None  # a sandbox may hide the interfaces; ranks of one host need none
        raise UsageError(
            "no file descriptor is left to read this host's interfaces: raise `ulimit -n`"
        ) from error


def _listen_to_readers(
    advertised: Advertised, size: int
) -> tuple[socket.socket | None, Endpoint | None]:
    """Listen for `shoal top` on other hosts, but leave a port for the links of each rank here.

    Logs a warning if that is impossible. `size` is the group's; it replaces LOCAL_WORLD_SIZE if
    no launcher has set that.
    """
    ports = list(port_range(os.environ))
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    n_ranks = int(local_size) if local_size.isdecimal() else size
    try:
        if ports != [0] and len(ports) < 2 * n_ranks:
            raise UsageError(
                f"SHOAL_PORT_RANGE has {len(ports)} ports; `shoal top` needs {2 * n_ranks}, two "
                f"for each of {n_ranks} ranks on a host"
            )
        # From the last port down: links take the first ones.
        return listen_at("`shoal top`", advertised, reversed(ports), os.environ)
    except (OSError, UsageError) as error:
        _LOG.warning("`shoal top` on other hosts cannot reach this rank: %s", error)
        return None, None


def _places_of_monitors(context: Context) -> list[tuple[int, str, str, int]]:
    """Return each rank's number and host, and its address and port for `shoal top`."""
    return [
        (rank, info.host, *monitor_of(digest))
        for rank, (info, digest) in enumerate(zip(context.names, context.digests, strict=True))
    ]
