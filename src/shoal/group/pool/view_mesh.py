"""The mesh of one view of the pool: its ranks know each other from a roster, and connect.

Each rank opens its listeners first; the roster has their addresses. Servers dial the workers, so
firewalls need to let workers through to a server only at its one port.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.engine import N_NONCE_BYTES, Fault, Plan, address_of, lower
from shoal.errors import Closed, PeerLost, ShoalError
from shoal.group.context import connect
from shoal.group.group import Group
from shoal.group.work import FOR_EVER_S, Work
from shoal.limits import FIRST_NAMED_KEY
from shoal.plan import Planner, default_cluster, reported_mbit
from shoal.plan.channels import PoolCard, channels_from, choose_pool_channels
from shoal.plan.text import listed
from shoal.plan.wire import link_from
from shoal.rendezvous.listener import listen_for_hosts, port_range
from shoal.rendezvous.membership import Membership
from shoal.rendezvous.record import find_host_id
from shoal.rendezvous.roll import Roll
from shoal.rendezvous.roster import Entry, check_addresses, decode
from shoal.schedule import Recv, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shoal import engine
    from shoal.group.pool.control import Bell

# Dropping a silent member only costs mending the view's calls, so it is dropped soon. A process
# whose host confirms what it is sent has 3 s, because it may only wait for a core.
DEAD_S: Final = 1.2
MEETING_S: Final = 3.0
"""Seconds for a view to form. A server that is lost meanwhile delays the others this long."""

_LOOK_S: Final = 0.05
_MOST_NAMED: Final = 4
_WORD_BYTES: Final = 1024  # the shortest possible segment
_CARD: Final = struct.Struct("<4sd3H")
_KIND: Final = b"pool"
# Bytes per microsecond: 8 kbit/s and 8 Pbit/s. Rates outside of this range are clamped: their sums
# and quotients could be infinite or zero, and give no shares.
_RATES: Final = (1e-3, 1e9)


class Unmet(ShoalError):  # noqa: N818 - names the fault
    """Some ranks of a view cannot reach each other; `servers`: places that this rank missed."""

    def __init__(self, servers: frozenset[int], message: str) -> None:
        super().__init__(servers, message)
        self.servers = servers

    def __str__(self) -> str:
        return str(self.args[1])


class Place:
    """A rank's listeners for a view, opened before the view forms; `entry` is for the roster.

    `who` is for error texts. `towards`, an address of another rank, decides the interface.
    UsageError if no port of `SHOAL_PORT_RANGE` is free or a variable is wrong; OSError if no
    descriptor is left.
    """

    def __init__(self, who: str, towards: str | None, environ: Mapping[str, str]) -> None:
        ports = port_range(environ)
        self._listeners, endpoints = listen_for_hosts(who, towards, ports, environ)
        card = PoolCard(
            rate=_own_rate(endpoints[0].interface, environ),
            channels=channels_from(environ),
            n_paths=len(endpoints),
            n_cores=min(len(os.sched_getaffinity(0)), 0xFFFF),
        )
        digest = _CARD.pack(_KIND, *card) + os.urandom(N_NONCE_BYTES)
        host_id, label = find_host_id(environ), socket.gethostname()[:64]
        self.entry = Entry(host_id, label, digest, tuple(endpoints))

    def take(self) -> list[int]:
        """Hand over the listening sockets; the caller closes them."""
        taken, self._listeners = self._listeners, []
        return [listener.detach() for listener in taken]

    def close(self) -> None:
        """Close the sockets that were not taken; idempotent."""
        for listener in self._listeners:
            listener.close()


class PoolGroup(Group):
    """The group of one view: the workers with their own ranks, then the servers.

    `rates` has each link's bytes per microsecond, 0 if its host reports none. Large calls are cut
    over `n_channels`.
    """

    rates: tuple[float, ...] = ()
    n_channels: int = 1

    def notify(self, bell: Bell) -> None:
        """Ring the bell when the group ends."""
        self._native.notify(bell.fd)

    @property
    def has_ended(self) -> bool:
        return self._native.error()[0] is not Fault.NONE

    @property
    def names(self) -> list[str]:
        return [str(self._context.names[member]) for member in self._members]

    def serve(self, plan: engine.Plan) -> None:
        """Make the native core serve all calls of a kind; ValueError if a server cannot do so."""
        self._check_open().serve(plan)

    def first_word(self, server: int, n_workers: int) -> Work:
        """Start a server's first word, a message to every worker over every channel."""
        lengths = [_WORD_BYTES * self.n_channels]
        is_own = server == self.rank
        steps = [Send(to, 0) for to in range(n_workers)] if is_own else [Recv(server, 0)]
        plan = Plan.make(
            program=lower(steps, self.size),
            layouts=[([0], lengths), ([], []), ([], []), ([], [])],
            dtype=DType.UINT8,
            op=Op.SUM,
            divisor=1,
            codec=Codec.IDENTITY.number,
            descriptor=f"the first word of rank {server}",
            agreement=f"the first word of rank {server}",
            by_pair=False,
            n_lanes=self.n_channels,
            segment_bytes=_WORD_BYTES,
        )
        word = bytearray(*lengths)
        address = address_of(memoryview(word))
        key = first_word_key(server)
        held = self._hold(word)
        call = self._native.post_in_place(plan, key, address, FOR_EVER_S, True, 0)
        self._context.keep(call, held)
        return Work(self, call, held)

    def post(self, plan: engine.Plan, key: int, address: int, subject: int) -> engine.Call | None:
        """Start the servers' part of a call, without a deadline; None if the group has ended."""
        if self.has_ended:
            return None
        return self._native.post_in_place(plan, key, address, FOR_EVER_S, True, subject)


