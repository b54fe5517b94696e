"""The ranks of a new group agree on their planner.

When they meet they exchange digests of their settings and hosts. The cluster depends on these
alone, so every run of a job on the same machines has the same cluster, choices and bits.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import UsageError
from shoal.limits import MOST_CONNECTIONS
from shoal.plan.channels import Channels, choose_channels
from shoal.plan.cluster import numbered
from shoal.plan.defaults import WIRE, default_cluster
from shoal.plan.planner import Planner
from shoal.plan.text import counted, ranks_of
from shoal.plan.wire import link_text, slowest

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster, LinkCost
    from shoal.plan.settings import Settings
    from shoal.plan.tuning import Tuning

_LOG: Final = logging.getLogger("shoal")


class _Digest(NamedTuple):
    """A rank's settings, most of them equal on all ranks, and the facts of its host.

    Args:
        channels: `SHOAL_CHANNELS`; 0: not set.
        mbit: the class of the interface's rate; 0: unknown, or not needed.
        n_paths: `SHOAL_PATHS`; ranks may differ.
        monitor: the IPv6 address and the port at which `shoal top` may ask the rank; zeros: none.
        cores: a bit for each core that the rank may use.
    """

    algorithms: int
    tuning: int
    link: int
    refuse: int
    wire: int
    channels: int
    servers: int
    mbit: int
    n_paths: int
    monitor: bytes
    cores: int


_HEAD: Final = struct.Struct("<9q18s")
_V4: Final = "::ffff:"
# Cores with higher numbers share the bits of lower ones, to keep digests short.
_N_CORE_BITS: Final = 1024
_MOST_MBIT: Final = 10**9  # a thousand times the fastest Ethernet

# By field that all ranks must share: the variable, and a function that returns this process's value
# for messages; false: not set.
_SHARED: Final[dict[str, tuple[str, Callable[[Settings], object]]]] = {
    "algorithms": ("SHOAL_ALGO", lambda own: own.forced.text),
    "tuning": (
        "the content of SHOAL_TUNING",
        lambda own: own.tuning and f"the content of {own.tuning.path}",
    ),
    "link": ("SHOAL_LINK", lambda own: own.link and link_text(own.link)),
    "refuse": ("SHOAL_TUNING_MISMATCH", lambda own: "refuse" if own.refuse else "ignore"),
    "wire": ("the wire of the group (SHOAL_WIRE, or init(wire=))", lambda own: own.wire.name),
    "channels": ("SHOAL_CHANNELS", lambda own: own.channels),
    "servers": ("SHOAL_SERVERS (or SHOAL_SERVERS_REQUIRED)", lambda own: own.servers),
}


def digest_of(
    settings: Settings,
    mbit: int | None = None,
    cores: Iterable[int] | None = None,
    monitor: tuple[str, int] | None = None,
) -> bytes:
    """Return this rank's digest for all others.

    Args:
        mbit: the class of its interface's rate, if known.
        cores: the cores that it may use; None asks the system.
        monitor: address and port for `shoal top` on other hosts.
    """
    address, port = monitor or ("::", 0)
    mapped = address if ":" in address else _V4 + address
    digest = _Digest(
        algorithms=_digest(settings.forced.text),
        tuning=settings.tuning.digest if settings.tuning else 0,
        link=_digest(repr(settings.link)),
        refuse=settings.refuse,
        wire=settings.wire.number,
        channels=settings.channels,
        servers=_digest(settings.servers),
        mbit=mbit or 0,
        n_paths=settings.n_paths,
        monitor=socket.inet_pton(socket.AF_INET6, mapped) + port.to_bytes(2, "little"),
        cores=_bits(os.sched_getaffinity(0) if cores is None else cores),
    )
    n_bytes = (digest.cores.bit_length() + 7) // 8
    return _HEAD.pack(*digest[:-1]) + digest.cores.to_bytes(n_bytes, "little")


def monitor_of(digest: bytes) -> tuple[str, int]:
    """Return the address and port that `digest_of` got as `monitor`; port 0: none."""
    place = _read(0, digest).monitor
    address = socket.inet_ntop(socket.AF_INET6, place[:-2]).removeprefix(_V4)
    return address, int.from_bytes(place[-2:], "little")


def agreed_planner(
    rank: int,
    settings: Settings,
    host_ids: Sequence[str],
    digests: Sequence[bytes],
    title: str,
) -> Planner:
    """Return the planner of a new group, equal on all ranks and in every run. Sends nothing.

    Depends on the host and the `digest_of` each rank; `title` names the group in the log.
    UsageError if settings differ, or the tuning file is for another cluster.
    """
    read = [_read(other, digest) for other, digest in enumerate(digests)]
    _compare(read, settings)
    hosts = numbered(host_ids)
    n_cores = _fewest_cores(hosts, read)
    misfit = _misfit(settings, hosts, n_cores)
    tuning = None if misfit else settings.tuning
    wire, why = _wire(settings, tuning, read) if len(set(hosts)) > 1 else (WIRE, "")
    cluster = default_cluster(hosts, n_cores=n_cores, wire=wire)
    channels = _channels(settings, cluster, read)
    level = logging.DEBUG if rank else logging.INFO
    if misfit:
        _LOG.warning("%s; it is ignored", misfit)
    if cluster.n_hosts > 1:
        _LOG.log(
            level,
            "%s: links between hosts are taken as %s, %s; %s, since %s",
            *(title, link_text(wire), why, counted(channels.n, "channel"), channels.why),
        )
    if rank == 0 and (unlike_paths := _unlike_paths(cluster, read)):
        _LOG.warning("%s: %s", title, unlike_paths)
    return Planner(
        *(cluster, settings.forced, tuning), n_channels=channels.n, title=title, level=level
    )


def _channels(settings: Settings, cluster: Cluster, digests: Sequence[_Digest]) -> Channels:
    n_paths = max(digest.n_paths for digest in digests)
    if cluster.n_hosts == 1 or not settings.channels:
        return choose_channels(cluster, MOST_CONNECTIONS // n_paths)
    if n_paths * settings.channels > MOST_CONNECTIONS:
        raise UsageError(
            f"SHOAL_PATHS={n_paths} and SHOAL_CHANNELS={settings.channels} are "
            f"{n_paths * settings.channels} connections between two ranks; at most "
            f"{MOST_CONNECTIONS} are possible: lower one of them"
        )
    return Channels(settings.channels, "SHOAL_CHANNELS sets them")


def _unlike_paths(cluster: Cluster, digests: Sequence[_Digest]) -> str:
    """Warn of unequal SHOAL_PATHS, which may be a mistake or fit the interfaces of the hosts."""
    others = [rank for rank, digest in enumerate(digests) if digest.n_paths != digests[0].n_paths]
    if cluster.n_hosts == 1 or not others:
        return ""
    return (
        f"SHOAL_PATHS is {digests[0].n_paths} on rank 0 and {digests[others[0]].n_paths} on rank "
        f"{others[0]}: the lower number counts between two ranks"
    )


def _read(rank: int, digest: bytes) -> _Digest:
    try:
        head = _HEAD.unpack_from(digest)
    except struct.error as error:
        raise UsageError(
            f"rank {rank} gave a settings digest of {len(digest)} bytes, expected at least "
            f"{_HEAD.size}: install the same shoal on all hosts"
        ) from error
    found = _Digest._make((*head, int.from_bytes(digest[_HEAD.size :], "little")))
    if not (1 <= found.n_paths <= MOST_CONNECTIONS and 0 <= found.mbit <= _MOST_MBIT):
        raise UsageError(
            f"rank {rank} gave a settings digest with {found.n_paths} paths of {found.mbit} "
            "Mbit/s: install the same shoal on all hosts"
        )
    return found


def _compare(digests: Sequence[_Digest], settings: Settings) -> None:
    for field, (variable, show) in _SHARED.items():
        values = [getattr(digest, field) for digest in digests]
        # The variable was set on some ranks only.
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise UsageError(
                f"{variable} is not the same on all ranks: {ranks_of(others)} "
                f"differ{'s' * (len(others) == 1)} from rank 0 (on this rank it is "
                f"{show(settings) or 'not set'}); set it to the same on all"
            )


def difference(digest: bytes, other: bytes) -> str:
    """Return the first variable that differs between the digests and must not; empty: none."""
    try:
        found, wanted = _read(0, digest), _read(1, other)
    except UsageError:
        return "version of shoal"
    differing = (name for name in _SHARED if getattr(found, name) != getattr(wanted, name))
    return next((_SHARED[name][0] for name in differing), "")


def _fewest_cores(hosts: Sequence[int], digests: Sequence[_Digest]) -> int:
    """Return the number of cores on the host with the fewest, over all ranks of the host.

    Some launchers bind each rank to one core.
    """
    by_host = dict.fromkeys(hosts, 0)
    for host, digest in zip(hosts, digests, strict=True):
        by_host[host] |= digest.cores
    return max(1, min(cores.bit_count() for cores in by_host.values()))


def _wire(
    settings: Settings, tuning: Tuning | None, digests: Sequence[_Digest]
) -> tuple[LinkCost, str]:
    """Return the costs of the links between hosts, and their source."""
    if settings.link is not None:
        return settings.link, "as SHOAL_LINK sets them"
    if tuning is not None and tuning.link is not None:
        return tuning.link, f"as in {tuning.path}"
    return slowest([digest.mbit or None for digest in digests])


def _misfit(settings: Settings, hosts: Sequence[int], n_cores: int) -> str:
    """Return how the tuning file differs from this cluster; empty: it does not."""
    tuning = settings.tuning
    difference = tuning.differs_from(hosts, n_cores) if tuning is not None else ""
    if tuning is None or not difference:
        return ""
    what = f"the tuning file {tuning.path} is for another cluster: {difference}"
    if settings.refuse:
        raise UsageError(
            f"{what}; measure this one with `shoal tune`, or set SHOAL_TUNING_MISMATCH=ignore "
            "to choose by the model"
        )
    return what


def _bits(cores: Iterable[int]) -> int:
    return sum(1 << bit for bit in {core % _N_CORE_BITS for core in cores})


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
