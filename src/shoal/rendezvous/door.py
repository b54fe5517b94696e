"""A process's door: newcomers announce themselves there, and members of new groups meet there.

A door is a store (store/server.py) that the process serves at its own address. It costs a thread
that sleeps, and a few descriptors. A meeting is a part of the store with its own prefix, in which
one group forms (`join`). The meeting ends for all visitors if one of them loses its connection or
stops sending requests, so that the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.rendezvous.announcing import GONE, NEWCOMER, Answer, answer_key, here_key, judge
from shoal.rendezvous.attempt import End, end_key, find_record_key
from shoal.rendezvous.interface import Advertised, choose_address, is_numeric
from shoal.rendezvous.key import job_key
from shoal.rendezvous.listener import is_out_of_descriptors, listen_at, port_range
from shoal.rendezvous.record import decode
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import Serving, StoreServer
from shoal.rendezvous.store.wire import VALUE

if TYPE_CHECKING:
    import socket

    from shoal.engine import Peer
    from shoal.rendezvous.announcing import Check

# The most meetings whose values are kept. Old ones serve ranks that are late to leave.
_MOST_MEETINGS: Final = 4
_OPEN: Final = "open"
_LEFT: Final = "left"
_N_ID_BYTES: Final = 16


class Newcomer(NamedTuple):
    """A process that waits at a door, with its id there and its host's name."""

    number: str
    host_label: str


class _Visitor(NamedTuple):
    """A process at a meeting.

    Args:
        attempt, rank, host_label: by its record; 0, -1 and "" before it has published one.
        asked_at: the time of its last request.
    """

    attempt: int
    rank: int
    host_label: str
    asked_at: float