def first_word_key(server: int) -> int:
    """Return the key of a server's first word; no call along a rail uses it (`rails.Stage`)."""
    return FIRST_NAMED_KEY | server << 2 | 3


def read_roster(body: bytes, size: int) -> list[Entry]:
    """Return the entries of all ranks of a view; ValueError for anything else."""
    found = decode(body, frozenset(range(size)), 1)
    return [found[rank] for rank in range(size)]


def enter(
    roster: Sequence[Entry],
    view: int,
    rank: int,
    n_workers: int,
    key: bytes,
    listeners: Sequence[int],
    is_wanted: Callable[[], bool] = lambda: True,
) -> PoolGroup:
    """Connect to the other ranks of a view; return its group once every worker is reached.

    Owns `listeners`. Calls `is_wanted` 20 times a second, and ends the view on all ranks once it
    returns False. Raises ShoalError, with nothing left open.
    """
    until, size = time.monotonic() + MEETING_S, len(roster)
    nonces = tuple(entry.digest[_CARD.size :] for entry in roster)
    roll = Roll(nonces, tuple(range(size)), (), (), key)
    with Membership(roll, dict(enumerate(roster)), rank, key, tuple(listeners)) as membership:
        check_addresses(dict(enumerate(roster)))
        cards = [card_of(entry.digest) for entry in roster]
        n_channels = choose_pool_channels(cards, n_workers)
        context = connect(membership, n_channels, DEAD_S)
    try:
        planner = Planner(default_cluster(range(size)))
        group = PoolGroup(context, list(range(size)), f"pool view {view}", FOR_EVER_S, planner)
        group.owns_context = True
        group.rates, group.n_channels = tuple(card.rate for card in cards), n_channels
        context.pace(group.rates[rank])
        _greet(group, n_workers, until, is_wanted)
    except PeerLost as error:  # the peer may live, and be cut off only from some workers
        context.close()
        lost = frozenset([error.rank - n_workers] if error.rank >= n_workers else [])
        raise Unmet(lost, str(error)) from error
    except BaseException:
        context.close()
        raise
    return group


def _greet(group: PoolGroup, n_workers: int, until: float, is_wanted: Callable[[], bool]) -> None:
    """Have each server send a first word to each worker: the higher rank is the one that dials."""
    servers = range(n_workers, group.size) if group.rank < n_workers else [group.rank]
    words = {server: group.first_word(server, n_workers) for server in servers}
    for word in words.values():  # NOT with deadlines of calls: each that passes writes a file
        if not is_in_time(word, until, is_wanted):
            break
    if not is_wanted():
        group.abort("the view is given up")  # else the others would wait until the deadline
        raise Closed(f"{group}: the view is given up")
    unmet = [server for server, word in words.items() if not word.done()]
    if unmet:
        who = listed([f"rank {server}" for server in unmet], _MOST_NAMED)
        if unmet == [group.rank]:
            who = "all workers"
        places = frozenset(server - n_workers for server in unmet if server != group.rank)
        raise Unmet(places, f"rank {group.rank} has not reached {who} in {MEETING_S:g} s")
    for word in words.values():
        word.wait()


def is_in_time(work: Work, until: float, is_wanted: Callable[[], bool]) -> bool:
    """Return True if the work ends by `until`; stop waiting once `is_wanted` returns False."""
    while not work.drive(max(0.001, min(until - time.monotonic(), _LOOK_S))):
        if time.monotonic() >= until or not is_wanted():
            return work.done()
    return True


def _own_rate(interface: str, environ: Mapping[str, str]) -> float:
    link = link_from(environ)
    if link is not None:
        return 1 / link.us_per_byte if link.us_per_byte else 0.0
    try:
        mbit = reported_mbit(interface)
    except OSError:
        return 0.0
    return (mbit or 0) / 8


def card_of(digest: bytes) -> PoolCard:
    """Return the card in an entry's digest; ShoalError if it has no card."""
    try:
        kind, rate, channels, n_paths, n_cores = _CARD.unpack_from(digest)
    except struct.error:
        kind, rate, channels, n_paths, n_cores = b"", 0.0, 0, 0, 0
    is_whole = kind == _KIND and len(digest) == _CARD.size + N_NONCE_BYTES
    if not is_whole or not math.isfinite(rate) or rate < 0 or not n_paths or not n_cores:
        raise ShoalError(
            "a rank of this view sent no server-pool record: install the same shoal version on "
            "every machine"
        )
    least, most = _RATES
    rate = min(max(rate, least), most) if rate else 0.0
    return PoolCard(rate, channels, n_paths, n_cores)
