"""The lowest worker's eye on the servers: who answers, who has left, who has come back."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from shoal.engine import Endpoint, Peer, Progress
from shoal.group.pool.lookup import Lookup
from shoal.group.pool.protocol import (
    Ask,
    Frames,
    Leaving,
    Meet,
    Message,
    Reserve,
    Reserved,
    encode,
    hello_of,
    server_key,
)
from shoal.rendezvous.roster import decode as decode_entries
from shoal.threads import start

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address
    from shoal.rendezvous.record import Endpoint as Place
    from shoal.rendezvous.roster import Entry

# A refused connect costs microseconds; a server that was started again is found this soon.
_RETRY_S: Final = 0.2
_RETRY_REFUSED_S: Final = 2.0  # one that answered, and would not have us
_CONNECT_S: Final = 2.0
# A server's process is asked whether it lives this often, and given up after this long. Sooner
# would take a busy machine for a dead one, which costs calls a repair; later, and they stand still.
_PING_S: Final = 0.5
_PONG_S: Final = 1.2
_LAST_S: Final = 0.5  # for the thread to end
_MOST_UNSENT_BYTES: Final = 2 << 20  # for a server that reads too slowly


class Watch:
    """All servers that `SHOAL_SERVERS` names.

    Args:
        on_change: called on this thread when a server has come or gone.

    Threads: one, a daemon, until `close`; the methods may be called from any.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        job_key: bytes,
        reserve: Reserve,
        on_change: Callable[[], None],
    ) -> None:
        self._on_change = on_change
        self._lock = threading.RLock()  # whoever is told of a change may ask what it was
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        self._woken = woken
        self._is_closing = False
        self._selector.register(woken, selectors.EVENT_READ, self._on_woken)
        self._endpoint = Endpoint(self, dial_s=_CONNECT_S)
        self._selector.register(self._endpoint, selectors.EVENT_READ, lambda: None)
        self._make = functools.partial(
            _Server,
            job_key=job_key,
            reserve=reserve,
            selector=self._selector,
            endpoint=self._endpoint,
            on_change=self._changed,
            wake=self._wake,
        )
        self._servers = [self._make(address) for address in addresses]
        self._thread = start("shoal servers", self._run)

    def add(self, address: Address) -> None:
        """One more."""
        with self._lock:
            self._servers = [
                *self._servers,
                self._make(address),
            ]  # NOT in place: the thread goes through them
        self._wake()

    def ready(self) -> dict[Address, bytes]:
        """Those that would serve us now, in the order in which they were named: the identities."""
        with self._lock:
            found: dict[bytes, Address] = {}
            for server in self._servers:
                if server.identity is not None:
                    found.setdefault(server.identity, server.address)
            return {address: identity for identity, address in found.items()}

    def places(self) -> dict[Address, Entry]:
        """Return the entry in the next roster of each server that has sent one."""
        with self._lock:
            return {one.address: one.entry for one in self._servers if one.entry is not None}

    def gone(self) -> set[Address]:
        """Those to which there is no connection any more."""
        with self._lock:
            return {server.address for server in self._servers if not server.is_connected}

    def trouble(self) -> dict[Address, str]:
        """Why the others would not."""
        with self._lock:
            held: dict[bytes, Address] = {}
            told: dict[Address, str] = {}
            for server in self._servers:
                if server.identity is None:
                    told[server.address] = server.trouble
                elif server.identity in held:
                    other = held[server.identity]
                    told[server.address] = f"is the same server as {other}: name it once"
                else:
                    held[server.identity] = server.address
            return told

    def meet(self, meets: Iterable[tuple[Address, Meet]]) -> None:
        """Ask servers into a view; who cannot be asked any more does not come."""
        with self._lock:
            for address, meet in meets:
                server = next(one for one in self._servers if one.address == address)
                server.entry = None  # the answer brings the next one
                server.say(meet)
        self._wake()

    def tell(self, message: Message) -> None:
        """Say this to all servers that would serve us."""
        with self._lock:
            for server in self._servers:
                if server.identity is not None:
                    server.say(message)

    def close(self) -> None:
        """Leave all servers; idempotent."""
        self._is_closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _on_woken(self) -> None:
        self._woken.recv(4096)

    def _run(self) -> None:
        try:
            read_at = time.monotonic()
            while not self._is_closing:
                with self._lock:
                    self._endpoint.step(time.monotonic())
                wake_at = float("inf")
                for server in self._servers:
                    with self._lock:
                        wake_at = min(wake_at, server.step(read_at), self._endpoint.deadline)
                read_at = time.monotonic()  # NOT later: what comes by now is read before the next
                self._wait(max(0.001, min(wake_at - time.monotonic(), 1.0)))
        finally:
            with self._lock:
                for server in self._servers:
                    server.close()
                self._endpoint.close()
            self._selector.close()
            self._waker.close()
            self._woken.close()

    def _wait(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            with self._lock:
                key.data()

    def _changed(self) -> None:
        self._on_change()

    # The endpoint's owner.

    def reached(self, peer: Peer, dial: int) -> None:
        """A server has proved the key."""
        self._server_of(dial).reached(peer)

    def not_reached(self, dial: int, error: int, progress: Progress, was_connected: bool) -> None:
        """A dial has failed."""
        self._server_of(dial).not_reached(error, progress, was_connected)

    def _server_of(self, dial: int) -> _Server:
        return next(server for server in self._servers if server.dial == dial)


class _Server:
    """One of them. Its connection is made anew whenever it is gone.

    Attributes:
        identity: of its process, while it would serve us.
        entry: its part of the roster of the next view.
        trouble: a verb phrase: why it would not.
    """

    def __init__(
        self,
        address: Address,
        job_key: bytes,
        reserve: Reserve,
        selector: selectors.BaseSelector,
        endpoint: Endpoint,
        on_change: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self.address, self.trouble = address, "has not answered yet"
        self._lookup = Lookup(address, wake)
        self.identity: bytes | None = None
        self.entry: Entry | None = None
        self._outbox = b""
        self._key, self._reserve = job_key, reserve
        self._selector, self._endpoint, self._on_change = selector, endpoint, on_change
        self._targets: list[Place] = []
        self.dial: int | None = None  # of the endpoint
        self._sock: socket.socket | None = None
        self._frames = Frames()
        self._not_before = 0.0
        self._until = float("inf")
        self._ping_at = float("inf")

    @property
    def is_connected(self) -> bool:
        """Whether it can be talked to."""
        return self._sock is not None

    def step(self, read_at: float) -> float:
        """Connect if it is time to, or give up; returns when to look again.

        Args:
            read_at: what had come by then was read, however late this thread is.
        """
        if read_at >= self._until:
            self._fail("does not answer", _RETRY_S)
        now = time.monotonic()
        if now >= self._ping_at and self._sock is not None:
            self._ping_at = now + _PING_S
            self._until = min(self._until, now + _PONG_S)
            self.say(Ask())
        if self._sock is None and self.dial is None:
            if now < self._not_before:
                return self._not_before
            self._targets = self._targets or self._lookup.endpoints()
            if not self._targets:
                self.trouble = self._lookup.trouble or self.trouble
                return self._lookup.begin(now)  # or when it has found some
            self._connect(now)
        return min(self._until, self._ping_at)

    def say(self, message: Message) -> None:
        """Send it, if there is a connection."""
        if self._sock is None:
            return
        try:
            self._outbox += encode(message)
            if len(self._outbox) > _MOST_UNSENT_BYTES:
                raise OSError("it takes no more")
            self._flush(self._sock)
        except OSError as error:
            self._fail(f"was lost: {error}", _RETRY_S)

    def _flush(self, sock: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            self._outbox = self._outbox[sock.send(self._outbox) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        if self._selector.get_key(sock).events != events:
            self._selector.modify(sock, events, self._on_data)

    def close(self) -> None:
        """Close what is open. The selector is done with."""
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def _connect(self, now: float) -> None:
        self._target = target = self._targets.pop(0)
        hello, key = hello_of(self._key), server_key(self._key)
        self.dial = self._endpoint.connect(target.address, target.port, hello, key)
        self._until = now + _CONNECT_S

    def reached(self, peer: Peer) -> None:
        """It has proved the key."""
        self.dial, self._sock, self._frames = None, socket.socket(fileno=peer.detach()), Frames()
        self._sock.setblocking(False)
        self._outbox = b""
        self._targets = []
        self._lookup.prefer(self._target)
        self._selector.register(self._sock, selectors.EVENT_READ, self._on_data)
        self.say(self._reserve)

    def not_reached(self, error: int, progress: Progress, was_connected: bool) -> None:
        """It cannot be reached now, or does not prove the key."""
        if progress is Progress.KEY_DIFFERS:
            self._fail(
                "holds no job key like ours: start it with --key-file and the file that "
                "SHOAL_KEY_FILE names",
                _RETRY_REFUSED_S,
            )
        elif progress is not Progress.WAITING:
            self._fail("speaks another protocol: install the same shoal on all", _RETRY_REFUSED_S)
        elif was_connected:  # who speaks another protocol is closed without a word
            self._fail(
                "closes the connection: it is no shoal server, or of another version", _RETRY_S
            )
        else:
            self._fail(f"cannot be reached: {os.strerror(error)}", _RETRY_S)

    def _on_data(self) -> None:
        sock = self._sock
        if sock is None:
            return
        try:
            if self._outbox:
                self._flush(sock)
            data = sock.recv(65536)
            messages = self._frames.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._fail(f"was lost: {error}", _RETRY_S)
            return
        try:
            for message in messages:
                if self._sock is sock:  # NOT after a refusal
                    self._take(message)
        except ValueError as error:
            self._fail(f"was lost: {error}", _RETRY_S)
            return
        if not data:
            self._fail("has closed the connection", _RETRY_S)

    def _take(self, message: Message) -> None:
        self._until = float("inf")
        if isinstance(message, Leaving):
            self._lose("is about to end")
        elif isinstance(message, Reserved) and message.refused:
            self._fail(f"refuses: {message.refused}", _RETRY_REFUSED_S)
        elif isinstance(message, Reserved) and message.entry:
            self.entry = decode_entries(message.entry, {0}, 1)[0]
            if self.identity is None:
                self.identity, self.trouble = message.server, ""
                self._ping_at = time.monotonic() + _PING_S
            self._on_change()

    def _lose(self, why: str) -> None:
        self.trouble, self.identity, self.entry = why, None, None
        self._on_change()

    def _fail(self, why: str, retry_s: float) -> None:
        was_tried = self._sock is None
        if self.dial is not None:
            self._endpoint.hang_up(self.dial)
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
        self._sock = self.dial = None
        self._until = self._ping_at = float("inf")
        now = time.monotonic()
        self._not_before = now + (0.0 if self._targets else retry_s)
        if was_tried and not self._targets:  # no known address leads there
            self._lookup.begin(now)
        self._lose(why)