class Door(StoreServer):
    """This process's door. It closes when it is not referenced any more.

    Without a job key it listens on 127.0.0.1, so it serves only processes of this host.

    Args:
        environ: read for the job key, `SHOAL_SOCKET_IFNAME`, `SHOAL_PORT_RANGE` and `MASTER_ADDR`.

    Raises:
        UsageError: it cannot listen there, or no descriptor is left; names what to set.
        ShoalError: no thread can be started.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        key = job_key(environ)
        try:
            chosen = (
                Advertised("127.0.0.1", "lo", "there is no job key")
                if key is None
                else choose_address(environ.get("MASTER_ADDR"), environ)
            )
            ports = port_range(environ)
            listener, endpoint = listen_at("this process", chosen, ports, environ)
            self._doorman = _Doorman(listener, key)
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise
            raise UsageError("no file descriptor is left to listen: raise `ulimit -n`") from error
        self.address = str(endpoint)
        super().__init__(self._doorman)
        weakref.finalize(self, self._doorman.submit, None).atexit = False

    def open(self, uuid: str, silent_s: float = float("inf")) -> None:
        """Open a meeting with this name, which no earlier meeting here had.

        Args:
            silent_s: the meeting ends if a visitor sends no request for this long.
        """
        meeting = _meeting_id(uuid)
        self._doorman.submit(lambda: self._doorman.open(meeting, silent_s))

    def take_newcomers(self, check: Check) -> None:
        """Let newcomers wait here from now on, unless `check` refuses them."""
        self._doorman.check = check

    @property
    def newcomers(self) -> tuple[Newcomer, ...]:
        """The newcomers that wait here, in order of arrival."""
        return self._doorman.newcomers

    def invite(self, number: str, address: str, uuid: str) -> None:
        """Send the newcomer with this id to a meeting; it stops waiting here."""
        answer = Answer(address=address, uuid=uuid)
        self._doorman.submit(lambda: self._doorman.invite(number, answer))


class _Doorman(Serving):
    key_differs_text = "a process that holds another job key tried to reach this one: refused"

    def __init__(self, listener: socket.socket, key: bytes | None) -> None:
        super().__init__([listener], key)
        # By open meeting, the oldest first.
        self._meetings: dict[str, dict[Peer, _Visitor]] = {}
        self._silent_s: dict[str, float] = {}
        self._silent_at = float("inf")  # the earliest time at which a visitor may be too silent
        self._ended: dict[str, End] = {}
        self._ids: dict[Peer, str] = {}  # of all callers that have announced themselves
        self._waiting_newcomers: dict[str, Newcomer] = {}  # by id
        self._invited: dict[str, str] = {}  # by id: the meeting; until the connection ends
        self.newcomers: tuple[Newcomer, ...] = ()  # a copy for other threads
        self.check: Check = lambda _: "the process there is in no group that takes newcomers"

    # Meetings.

    def open(self, meeting: str, silent_s: float) -> None:
        """Open a meeting, and drop the oldest if there are too many."""
        self._meetings.setdefault(meeting, {})
        self._silent_s[meeting] = silent_s
        self._put(f"{meeting}/{_OPEN}", b"")
        while len(self._meetings) > _MOST_MEETINGS:
            oldest = next(iter(self._meetings))
            del self._meetings[oldest], self._silent_s[oldest]
            self._ended.pop(oldest, None)
            for key in [key for key in self._values if key.startswith(f"{oldest}/")]:
                self._drop(key)

    def _lose(self, meeting: str, peer: Peer, why: str) -> None:
        """End the current and later attempts of a meeting that has lost a visitor."""
        visitors = self._meetings[meeting]
        lost = visitors.pop(peer, None)
        if lost is None:
            return
        end = End.lost(lost.rank, lost.host_label, why)
        end = self._ended.setdefault(meeting, end)
        for attempt in {lost.attempt, *(visitor.attempt for visitor in visitors.values())}:
            self._end_attempt(meeting, attempt, end)
        # Visitors without a record must NOT wait on for a value: they do not look for an end yet.
        early = [one for one, visitor in visitors.items() if visitor.rank < 0]
        for other in [one for one in early if self._clients[one] is not None]:
            del visitors[other]
            other.close()
            self.lost(other)

    def _end_attempt(self, meeting: str, attempt: int, end: End) -> None:
        key = f"{meeting}/{end_key(attempt)}"
        if key not in self._values:
            self._put(key, end.encode())

    def _note_visitor(self, peer: Peer, key: str) -> None:
        meeting, now = key.partition("/")[0], time.monotonic()
        visitors = self._meetings.get(meeting)
        if visitors is not None:
            before = visitors.get(peer, _Visitor(0, -1, "", 0.0))
            visitors[peer] = before._replace(asked_at=now)
            self._silent_at = min(self._silent_at, now + self._silent_s[meeting])

    # Newcomers.

    def answer(self, number: str, answer: Answer) -> None:
        """Answer the newcomer with this id, if it still waits."""
        if self._waiting_newcomers.pop(number, None) is not None:
            self._put(answer_key(number), answer.encode())
            self.newcomers = tuple(self._waiting_newcomers.values())

    def invite(self, number: str, answer: Answer) -> None:
        """Send a newcomer to a meeting; if it is lost before it arrives, record that there."""
        self._invited[number] = _meeting_id(answer.uuid)
        if number in self._waiting_newcomers:
            self.answer(number, answer)
        else:
            self._note_loss(number)

    def _note_loss(self, number: str) -> None:
        meeting = self._invited.pop(number, "")
        if meeting in self._meetings:  # the meeting is at this door
            self._put(f"{meeting}/{here_key(number)}", GONE)

    def _announce(self, peer: Peer, number: str, value: bytes) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", number) or number in self._ids.values():
            raise ValueError("the id is malformed or in use")
        self._forget(peer)
        self._ids[peer] = number
        host_label, refusal = judge(value, self.check)
        self._waiting_newcomers[number] = Newcomer(number, host_label)
        self.newcomers = tuple(self._waiting_newcomers.values())
        if refusal:
            self.answer(number, Answer(refusal=refusal))
        self._reply(peer, VALUE)

    def _forget(self, peer: Peer) -> None:
        number = self._ids.pop(peer, "")
        self._note_loss(number)
        self._waiting_newcomers.pop(number, None)
        self.newcomers = tuple(self._waiting_newcomers.values())
        self._drop(answer_key(number))

    # The store's part.

    def _set(self, peer: Peer, key: str, value: bytes) -> None:
        meeting, _, rest = key.partition("/")
        if meeting == NEWCOMER:
            self._announce(peer, rest, value)
            return
        if meeting not in self._meetings:
            raise ValueError("there is no such meeting")
        self._note_visitor(peer, key)
        visitors = self._meetings[meeting]
        found, record = find_record_key(rest), decode(value)
        if rest == _LEFT:
            del visitors[peer]
        elif found is not None and record is not None:
            attempt, rank = found
            asked_at = visitors[peer].asked_at
            visitors[peer] = _Visitor(attempt, rank, record.host_label, asked_at)
            if meeting in self._ended:
                self._end_attempt(meeting, attempt, self._ended[meeting])
        super()._set(peer, key, value)

    def _get(self, peer: Peer, key: str, wait_ms: int) -> None:
        self._note_visitor(peer, key)
        meeting = key.partition("/")[0]
        is_early = meeting in self._ended and self._meetings[meeting][peer].rank < 0
        if is_early and wait_ms and key not in self._values:
            raise ValueError("the meeting has ended")  # `_lose` closes only waiting visitors
        super()._get(peer, key, wait_ms)

    def _expire(self, now: float) -> float:
        """As `Serving._expire`; also end the meetings of silent visitors."""
        if now >= self._silent_at:
            self._silent_at = self._lose_silent(now)
        return min(super()._expire(now), self._silent_at)

    def _lose_silent(self, now: float) -> float:
        """End the meetings of silent visitors; return when the next visitor may be too silent."""
        until = float("inf")
        for meeting, visitors in self._meetings.items():
            silent_s = self._silent_s[meeting]
            for peer, visitor in list(visitors.items()):
                if now < visitor.asked_at + silent_s:
                    until = min(until, visitor.asked_at + silent_s)
                else:
                    self._lose(meeting, peer, f"sent no request for {silent_s:g} s")
        return until

    def lost(self, peer: Peer, error: int = 0, why: str = "") -> None:
        """Drop a client, and end the meeting that it was in."""
        super().lost(peer, error, why)
        self._forget(peer)
        for meeting, visitors in self._meetings.items():
            if peer in visitors:
                self._lose(meeting, peer, why or "closed its connection")


@contextlib.contextmanager
def visit(
    address: str,
    uuid: str,
    timeout_s: float,
    environ: Mapping[str, str] = os.environ,
    *,
    silent_s: float | None = None,
    on_connect: Callable[[Callable[[], None]], object] = lambda _close: None,
) -> Iterator[TcpStoreClient]:
    """Connect to the door at this address, and wait until a meeting of this name is open there.

    Yields the meeting's part of the door's store. An error in the `with` block ends the meeting for
    the others, unless this process has left it.

    Args:
        silent_s: seconds without an answer until the door counts as lost; None: `timeout_s`.
        on_connect: called with a function that ends the visit from any thread: calls of the
            meeting then raise `PeerLost`.

    Raises:
        TimedOut: no door answers at this address, or the meeting does not open.
        UsageError: the door holds another job key, or `address` is not host:port.
        PeerLost: the process of this door has ended, or has stopped.
    """
    deadline = time.monotonic() + timeout_s
    host, port = parse_address(address)
    most_s = timeout_s if silent_s is None else min(timeout_s, silent_s)
    try:
        client = TcpStoreClient(host, port, timeout_s=most_s, key=job_key(environ), is_served=True)
    except TimedOut as late:
        raise TimedOut(
            f"the process at {address} did not answer within {most_s:g} s ({late.__cause__}): is "
            "it stopped, or its host cut off?"
        ) from late
    with contextlib.closing(client):
        on_connect(client.close)
        client.prefix, client.outlives_join = f"{_meeting_id(uuid)}/", silent_s is not None
        try:
            client.get(_OPEN, max(0.0, deadline - time.monotonic()))
        except TimedOut as late:
            raise TimedOut(
                f"the process at {address} did not begin the meeting {uuid!r} within "
                f"{timeout_s:g} s"
            ) from late
        yield client
        leave(client)


def leave(meeting: TcpStoreClient) -> None:
    """Leave without ending the meeting, once the others do not need this process any more."""
    with contextlib.suppress(ShoalError):  # the door has closed
        meeting.set(_LEFT, b"")


def parse_address(address: str) -> tuple[str, int]:
    """Return the host and port in `host:port` or `[fd00::2]:port`; UsageError for other text."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535
    is_host = is_numeric(host.partition("%")[0]) if ":" in host else bool(host)
    if not is_host or not is_port:
        raise UsageError(f"{address!r} is not an address; expected host:port, like 10.0.0.2:29600")
    return host, int(port)


def _meeting_id(uuid: str) -> str:
    return hashlib.blake2b(uuid.encode(), digest_size=_N_ID_BYTES).hexdigest()
