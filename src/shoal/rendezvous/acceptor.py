"""Lets those in who prove the key, and keeps what everybody else costs small.

A stranger costs one descriptor for at most two seconds and 108 bytes read, never a thread and
never a wait: everything is non-blocking, in one selector. What cannot prove itself is closed
without a word. Running out of descriptors closes the newcomer and logs who it was, nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from shoal.engine import Hello, Progress, ServerHandshake

_LOG: Final = logging.getLogger("shoal")
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED
_N_ACCEPTS: Final = 64  # per wake-up, so that a flood of strangers cannot starve the links
_PAUSE_S: Final = 0.05  # without even a spare descriptor: how long until accepting is tried again


class Limits(NamedTuple):
    """What strangers may cost.

    Args:
        n_pending: connections that have not proved themselves. Fewer would turn away ranks of a
            large group that all arrive at once; more only serves whoever floods us.
        pending_s: seconds for a proof. The handshake takes two round trips, under a millisecond on
            a quiet network; two seconds leave room for lost packets and a busy process.
    """

    n_pending: int = 64
    pending_s: float = 2.0


class AcceptorOwner(Protocol):
    """Who decides whom an acceptor admits."""

    def admit(self, hello: Hello) -> bytes | Progress:
        """The key that this caller must prove, or STALE, or REFUSED."""

    def welcome(self, sock: socket.socket, hello: Hello) -> None:
        """Take over a connection that has proved what its HELLO says. It is non-blocking."""

    def key_differs(self, hello: Hello) -> None:
        """Called for a caller that names the right ranks and lacks the key."""


class Strangers(Protocol):
    """Takes those who speak another protocol, which begins with four bytes that we know."""

    @property
    def beginnings(self) -> Sequence[bytes]:
        """Those four bytes."""

    def take(self, sock: socket.socket) -> None:
        """Take over a connection that has proved nothing. It is non-blocking, and unread."""


class Acceptor:
    """Listeners, and the connections that have not proved themselves yet.

    The selector's entries carry a callable as `data`; `run_ready` calls it. Nothing here blocks
    or raises for what a stranger does.

    Args:
        strangers: takes whoever speaks another protocol; None: nobody does.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        owner: AcceptorOwner,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        strangers: Strangers | None = None,
    ) -> None:
        self._selector = selector
        self._owner = owner
        self._strangers = strangers
        self._limits = limits or Limits()
        self._clock = clock
        self._listeners: list[socket.socket] = []
        self._pending: dict[socket.socket, _Pending] = {}  # in order of arrival
        self._spare: int | None = _open_spare()
        self._is_watching = True  # whether the selector has the listeners
        self._resume_at: float | None = None
        self.n_turned_away = 0  # for want of a descriptor

    @property
    def n_pending(self) -> int:
        """How many connections have not proved themselves yet."""
        return len(self._pending)

    def open(self, listener: socket.socket) -> None:
        """Accept from this listener too; the acceptor owns it from here on."""
        listener.setblocking(False)
        self._listeners.append(listener)
        if self._is_watching:
            self._register(listener)

    def shut(self) -> None:
        """Accept nobody for now: whoever connects waits in the kernel. Idempotent."""
        self._resume_at = None
        self._ignore()

    def expire(self, now: float) -> None:
        """Close whoever has been silent too long. Call it before handling what is readable."""
        for pending in list(self._pending.values()):
            if now - pending.since < self._limits.pending_s:
                break
            self._drop(pending)
        if self._resume_at is not None and now >= self._resume_at:
            self._resume()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do again; None if never, as things are."""
        deadlines = [] if self._resume_at is None else [self._resume_at]
        if self._pending:
            deadlines.append(next(iter(self._pending.values())).since + self._limits.pending_s)
        return min(deadlines, default=None)

    def hand_over(self) -> list[socket.socket]:
        """The listeners for other hosts, which are the caller's from here on.

        Whoever connects meanwhile waits in the kernel.
        """
        handed = [each for each in self._listeners if each.family != socket.AF_UNIX]
        for listener in handed:
            if self._is_watching:
                self._selector.unregister(listener)
            self._listeners.remove(listener)
        return handed

    def close(self) -> None:
        """Close the listeners and everyone who waits at the acceptor; idempotent."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        self.shut()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._close_spare()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_N_ACCEPTS):
            if listener.fileno() < 0:
                return  # a welcome has closed the acceptor
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if is_out_of_descriptors(error):
                    self._turn_away(listener)
                    return
                continue  # that caller's own failure (ECONNABORTED and the like: accept(2))
            self._receive(sock)

    def _receive(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX and peer_uid(sock) != os.geteuid():
            sock.close()
            return
        if len(self._pending) >= self._limits.n_pending:
            self._make_room()
        pending = _Pending(sock, ServerHandshake(self._owner.admit), self._clock())
        self._pending[sock] = pending
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(pending))
        self._read(pending)  # a rank says HELLO as soon as it is connected: often it is here by now

    def _make_room(self) -> None:
        """Drop the oldest caller, one that has said no right HELLO if there is any.

        NOT always such a one: whoever records a HELLO can repeat it.
        """
        waiting = self._pending.values()
        silent = (pending for pending in waiting if pending.handshake.hello is None)
        self._drop(next(silent, None) or next(iter(waiting)))

    def _read(self, pending: _Pending) -> None:
        handshake = pending.handshake
        if self._strangers is not None and handshake.hello is None and self._is_strange(pending):
            self._selector.unregister(pending.sock)
            del self._pending[pending.sock]
            self._strangers.take(pending.sock)
            return
        while pending.sock in self._pending and handshake.wants:
            try:
                data = pending.sock.recv(handshake.wants)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(pending)
                return
            # Outside any `try`: it asks the acceptor's owner, whose errors are no stranger's fault.
            reply = handshake.feed(data)
            if reply and not _send(pending.sock, reply):
                self._drop(pending)
                return
        if pending.sock in self._pending:
            self._settle(pending)

    def _is_strange(self, pending: _Pending) -> bool:
        """Whether it begins in another protocol's words. Nothing is taken from the socket."""
        try:
            first = pending.sock.recv(4, socket.MSG_PEEK)
        except OSError:
            return False  # nothing is there, or will ever be: reading tells
        return self._strangers is not None and first in self._strangers.beginnings

    def _settle(self, pending: _Pending) -> None:
        hello, progress = pending.handshake.hello, pending.handshake.progress
        if hello is None or progress is not Progress.DONE:
            self._drop(pending)
            if hello is not None and progress is Progress.KEY_DIFFERS:
                self._owner.key_differs(hello)
            return
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock]
        self._owner.welcome(pending.sock, hello)

    def _drop(self, pending: _Pending) -> None:
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock]
        pending.sock.close()

    def _turn_away(self, listener: socket.socket) -> None:
        """Out of descriptors: use the spare one to close the newcomer, who would wait for ever."""
        if self._spare is None:
            self._ignore()
            self._resume_at = self._clock() + _PAUSE_S
            return
        self._close_spare()
        with contextlib.suppress(OSError):  # another thread may have taken the descriptor
            sock, address = listener.accept()
            sock.close()
            self._note_turned_away(address)
        self._spare = _open_spare()

    def _note_turned_away(self, address: object) -> None:
        """Log the first caller, the second, the fourth and so on."""
        self.n_turned_away += 1
        if self.n_turned_away.bit_count() == 1:
            _LOG.warning(
                "process %d has no file descriptor left to take a connection, and turned away %d "
                "so far, the last from %s: if they are ranks of this job, they cannot join; raise "
                "`ulimit -n`",
                *(os.getpid(), self.n_turned_away, address or "this host"),
            )

    def _resume(self) -> None:
        self._resume_at = None
        self._spare = self._spare or _open_spare()
        self._is_watching = True
        for listener in self._listeners:
            self._register(listener)

    def _register(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _ignore(self) -> None:
        if self._is_watching:
            self._is_watching = False
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


class _Pending:
    def __init__(self, sock: socket.socket, handshake: ServerHandshake, since: float) -> None:
        self.sock = sock
        self.handshake = handshake
        self.since = since


def run_ready(selector: selectors.BaseSelector, timeout_s: float | None) -> None:
    """Wait for something to happen, and call whoever registered for it."""
    for key, _ in selector.select(timeout_s):
        key.data()


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, vouched for by the kernel."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(credentials)[1]
    return uid


def _send(sock: socket.socket, message: bytes) -> bool:
    """A few bytes into an empty buffer: who has no room for them is no rank of ours."""
    try:
        return sock.send(message) == len(message)
    except OSError:
        return False


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether the process (EMFILE) or the machine (ENFILE) has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def _open_spare() -> int | None:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
