"""A view of the pool forms: workers and servers meet, and make a group in a mesh of its own."""

from __future__ import annotations

import math
import os
import struct
import time
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import ShoalError, UsageError
from shoal.group.context import meet
from shoal.group.group import Group
from shoal.group.work import FOR_EVER_S
from shoal.plan import Planner, default_cluster, reported_mbit
from shoal.plan.wire import link_from
from shoal.rendezvous.interface import choose_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal import engine
    from shoal.rendezvous import Store

MEETING_S: Final = 3.0
"""For a view to form: a server that was there a moment ago, and is gone, holds all up this long."""

_FIRST_TAG: Final = 2
_DIGEST: Final = struct.Struct("<4sd")
_KIND: Final = b"pool"


class Misplaced(UsageError):  # noqa: N818 - says what is wrong
    """A server is where somebody else is.

    Args:
        server: its place among the servers of the view.
    """

    def __init__(self, server: int, message: str) -> None:
        super().__init__(server, message)
        self.server = server

    def __str__(self) -> str:
        return str(self.args[1])


class PoolGroup(Group):
    """The group of one view: the workers with the ranks they have, and the servers after them.

    Attributes:
        rates: by rank, the bytes that its link carries each microsecond, as its host says; 0: it
            does not know.
    """

    rates: tuple[float, ...] = ()

    def serve(self, plan: engine.Plan) -> None:
        """From now on the native core answers every call of this kind that the workers make.

        Raises:
            ValueError: no server can.
        """
        native: Any = self._native
        native.serve(plan)

    def post(self, plan: engine.Plan, key: int, address: int) -> engine.Call:
        """A worker's part of a call. It has no deadline but that of the whole call."""
        return self._native.post_in_place(plan, key, address, FOR_EVER_S, True)


def meet_view(store: Store, view: int, rank: int, size: int, n_workers: int) -> PoolGroup:
    """Meet the others of a view and return its group, once there is a way from every worker.

    Servers dial the workers, so that nobody needs to reach a server but at its one port.

    Raises (nothing is left open):
        ShoalError: it has not formed.
    """
    until = time.monotonic() + MEETING_S
    digest = _DIGEST.pack(_KIND, _own_rate(store.host))
    context = meet(store, rank, size, MEETING_S, digest)
    try:
        hosts = [info.host_id for info in context.names]
        _check_hosts(hosts, [str(info) for info in context.names], n_workers)
        planner = Planner(default_cluster(range(size)))
        group = PoolGroup(context, list(range(size)), f"pool view {view}", FOR_EVER_S, planner)
        group.owns_context = True
        group.rates = tuple(map(_rate_of, context.digests))
        context.pace(group.rates[rank])
        _greet(group, n_workers, until)
    except BaseException:
        context.close()
        raise
    return group


def _greet(group: PoolGroup, n_workers: int, until: float) -> None:
    """Each server says a first word to each worker: the higher rank is the one that dials."""
    words = []
    for peer in _others(group, n_workers):
        left_s = max(0.01, until - time.monotonic())
        if group.rank < n_workers:
            words.append(group.recv(bytearray(1), peer, _FIRST_TAG, timeout_s=left_s, work=True))
        else:
            words.append(group.send(bytearray(1), peer, _FIRST_TAG, timeout_s=left_s, work=True))
    for word in words:
        if word is not None:
            word.wait()


def _others(group: PoolGroup, n_workers: int) -> Iterator[int]:
    yield from range(n_workers, group.size) if group.rank < n_workers else range(n_workers)


def _check_hosts(hosts: list[str], names: list[str], n_workers: int) -> None:
    """Nobody shares a host: they would go by shared memory, and by one NIC.

    Raises:
        Misplaced: a server is where somebody else is.
    """
    for rank in range(n_workers, len(hosts)):
        other = hosts.index(hosts[rank])
        if other < rank:
            who = "worker" if other < n_workers else "server"
            raise Misplaced(
                rank - n_workers,
                f"server {names[rank]} is on the host of {who} {names[other]}: leave it out of "
                "SHOAL_SERVERS; a server helps only by a link of its own",
            )


def _own_rate(master: str | None) -> float:
    link = link_from(os.environ)
    if link is not None:
        return 1 / link.us_per_byte if link.us_per_byte else 0.0
    try:
        mbit = reported_mbit(choose_address(os.environ.get("MASTER_ADDR") or master).interface)
    except (OSError, UsageError):
        return 0.0
    return (mbit or 0) / 8


def _rate_of(digest: bytes) -> float:
    try:
        kind, rate = _DIGEST.unpack(digest)
    except struct.error:
        kind, rate = b"", 0.0
    if kind != _KIND or not math.isfinite(rate) or rate < 0:
        raise ShoalError("a rank of this view is none of a pool's: install the same shoal on all")
    return float(rate)
