"""A view of the pool forms: workers and servers meet, and make a group in a mesh of its own."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import struct
import time
from typing import TYPE_CHECKING, Any, Final

from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.engine import Fault, Plan, address_of, lower
from shoal.errors import Closed, PeerLost, ShoalError, UsageError
from shoal.group.calls import ClosedGroup
from shoal.group.context import meet
from shoal.group.group import Group
from shoal.group.pool.commands import MEETING_S
from shoal.group.work import FOR_EVER_S, Work
from shoal.limits import FIRST_NAMED_KEY
from shoal.plan import Planner, default_cluster, reported_mbit
from shoal.plan.channels import PoolCard, channels_from, choose_pool_channels
from shoal.plan.settings import paths_from
from shoal.plan.wire import link_from
from shoal.rendezvous.interface import choose_address
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.schedule import Recv, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal import engine
    from shoal.group.pool.bell import Bell
    from shoal.rendezvous import Store

# A silent member costs a view its calls' repair, and a worker nothing else: it is given up soon.
# Sooner would take a busy machine for a dead one.
DEAD_S: Final = 1.2
_LOOK_S: Final = 0.05
_MOST_NAMED: Final = 4
_WORD_BYTES: Final = 1024  # the least that a segment may have
_DIGEST: Final = struct.Struct("<4sd3H")
_KIND: Final = b"pool"
# In bytes each microsecond: 8 kbit/s and 8 Pbit/s. Who says less or more is taken for that: sums
# and quotients of what a rank may say would be infinite, or nothing, and no shares come of these.
_RATES: Final = (1e-3, 1e9)


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


class Unmet(ShoalError):  # noqa: N818 - says what is wrong
    """Some have met, and cannot reach each other.

    Args:
        servers: the places of those in the view that have not been heard, or that do not hear us.
    """

    def __init__(self, servers: frozenset[int], message: str) -> None:
        super().__init__(servers, message)
        self.servers = servers

    def __str__(self) -> str:
        return str(self.args[1])


class PoolGroup(Group):
    """The group of one view: the workers with the ranks they have, and the servers after them.

    Attributes:
        rates: by rank, the bytes that its link carries each microsecond, as its host says; 0: it
            does not know.
        n_channels: that large calls are cut over.
    """

    rates: tuple[float, ...] = ()
    n_channels: int = 1

    def notify(self, bell: Bell) -> None:
        """Ring the bell when the group ends."""
        if not isinstance(self._native, ClosedGroup):
            self._native.notify(bell.fd)

    @property
    def has_ended(self) -> bool:
        """True once it has ended or was closed."""
        native = self._native
        return isinstance(native, ClosedGroup) or native.error()[0] is not Fault.NONE

    @property
    def names(self) -> list[str]:
        """By rank, where it is."""
        return [str(self._context.names[member]) for member in self._members]

    def serve(self, plan: engine.Plan) -> None:
        """From now on the native core answers every call of this kind that the workers make.

        Raises:
            ValueError: no server can.
        """
        native: Any = self._native
        native.serve(plan)

    def first_word(self, server: int, n_workers: int) -> Work:
        """Begin what this server says to every worker, over every channel."""
        lengths = [_WORD_BYTES * self.n_channels]
        is_own = server == self.rank
        steps = [Send(to, 0) for to in range(n_workers)] if is_own else [Recv(server, 0)]
        plan = Plan.make(
            program=lower(steps, self.size),
            layouts=[([0], lengths), ([], []), ([], []), ([], [])],
            dtype=DType.UINT8,
            op=Op.SUM,
            divisor=1,
            codec=Codec.IDENTITY,
            descriptor=f"the first word of rank {server}",
            agreement=f"the first word of rank {server}",
            by_pair=False,
            n_lanes=self.n_channels,
            segment_bytes=_WORD_BYTES,
        )
        word = bytearray(*lengths)
        address = address_of(memoryview(word))
        key = first_word_key(server)
        call = self._native.post_in_place(plan, key, address, FOR_EVER_S, True, 0)
        work = Work(self, call, word)
        self._context.keep(work)
        return work

    def post(self, plan: engine.Plan, key: int, address: int, subject: int) -> engine.Call | None:
        """Start the servers' part of a call, without a deadline; None if the group has ended."""
        if self.has_ended:
            return None
        return self._native.post_in_place(plan, key, address, FOR_EVER_S, True, subject)


def first_word_key(server: int) -> int:
    """The key of what a server says first, which no call along a rail has (`rails.Stage`)."""
    return FIRST_NAMED_KEY | server << 2 | 3


