"""Reaches the one rank that we connect to: when to try, how long, and when to try again."""

from __future__ import annotations

import errno
import functools
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from shoal.engine import ClientHandshake, Hello, Progress
from shoal.errors import UsageError
from shoal.rendezvous.acceptor import peer_uid
from shoal.rendezvous.key import HOW_TO_SET_KEY
from shoal.rendezvous.listener import unix_address
from shoal.rendezvous.record import Endpoint

MEETING_PATH: Final = 2**32 - 1
"""What HELLO says in the place of a path: a connection for the meeting, none of the native core's,
which listens at the same port later."""

_FIRST_RETRY_S: Final = 0.001
_LONGEST_RETRY_S: Final = 0.2


class ConnectAttempt:
    """One attempt to reach a peer: connect, then prove the key to it.

    Stepped when its socket is ready; never blocks; raises OSError when it is of no use any more.
    """

    def __init__(self, target: Endpoint | str, handshake: ClientHandshake) -> None:
        self._target = target
        self._handshake = handshake
        self._is_connected = False
        self.sock = socket.socket(_family(target), socket.SOCK_STREAM)
        self.sock.setblocking(False)

    def start(self) -> None:
        """Begin to connect; the socket turns writable once that is settled."""
        target = self._target
        if isinstance(target, str):
            # Refused or done at once; EAGAIN if the peer's backlog is full: try later.
            self.sock.connect(unix_address(target))
            return
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        status = self.sock.connect_ex((target.address, target.port))
        if status not in (0, errno.EINPROGRESS):
            raise OSError(status, os.strerror(status))

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands, so that it is for reading from here on."""
        return self._is_connected

    def step(self) -> Progress:
        """Go as far as possible without waiting."""
        if not self._is_connected:
            self._greet()
        while self._handshake.wants:
            try:
                data = self.sock.recv(self._handshake.wants)
            except BlockingIOError:
                break
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            self._send(self._handshake.feed(data))
        return self._handshake.progress

    def _greet(self) -> None:
        status = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, os.strerror(status))
        if self.sock.family == socket.AF_UNIX and peer_uid(self.sock) != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        self._is_connected = True
        self._send(self._handshake.hello)

    def _send(self, message: bytes) -> None:
        if message and self.sock.send(message) != len(message):
            raise ConnectionError(errno.ENOBUFS, "the socket does not take 44 bytes")


class Way(NamedTuple):
    """Leads to the rank above ours.

    Args:
        hello, key: what to prove there.
        target: returns where it is, a Unix name or an endpoint; None if that is not known yet.
        whose: the rank and its host, for messages.
    """

    hello: Hello
    key: bytes
    target: Callable[[], Endpoint | str | None]
    whose: str


class Connector:
    """The attempts of one rank to connect to the rank above it, one at a time.

    Args:
        dial_s: seconds for one attempt.
        on_authenticated: takes over a socket that has proved where it leads; the selector knows it.
        on_failed: called with the reason when an attempt came to nothing.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        dial_s: float,
        way: Way,
        on_authenticated: Callable[[socket.socket], None],
        on_failed: Callable[[OSError | Progress], None],
    ) -> None:
        self._selector = selector
        self._dial_s = dial_s
        self._way = way
        self._on_proven = on_authenticated
        self._on_failed = on_failed
        self._attempt: ConnectAttempt | None = None
        self._until = 0.0  # when to give it up
        self._not_before = 0.0  # when to try again
        self._retry_s = _FIRST_RETRY_S
        self.at: Endpoint | None = None  # where we last tried to reach a rank of another host

    def step(self, now: float) -> float:
        """Dial if it is time to, or give up what has taken too long; returns when to do it again.

        Call it as long as the rank above ours is not reached.
        """
        if self._attempt is not None and now >= self._until:
            self.fail(OSError(f"no answer within {self._dial_s:g} s"))
        if self._attempt is None and now >= self._not_before:
            target = self._way.target()
            if target is None:
                self._wait()
            else:
                self._begin(target, now)
        return self._not_before if self._attempt is None else self._until

    def fail(self, why: OSError | Progress) -> None:
        """Give up this attempt, and try again a little later."""
        self._drop()
        self._wait()
        self._on_failed(why)

    def close(self) -> None:
        """Close what has not been handed over; idempotent. The selector is done with."""
        if self._attempt is not None:
            self._attempt.sock.close()

    def _wait(self) -> None:
        self._not_before = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

    def _begin(self, target: Endpoint | str, now: float) -> None:
        self.at = target if isinstance(target, Endpoint) else None
        try:
            dial = ConnectAttempt(target, ClientHandshake(self._way.hello, self._way.key))
        except OSError as error:
            self.fail(error)
            return
        self._attempt, self._until = dial, now + self._dial_s
        on_ready = functools.partial(self._on_ready, dial)
        self._selector.register(dial.sock, selectors.EVENT_WRITE, on_ready)
        try:
            dial.start()
        except OSError as error:
            self.fail(error)

    def _on_ready(self, dial: ConnectAttempt) -> None:
        if self._attempt is not dial:
            return  # dropped earlier in this wake-up
        was_connected = dial.is_connected
        try:
            progress = dial.step()
        except OSError as error:
            self.fail(error)
            return
        if progress is Progress.DONE:
            self._attempt = None
            self._on_proven(dial.sock)
        elif progress is Progress.WAITING:
            if not was_connected:
                on_ready = functools.partial(self._on_ready, dial)
                self._selector.modify(dial.sock, selectors.EVENT_READ, on_ready)
        elif progress is Progress.KEY_DIFFERS:
            raise UsageError(
                f"rank {self._way.hello.rank} may not join: {self._way.whose} holds another job "
                f"key. {HOW_TO_SET_KEY}"
            )
        else:
            self.fail(progress)

    def _drop(self) -> None:
        dial, self._attempt = self._attempt, None
        if dial is not None:
            self._selector.unregister(dial.sock)
            dial.sock.close()


def _family(target: Endpoint | str) -> socket.AddressFamily:
    if isinstance(target, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in target.address else socket.AF_INET
