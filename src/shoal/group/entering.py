"""Lets a newcomer enter a running group: it announces itself at a member's door, and waits."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from shoal.codec import parse_wire
from shoal.errors import Closed, PeerLost, ShoalError, TimedOut, UsageError
from shoal.group.agreeing import digest_of
from shoal.group.form import Growing, form
from shoal.group.growing import FORM_S, SILENT_S, take_place
from shoal.group.members import CONFIRM_S
from shoal.plan import Settings
from shoal.rendezvous import job_key
from shoal.rendezvous.announcing import (
    N_ID_BYTES,
    Announcement,
    announcement_key,
    answer_key,
    decode_answer,
    own_version,
)
from shoal.rendezvous.attempt import is_of_another_rank
from shoal.rendezvous.door import parse_address, visit
from shoal.rendezvous.join import Warnings
from shoal.rendezvous.store.client import TcpStoreClient

if TYPE_CHECKING:
    from shoal.group.group import Group

_LOG: Final = logging.getLogger("shoal")
_CONNECT_S: Final = 1.0  # for one address, before trying the next one
_VOTE_S: Final = 30.0  # until the members have voted; longer than members._VOTE_S
_WARN_S: Final = 10.0  # until the first warning that no member has let it in; doubles


def enter(
    addresses: Sequence[str], *, timeout_s: float, name: str = "world", wire: str | None = None
) -> Group:
    """Wait to be let in by a running group, and return the group with this process in it.

    Args:
        addresses: the members' doors (`group.address`), tried in turn.
        timeout_s: seconds until it must be let in, and the default timeout of calls.
        name: of the group that the members formed.
        wire: as the members gave it.

    Raises (nothing is left open):
        UsageError: the group refuses this process: its version, key, name or a setting differs.
        TimedOut: no member has let it in; names the addresses and the last error.
        ShoalError: as for `form`.
    """
    settings = Settings.read()
    if wire is not None:
        settings = settings._replace(wire=parse_wire(wire))
    own = Announcement(own_version(), name, socket.gethostname(), digest_of(settings))
    for address in addresses:
        parse_address(address)
    deadline = time.monotonic() + timeout_s
    warnings = Warnings(_WARN_S, _LOG)

    def warn_if_due(why: str) -> None:
        waits = f"has waited {warnings.elapsed_s:.1f} s to be let into the group {name!r}"
        warnings.warn_if_due(lambda _after_s: f"this process {waits}: {why}")

    why: ShoalError | None = None
    for address in itertools.cycle(addresses):
        if time.monotonic() >= deadline:
            break
        try:
            group = _enter_at(address, own, deadline, wire, warn_if_due)
        except (PeerLost, TimedOut, Closed, UsageError) as error:
            if not is_of_another_rank(error):
                raise
            why = error  # a member or another newcomer has failed: announce this one again
            warn_if_due(_without_head(why))
        else:
            group.timeout_s = timeout_s
            group.begin_again()
            return group
    raise TimedOut(
        f"no member of the group {name!r} let this process in within {timeout_s:g} s, at "
        f"{', '.join(addresses)}: {_without_head(why)}"
    ) from why


def _without_head(error: ShoalError | None) -> str:
    return str(error).removeprefix("timed out: ")


_Warn = Callable[[str], None]


def _enter_at(
    address: str, own: Announcement, deadline: float, wire: str | None, warn_if_due: _Warn
) -> Group:
    """Ask for entry at one member's door."""
    with _announced(address, own, deadline, warn_if_due) as (at, uuid, number):
        with visit(at, uuid, FORM_S, silent_s=SILENT_S) as store:
            rank, size = take_place(store, number)
            group = form(
                *(store, rank, size), timeout_s=FORM_S, name=own.group, wire=wire, growing=Growing()
            )
        try:
            # The members call it once all of them have formed the group; otherwise they close it.
            group.barrier(timeout_s=_VOTE_S + CONFIRM_S)
        except BaseException:
            group.close()
            raise
        return group


@contextlib.contextmanager
def _announced(
    address: str, own: Announcement, deadline: float, warn_if_due: _Warn
) -> Iterator[tuple[str, str, str]]:
    """Wait at this door; yield the address and name of a meeting, and this newcomer's id."""
    number = os.urandom(N_ID_BYTES).hex()
    left_s = max(0.001, deadline - time.monotonic())
    host, port = parse_address(address)
    try:
        client = TcpStoreClient(host, port, timeout_s=min(_CONNECT_S, left_s), key=job_key())
    except TimedOut as late:
        raise TimedOut(
            f"no shoal process answered at {address} ({late.__cause__}): give the `group.address` "
            "of a living member"
        ) from late
    with contextlib.closing(client):
        client.set(announcement_key(number), own.encode())
        _LOG.info("this process waits at %s to be let into the group %r", address, own.group)
        try:
            answer = decode_answer(_await_answer(client, number, address, deadline, warn_if_due))
        except ValueError as error:
            raise UsageError(f"{address} runs another version of shoal") from error
        if answer.refusal:
            raise UsageError(f"the group at {address} refused this process: {answer.refusal}")
        yield answer.address, answer.uuid, number


def _await_answer(
    client: TcpStoreClient, number: str, address: str, deadline: float, warn_if_due: _Warn
) -> bytes:
    """Wait in short calls: a stopped member answers no call, and another member may."""
    while True:
        left_s = max(0.001, deadline - time.monotonic())
        try:
            return client.get(answer_key(number), min(left_s, SILENT_S))
        except TimedOut as late:
            if left_s <= SILENT_S:
                raise TimedOut(
                    f"the members did not call grow while it waited at {address}"
                ) from late
            warn_if_due(f"the members at {address} have not called grow")
