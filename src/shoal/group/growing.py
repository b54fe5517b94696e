"""The steps by which a group takes in newcomers; `members.py` runs them.

Members list the newcomers that wait at their doors, and meet them at the door of one member. There
all of them form the new group like any group, while the old one stands.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.group.agreeing import difference
from shoal.group.form import Growing, form
from shoal.group.view import MOST_NUMBER
from shoal.group.work import FOR_EVER_S
from shoal.limits import DEAD_S
from shoal.rendezvous.announcing import GONE, N_ID_BYTES, Announcement, here_key, own_version
from shoal.rendezvous.door import leave, parse_address, visit
from shoal.rendezvous.packing import Unpacker, number, text_field
from shoal.rendezvous.record import MAX_SIZE
from shoal.rendezvous.store.server import MOST_CLIENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shoal.group.group import Group
    from shoal.rendezvous import Store
    from shoal.rendezvous.door import Door, Newcomer
    from shoal.rendezvous.store.client import TcpStoreClient

FORM_S: Final = 15.0
"""Seconds for a meeting with newcomers.

A process that ends or fails ends the meeting at once; a stopped one ends it after `SILENT_S`.
"""

SILENT_S: Final = float(DEAD_S)
"""Seconds without a request to the door, or an answer from it, until a process counts as lost."""

_ANSWER_S: Final = 2.0  # for invited newcomers to connect to the meeting
_GRACE_S: Final = 3.0
_ASK_EVERY_S: Final = 1.0  # while a process waits: the door counts a silent process as lost
_N_COUNT: Final = 4
_N_NUMBER: Final = 8
_N_ADDRESS: Final = 64
_N_UUID: Final = 16
_MOST_NEWCOMERS: Final = 1 << 10  # of one rank in one `grow`
_SIZE: Final = "size"
_WATCH_TAG: Final = 0x5_40A1_6120


class Plan(NamedTuple):
    """The members' agreement on one growing.

    Args:
        number: a view number for the vote that no member has asked for yet.
        host: the lowest rank with newcomers; all meet at its door, at `address`.
        uuid: the name of the meeting.
        ids: of all newcomers, in the order of their ranks.
        own: the ids of the newcomers at this rank's door.
    """

    number: int
    host: int
    address: str
    uuid: str
    ids: tuple[str, ...]
    own: tuple[str, ...]


def agree(
    group: Group, asked: int, address: str, waiting: Sequence[Newcomer], timeout_s: float
) -> Plan | None:
    """Agree on a plan with all members; None if no newcomer waits. Collective.

    Args:
        asked: the highest view number that this rank has asked for.
        address: of this rank's door; empty if it has no door.

    Raises:
        PeerLost, TimedOut, Closed: as every call.
        UsageError: a rank sent damaged numbers; or members and newcomers need too many connections.
    """
    own = tuple(newcomer.number for newcomer in waiting[:_MOST_NEWCOMERS])
    gathered = bytearray((_N_COUNT + _N_NUMBER) * group.size)
    first = bytearray(number(len(own), _N_COUNT) + number(asked, _N_NUMBER))
    group.all_gather(gathered, first, timeout_s=timeout_s)
    firsts: list[tuple[int, int]] = []
    read = Unpacker(bytes(gathered))
    for rank in range(group.size):
        with _reading(rank):
            n_newcomers = read.number(_N_COUNT, 0, _MOST_NEWCOMERS)
            firsts.append((n_newcomers, read.number(_N_NUMBER, 0, MOST_NUMBER // 2)))
    n_ids = [n for n, _ in firsts]
    if not any(n_ids):
        return None
    if (n_needed := group.size + 2 * sum(n_ids)) > MOST_CLIENTS:
        raise UsageError(
            f"{group} cannot let in {sum(n_ids)} newcomers: to the door where all meet, each "
            f"member needs one connection and each newcomer two, {n_needed} in all; it takes "
            f"{MOST_CLIENTS}"
        )
    head = text_field(address).ljust(_N_ADDRESS, b"\0") + os.urandom(_N_UUID)
    notes = [bytearray(_N_ADDRESS + _N_UUID + n * N_ID_BYTES) for n in n_ids]
    ids = b"".join(bytes.fromhex(one) for one in own)
    group.all_gather(notes, bytearray(head + ids), timeout_s=timeout_s)
    host = next(rank for rank, n in enumerate(n_ids) if n)
    with _reading(host):
        at = Unpacker(bytes(notes[host])).text()
        parse_address(at)
    tails = (note[_N_ADDRESS + _N_UUID :].hex() for note in notes)
    found = [
        tail[first : first + 2 * N_ID_BYTES]
        for tail in tails
        for first in range(0, len(tail), 2 * N_ID_BYTES)
    ]
    uuid = notes[host][_N_ADDRESS : _N_ADDRESS + _N_UUID].hex()
    highest = max(asked for _, asked in firsts)
    return Plan(highest + 1, host, at, uuid, tuple(found), own)


@contextlib.contextmanager
def _reading(rank: int) -> Iterator[None]:
    """Raise UsageError, with the rank's number, if the block finds its list damaged."""
    try:
        yield
    except (ValueError, UsageError) as error:
        raise UsageError(
            f"rank {rank} sent a damaged list of newcomers ({error}): install the same version of "
            "shoal on every machine"
        ) from error