def meet_view(
    store: Store,
    view: int,
    rank: int,
    size: int,
    n_workers: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> PoolGroup:
    """Meet the others of a view and return its group, once there is a way from every worker.

    Servers dial the workers, so that nobody needs to reach a server but at its one port.

    Args:
        is_wanted: asked 20 times a second while a way is missing.

    Raises (nothing is left open):
        ShoalError: it has not formed.
    """
    until = time.monotonic() + MEETING_S
    digest = _digest_of(_own_card(store.host))
    channels = functools.partial(_channels, n_workers)
    context = meet(store, rank, size, MEETING_S, digest, channels, DEAD_S)
    try:
        hosts = [info.host_id for info in context.names]
        _check_hosts(hosts, [str(info) for info in context.names], n_workers)
        planner = Planner(default_cluster(range(size)))
        group = PoolGroup(context, list(range(size)), f"pool view {view}", FOR_EVER_S, planner)
        group.owns_context = True
        cards = [_card_of(digest) for digest in context.digests]
        group.rates = tuple(card.rate for card in cards)
        group.n_channels = choose_pool_channels(cards, n_workers)
        context.pace(group.rates[rank])
        _greet(group, n_workers, until, is_wanted)
    except PeerLost as error:  # that one may live, and be cut off from some worker only
        context.close()
        lost = frozenset([error.rank - n_workers] if error.rank >= n_workers else [])
        raise Unmet(lost, str(error)) from error
    except BaseException:
        context.close()
        raise
    return group


class ViewMeeting:
    """Where a worker meets the others of its views, one after another, until it leaves.

    Threads: one meets; any may close it.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._client: TcpStoreClient | None = None
        self._is_closed = False

    def meet(
        self, host: str, port: int, view: int, rank: int, size: int, n_workers: int
    ) -> PoolGroup:
        """`meet_view` at the store there.

        Raises:
            ShoalError: it has not formed, or was closed meanwhile.
        """
        client = TcpStoreClient(
            host, port, timeout_s=MEETING_S, key=self._key, is_wanted=self._is_wanted
        )
        with contextlib.closing(client):
            self._client = client  # NOT after the look: who closes it now finds it
            if self._is_closed:
                raise Closed(f"nobody waits for view {view} any more")
            return meet_view(client, view, rank, size, n_workers, self._is_wanted)

    def close(self) -> None:
        """End the meeting that goes on, and all later ones; idempotent."""
        self._is_closed = True
        client = self._client
        if client is not None:
            client.close()

    def _is_wanted(self) -> bool:
        return not self._is_closed


def _greet(group: PoolGroup, n_workers: int, until: float, is_wanted: Callable[[], bool]) -> None:
    """Each server says a first word to each worker: the higher rank is the one that dials."""
    servers = range(n_workers, group.size) if group.rank < n_workers else [group.rank]
    words = {server: group.first_word(server, n_workers) for server in servers}
    for word in words.values():  # NOT by their own deadlines, each of which writes a file
        if not _is_in_time(word, until, is_wanted):
            break
    if not is_wanted():
        raise Closed(f"{group}: nobody waits for this view any more")
    unmet = [server for server, word in words.items() if not word.done()]
    if unmet:
        who = ", ".join(f"rank {server}" for server in unmet[:_MOST_NAMED])
        if unmet == [group.rank]:
            who = "all workers"
        places = frozenset(server - n_workers for server in unmet if server != group.rank)
        raise Unmet(places, f"rank {group.rank} has not got through to {who} in {MEETING_S:g} s")
    for word in words.values():
        word.wait()


def _is_in_time(word: Work, until: float, is_wanted: Callable[[], bool]) -> bool:
    while not word.drive(max(0.01, min(until - time.monotonic(), _LOOK_S))):
        if time.monotonic() >= until or not is_wanted():
            return word.done()
    return True


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
                f"is on {names[rank]}, the host of {who} {names[other]}: leave it out of "
                "SHOAL_SERVERS; a server helps only by a link of its own",
            )


def _own_card(master: str | None) -> PoolCard:
    environ = os.environ
    return PoolCard(
        rate=_own_rate(master),
        channels=channels_from(environ),
        n_paths=paths_from(environ),
        n_cores=min(len(os.sched_getaffinity(0)), 0xFFFF),
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


def _digest_of(card: PoolCard) -> bytes:
    return _DIGEST.pack(_KIND, *card)


def _card_of(digest: bytes) -> PoolCard:
    """What another rank says of itself.

    Raises:
        ShoalError: it says something else.
    """
    try:
        kind, rate, channels, n_paths, n_cores = _DIGEST.unpack(digest)
    except struct.error:
        kind, rate, channels, n_paths, n_cores = b"", 0.0, 0, 0, 0
    if kind != _KIND or not math.isfinite(rate) or rate < 0 or not n_paths or not n_cores:
        raise ShoalError("a rank of this view is none of a pool's: install the same shoal on all")
    least, most = _RATES
    rate = min(max(rate, least), most) if rate else 0.0
    return PoolCard(rate, channels, n_paths, n_cores)


def _channels(n_workers: int, _hosts: Sequence[str], digests: Sequence[bytes]) -> int:
    """Of the mesh. 1 as well where a digest is of no pool's rank: that is said once it stands."""
    try:
        return choose_pool_channels([_card_of(digest) for digest in digests], n_workers)
    except ShoalError:
        return 1
