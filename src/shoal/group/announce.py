"""The lines that rank 0 logs when a group forms: versions, hosts, ranks and algorithms."""

from __future__ import annotations

import logging
import os
import platform
import sys
from typing import TYPE_CHECKING, Final

from shoal import engine
from shoal.codec import Codec
from shoal.errors import UsageError
from shoal.group.calls import WIRE_FLOOR_BYTES
from shoal.plan.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.plan import Planner
    from shoal.rendezvous.interface import Advertised

_LOG: Final = logging.getLogger("shoal")
_MOST_HOSTS: Final = 16  # that a line names
_SIZES: Final = tuple(1 << power for power in range(2, 31))


def log_members(
    title: str,
    rank: int,
    members: Sequence[engine.RankInfo],
    wire: Codec,
    advertised: Sequence[Advertised],
) -> None:
    """Log versions, settings and hosts on rank 0, and this rank's addresses with the reasons."""
    level = logging.DEBUG if rank else logging.INFO
    if not _LOG.isEnabledFor(level):
        return
    by_host: dict[str, list[int]] = {}
    for member, info in enumerate(members):
        by_host.setdefault(info.host_id, []).append(member)
    if rank == 0:
        what = f"{counted(len(members), 'rank')} on {counted(len(by_host), 'host')}"
        hosts = [_host(ranks, members[ranks[0]]) for ranks in by_host.values()]
        more = ["..."] * (len(hosts) > _MOST_HOSTS)
        _LOG.info("%s: %s", title, _facts(wire))
        _LOG.info("%s: %s: %s", title, what, "; ".join(hosts[:_MOST_HOSTS] + more))
    if len(by_host) > 1:
        for one in dict.fromkeys(advertised):
            where = f"{one.address} ({one.interface}), by {one.why}"
            _LOG.log(level, "%s: rank %d listens at %s", title, rank, where)


def log_algorithms(title: str, planner: Planner, wire: Codec) -> None:
    """Log the algorithms of all_reduce by size; first calls log the reasons at DEBUG."""
    if planner.cluster.size == 1 or not _LOG.isEnabledFor(logging.INFO):
        return
    sizes = {n: wire if n >= WIRE_FLOOR_BYTES else Codec.IDENTITY for n in _SIZES}
    try:
        _LOG.info("%s: all_reduce by %s", title, planner.table("all_reduce", sizes))
    except UsageError as error:  # SHOAL_ALGO makes these calls impossible
        _LOG.info("%s: all_reduce: %s", title, error)


def _facts(wire: Codec) -> str:
    torch = getattr(sys.modules.get("torch"), "__version__", None)
    versions = f"shoal {sys.modules['shoal'].__version__}, Python {platform.python_version()}"
    versions += f", torch {torch}" * (torch is not None)
    names = ("SHOAL_KEY_FILE", "SHOAL_KEY")
    key = next((name for name in names if os.environ.get(name)), "none")
    return f"{versions}; kernels: {engine.fold_isa()}; job key: {key}; wire: {wire}"


def _host(ranks: Sequence[int], first: engine.RankInfo) -> str:
    is_run = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    named = f"{ranks[0]} to {ranks[-1]}" if is_run else ", ".join(map(str, ranks))
    return f"{first.host}, rank{'s' * (len(ranks) > 1)} {named}"