def form_new(group: Group, name: str, door: Door | None, plan: Plan) -> Group:
    """Form the group of all members and of the newcomers that connect; does not begin it.

    Args:
        name: of the new group.
        door: this rank's door, if it has one.

    Raises:
        TimedOut: no newcomer connected, or not all joined.
        PeerLost: a member or a newcomer ended meanwhile.
        UsageError, ShoalError: as for `form`.
    """
    deadline = time.monotonic() + FORM_S
    if group.rank == plan.host and door is not None:
        door.open(plan.uuid, SILENT_S)
    if door is not None:
        for one in plan.own:
            door.invite(one, plan.address, plan.uuid)
    ends = functools.partial(_end_with, group)
    try:
        visiting = visit(plan.address, plan.uuid, FORM_S, silent_s=SILENT_S, on_connect=ends)
        with visiting as store:
            if group.rank == plan.host:
                _place(store, group.size, plan.ids)
            largest = group.size + len(plan.ids)
            size = _number_in(_await_size(store), group.size, largest)
            if size == group.size:
                raise TimedOut("no newcomer connected to the meeting")
            new = form(
                *(store, group.rank, size),
                timeout_s=max(0.001, deadline - time.monotonic()),
                name=name,
                wire=group.wire.name,
                growing=Growing(group.monitor),
            )
    except ShoalError as error:
        ended = group.ended()
        if ended is not None:
            raise ended from error
        raise
    new.timeout_s = group.timeout_s
    return new


def _place(store: Store, n_members: int, ids: tuple[str, ...]) -> None:
    """Give ranks to the newcomers that have connected."""
    until = time.monotonic() + _ANSWER_S
    here = []
    for one in ids:
        with contextlib.suppress(TimedOut):
            if store.get(here_key(one), max(0.0, until - time.monotonic())) != GONE:
                here.append(one)
    size = n_members + len(here)
    for rank, one in enumerate(here, n_members):
        store.set(_place_key(one), number(rank, _N_COUNT))
    store.set(_SIZE, number(size, _N_COUNT))  # last: a newcomer without a place is too late then


def _end_with(group: Group, close: Callable[[], None]) -> None:
    """End a visit when the old group ends: a member may be lost before it connects there."""
    if group.size == 1:
        return
    # No rank sends this message, so the receive ends with the group.
    watch = group.recv(bytearray(1), None, _WATCH_TAG, timeout_s=FOR_EVER_S, async_op=True)
    assert watch is not None
    with contextlib.suppress(ShoalError):  # without a thread the visit ends at its deadline
        watch.on_done(lambda _work: close())


def _await_size(store: Store) -> bytes:
    until = time.monotonic() + _ANSWER_S + _GRACE_S
    while True:
        left_s = until - time.monotonic()
        try:
            return store.get(_SIZE, min(_ASK_EVERY_S, max(0.0, left_s)))
        except TimedOut:
            if left_s <= _ASK_EVERY_S:
                raise


def _number_in(value: bytes, low: int, high: int) -> int:
    try:
        return Unpacker(value).number(_N_COUNT, low, high)
    except ValueError as error:
        raise UsageError(
            f"the member that serves the meeting wrote {value!r}, and a number from {low} to "
            f"{high} was expected: install the same version of shoal on every machine"
        ) from error


def take_place(store: TcpStoreClient, own: str) -> tuple[int, int]:
    """Join a meeting as the newcomer with this id; return its rank and the size of the group.

    Raises:
        TimedOut: this process connected too late.
        PeerLost: the member that serves the meeting has ended, or has stopped.
        UsageError: that member's answer is damaged.
    """
    store.set(here_key(own), b"")
    size = _number_in(_await_size(store), 1, MAX_SIZE)
    place = store.try_get(_place_key(own))
    if place is None:
        leave(store)
        raise TimedOut("this process connected to the meeting too late")
    return _number_in(place, 1, size - 1), size


def _place_key(one: str) -> str:
    return f"place/{one}"


def refusal_of(group: str, digest: bytes, asking: Announcement) -> str:
    """Return why a group refuses a newcomer; empty: it does not.

    Args:
        group: the group's name.
        digest: of the settings of its members.
    """
    if asking.shoal != own_version():
        return (
            f"it runs shoal {asking.shoal}, and the group runs {own_version()}: install the same "
            "version on every machine"
        )
    if asking.group != group:
        return f"it asks for the group {asking.group!r}, and the group is {group!r}"
    variable = difference(digest, asking.digest)
    return variable and f"its {variable} differs from the group's: set it to the same on all ranks"
