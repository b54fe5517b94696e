"""The lowest worker's connections to the servers, by which it notices lost and returned servers."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from shoal.engine import Endpoint, Peer, Progress
from shoal.errors import ShoalError
from shoal.group.pool.control import Bell
from shoal.group.pool.protocol import (
    FROM_SERVERS,
    MOST_ROSTER_BYTES,
    Ask,
    Leaving,
    Meet,
    Message,
    Reserve,
    Reserved,
    decode,
    expect,
    hello_of,
    send,
    server_key,
    why_not_reached,
)
from shoal.rendezvous.interface import is_numeric, resolve
from shoal.rendezvous.roster import decode as decode_entries
from shoal.threads import start

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address
    from shoal.rendezvous.roster import Entry

# A refused connect costs microseconds; a restarted server is found this soon.
_RETRY_S: Final = 0.2
_RETRY_REFUSED_S: Final = 2.0  # after a server has answered with a refusal
_CONNECT_S: Final = 2.0
# The interval of pings to a server's process, and the time until a server that does not answer is
# given up. With a shorter time a server on a busy machine is given up. A view notices sooner that
# a host is gone.
_PING_S: Final = 0.5
_PONG_S: Final = 3.0
_CHECK_S: Final = 0.9  # the same for a server that a view has lost; less than its least absence
_LOOKUP_S: Final = 2.0  # from one lookup of a name to the next
_LAST_S: Final = 0.5  # for the thread to end
_N_AT_ONCE: Final = 64  # connections that the endpoint reads from in a step


class Watch:
    """Watches the servers that `SHOAL_SERVERS` names or that have registered.

    Calls `on_change` on its thread, with the lock held, when a server appears or is lost. Threads:
    one, a daemon, until `close`; the methods may be called from any.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        job_key: bytes,
        reserve: Reserve,
        on_change: Callable[[], None],
    ) -> None:
        self.key, self.reserve, self.on_change = job_key, reserve, on_change
        self._lock = threading.RLock()  # `on_change` may call methods of this object
        self._bell = Bell()
        self._bell.open()
        self._is_closing = False
        self.endpoint = Endpoint(self, dial_s=_CONNECT_S, most_queued=2 * MOST_ROSTER_BYTES)
        self._servers = [_Server(address, self, self._bell) for address in addresses]
        self._thread = start("shoal servers", self._run)

    def add(self, address: Address) -> None:
        """Watch one more server."""
        with self._lock:
            self._servers.append(_Server(address, self, self._bell))
        self._bell.ring()

    def ready(self) -> dict[Address, bytes]:
        """Return the identities of the servers that can serve, in the order of `SHOAL_SERVERS`."""
        with self._lock:
            return {one.address: one.identity for one in self._servers if one.identity}

    def trouble(self) -> dict[Address, str]:
        """Return why the other servers cannot serve."""
        with self._lock:
            return {one.address: one.trouble for one in self._servers if one.trouble}

    def places(self) -> dict[Address, Entry]:
        """Return the entries for the next roster that servers have sent."""
        with self._lock:
            return {one.address: one.entry for one in self._servers if one.entry is not None}

    def gone(self) -> set[Address]:
        """Return the servers without a connection."""
        with self._lock:
            return {server.address for server in self._servers if server.peer is None}

    def meet(self, meets: Iterable[tuple[Address, Meet]]) -> None:
        """Invite servers into a view; skips servers without a connection."""
        with self._lock:
            for address, meet in meets:
                server = next(one for one in self._servers if one.address == address)
                server.entry = None  # the answer has the next one
                server.send(meet)
        self._bell.ring()

    def check(self, address: Address) -> None:
        """Give a server up unless it answers within 0.9 s: a view has lost it."""
        with self._lock:
            self._server(lambda one: one.address == address).ask(_CHECK_S)
        self._bell.ring()

    def close(self) -> None:
        """Disconnect from all servers; idempotent."""
        self._is_closing = True
        self._bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        ready = select.poll()
        for one in (self._bell.fd, self.endpoint):
            ready.register(one, select.POLLIN)
        try:
            while not self._is_closing:
                with self._lock:
                    wake_at = self._step(time.monotonic())
                wait_s = max(0.001, min(wake_at - time.monotonic(), 1.0))
                if any(fd == self._bell.fd for fd, _ in ready.poll(1e3 * wait_s)):
                    os.eventfd_read(self._bell.fd)
        finally:
            with self._lock:
                for server in self._servers:
                    server.peer = None  # NOT a loss: this worker leaves
                self.endpoint.close()

    def _step(self, now: float) -> float:
        """Read messages and do what is due; return when to step again."""
        for _ in range(1 + len(self._servers) // _N_AT_ONCE):  # one message per server
            self.endpoint.step(now)
        # NOT a later time: a server's messages until then must be read before it is given up.
        wake_at = min((server.step(now) for server in self._servers), default=float("inf"))
        return min(wake_at, self.endpoint.deadline)  # NOT sooner: a server may have dialled

    # The endpoint's owner.

    def reached(self, peer: Peer, dial: int) -> None:
        """Send the reservation to a server that has proved the key."""
        self._server(lambda one: one.dial == dial).reached(peer)

    def not_reached(self, dial: int, error: int, progress: Progress, was_connected: bool) -> None:
        """Record why a dial has failed."""
        self._server(lambda one: one.dial == dial).not_reached(error, progress, was_connected)

    def received(self, peer: Peer, kind: int, body: bytes, _fd: int) -> None:
        """Take a server's message."""
        server = self._server(lambda one: one.peer is peer)
        try:
            server.take(decode(kind, body))
        except ValueError as error:
            server.fail(f"was lost: it sent a malformed message ({error})", _RETRY_S)

    def lost(self, peer: Peer, _error: int, why: str) -> None:
        """Connect again soon."""
        self._server(lambda one: one.peer is peer).fail(f"was lost: {why}", _RETRY_S)

    def _server(self, is_it: Callable[[_Server], bool]) -> _Server:
        return next(filter(is_it, self._servers))


class _Server:
    """One of the servers. Reconnects whenever the connection is lost.

    Attributes:
        identity: of its process, while it can serve; else empty.
        entry: its part of the roster of the next view.
        trouble: a verb phrase: why it cannot serve.
        dial: the number of the endpoint's dial while it connects.
        peer: the connection.
    """

    def __init__(self, address: Address, watch: Watch, bell: Bell) -> None:
        self.address, self.trouble = address, "has not answered yet"
        self._watch, self._bell = watch, bell
        self.identity = b""
        self.entry: Entry | None = None
        self._found: list[str] = []  # its addresses, the best first; kept until others are found
        self._targets: list[str] = []  # the addresses still to try
        self._lookup_trouble = ""  # why no address is known
        self._is_looking = False
        self._look_at = float("-inf")
        self.dial: int | None = None
        self.peer: Peer | None = None
        self._not_before = 0.0
        self._until = self._ping_at = float("inf")
        if is_numeric(address.host):
            self._found, self._look_at = [address.host], float("inf")

    def step(self, read_at: float) -> float:
        """Connect, ping or give up if that is due; return when to step again.

        Args:
            read_at: all data that arrived before this time was read, even if this thread is late.
        """
        if read_at >= self._until:
            self.fail("does not answer", _RETRY_S)
        now = time.monotonic()
        if now >= self._ping_at:
            self._ping_at = now + _PING_S
            self.ask(_PONG_S)
        if self.peer is None and self.dial is None:
            if now < self._not_before:
                return self._not_before
            self._targets = self._targets or self._found.copy()
            if not self._targets:
                self.trouble = self._lookup_trouble or self.trouble
                return self._look_up(now)  # a lookup that finds some rings the bell
            self._connect(now)
        return min(self._until, self._ping_at)

    def ask(self, within_s: float) -> None:
        """Ping the server, and give it up if it does not answer in time."""
        if self.peer is not None:
            self._until = min(self._until, time.monotonic() + within_s)
            send(self.peer, Ask())

    def send(self, message: Message) -> None:
        if self.peer is not None:
            send(self.peer, message)

    def _connect(self, now: float) -> None:
        self._target = self._targets.pop(0)
        hello, key = hello_of(self._watch.key), server_key(self._watch.key)
        self.dial = self._watch.endpoint.connect(self._target, self.address.port, hello, key)
        self._until = now + _CONNECT_S

    def reached(self, peer: Peer) -> None:
        """Send the reservation, since the server has proved the key."""
        self.dial, self.peer, self._targets = None, peer, []
        self._found = [self._target, *(one for one in self._found if one != self._target)]
        expect(peer, FROM_SERVERS)
        self.send(self._watch.reserve)

    def not_reached(self, error: int, progress: Progress, was_connected: bool) -> None:
        is_refused = progress is not Progress.WAITING
        why = why_not_reached(error, progress, was_connected)
        self.fail(why, _RETRY_REFUSED_S if is_refused else _RETRY_S)

    def take(self, message: Message) -> None:
        """Handle a message; ValueError if its entry is malformed."""
        self._until = float("inf")
        if isinstance(message, Leaving):
            self._lose("is about to end")
        elif isinstance(message, Reserved) and message.refused:
            self.fail(f"refuses: {message.refused}", _RETRY_REFUSED_S)
        elif isinstance(message, Reserved) and message.entry:
            self.entry = decode_entries(message.entry, {0}, 1)[0]
            if not self.identity:
                self.identity, self.trouble = message.server, ""
                self._ping_at = time.monotonic() + _PING_S
            self._watch.on_change()

    def fail(self, why: str, retry_s: float) -> None:
        """Close the connection, or end the dial; connect again after a while."""
        was_tried = self.peer is None
        if self.dial is not None:
            self._watch.endpoint.hang_up(self.dial)
        if self.peer is not None:
            self.peer.close()
        self.peer = self.dial = None
        self._until = self._ping_at = float("inf")
        now = time.monotonic()
        self._not_before = now + (0.0 if self._targets else retry_s)
        if was_tried and not self._targets:  # no known address worked
            self._look_up(now)
        self._lose(why)

    def _lose(self, why: str) -> None:
        self.trouble, self.identity, self.entry = why, b"", None
        self._watch.on_change()

    def _look_up(self, now: float) -> float:
        """Look its name up, unless a lookup runs or has just ended; return when to call again.

        A lookup runs on a separate daemon thread, since it may take long.
        """
        if self._is_looking:
            return float("inf")  # the lookup rings the bell
        if now >= self._look_at:
            self._look_at = now + _LOOKUP_S
            self._is_looking = True
            try:
                start("shoal lookup", self._resolve)
            except ShoalError as error:
                self._is_looking = False
                self._lookup_trouble = f"has a name that cannot be looked up: {error}"
        return self._look_at

    def _resolve(self) -> None:
        try:
            self._found = resolve(self.address.host)
        except (OSError, UnicodeError) as error:
            self._lookup_trouble = f"has a name that does not resolve ({error})"
        else:
            self._lookup_trouble = ""
        self._is_looking = False
        self._bell.ring()
