"""A connection to a server: of a job that has proved its key, or of whoever asks over HTTP."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import ShoalError
from shoal.group.pool.protocol import Frames, Meet, Message, Note, encode
from shoal.group.pool.view_mesh import MEETING_S, Place
from shoal.server.http import MOST_BYTES, answer
from shoal.server.pace import Pace

if TYPE_CHECKING:
    from shoal.server.http import Health
    from shoal.server.options import JobKey

# Seconds for what has begun to arrive, or has not been taken by the peer.
PATIENCE_S: Final = 2.0
_READ_BYTES: Final = 4096
_MOST_NOTES: Final = 8  # of the kinds of calls of a job
_MOST_RESTING: Final = 1  # views that wait for their turn, beyond which nothing more is read


class Missed(NamedTuple):
    """A `Meet` that has waited for its turn for longer than its workers wait for the server."""


class Connection:
    """A non-blocking socket with what is still to be sent to it. Gone once `sock` is closed.

    Args:
        on_data: takes what was read; False: it makes no sense, and the connection is closed.
        on_end: told once, when it is closed, by whomever.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        on_data: Callable[[bytes], bool],
        on_end: Callable[[], None],
    ) -> None:
        self._selector, self._sock = selector, sock
        self._on_data, self._on_end = on_data, on_end
        self._outbox = b""
        self._closes_when_sent = False
        self.is_open = self._reads = self._is_watched = True
        self.until: float | None = None  # when to give it up
        self._sent_by: float | None = None  # or then, since it takes nothing
        selector.register(sock, selectors.EVENT_READ, self._on_ready)

    @property
    def deadline(self) -> float | None:
        """When to close it, unless something happens."""
        return min((at for at in (self.until, self._sent_by) if at is not None), default=None)

    def send(self, data: bytes, *, last: bool = False) -> None:
        """Send this after what is there; `last`: and close."""
        self._outbox += data
        self._closes_when_sent |= last
        self._write()

    def read(self, reads: bool) -> None:
        """Read on, or leave what comes to the kernel, which makes the peer wait in the end."""
        if self.is_open and reads != self._reads:
            self._reads = reads
            self._watch()

    def close(self) -> None:
        """Close it; idempotent."""
        if self.is_open:
            self.is_open = False
            if self._is_watched:
                self._selector.unregister(self._sock)
            self._sock.close()
            self._on_end()

    def _on_ready(self) -> None:
        if self._outbox:
            self._write()
        elif self._reads:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or not self._on_data(data):
            self.close()

    def _write(self) -> None:
        if not self.is_open:
            return
        try:
            n_sent = self._sock.send(self._outbox) if self._outbox else 0
        except BlockingIOError:
            n_sent = 0
        except OSError:
            self.close()
            return
        self._outbox = self._outbox[n_sent:]
        if not self._outbox and self._closes_when_sent:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            self.close()
            return
        self._watch()
        self._sent_by = time.monotonic() + PATIENCE_S if self._outbox else None

    def _watch(self) -> None:
        # NOT both: whoever takes no answers asks nothing more, or they would fill our memory.
        events = selectors.EVENT_READ if self._reads else 0
        events = selectors.EVENT_WRITE if self._outbox else events
        if self._is_watched:
            self._selector.unregister(self._sock)
        self._is_watched = events != 0
        if self._is_watched:
            self._selector.register(self._sock, events, self._on_ready)


class JobConnection:
    """A job's, whose lowest worker holds it as long as it wants the server.

    Args:
        pace: of what all who hold its key ask for that costs a process.
        on_message: answers a message; None: it is none that a job says.

    Attributes:
        job: its name, once it has reserved.
        notes: what it says of its kinds of calls, the newest last.
        place: where the job's next view is to be served.
        rests_until: when the next view may begin that it has asked for; None: none waits.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        key: JobKey,
        pace: Pace,
        on_message: Callable[[JobConnection, Message | Missed], Message | None],
        on_end: Callable[[JobConnection], None],
    ) -> None:
        self.key = key
        self.job: str | None = None
        self.notes: deque[Note] = deque(maxlen=_MOST_NOTES)
        self.place: Place | None = None
        self.rests_until: float | None = None
        self._paces = pace, Pace()  # of its key, and its own
        # Since when: what a frame or a few may hold, and no more.
        self._waiting: deque[tuple[float, Message]] = deque()
        self._frames = Frames()
        self._on_message, self._on_end = on_message, on_end
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection = Connection(selector, sock, self._take, self._ended)

    @property
    def entry(self) -> bytes:
        """This server's entry in the roster of the next view; empty if there can be none."""
        return b"" if self.place is None else self.place.entry.encode(0)

    def open_place(self) -> str:
        """Listen for the workers of the next view; return why not, or an empty string."""
        self._close_place()
        environ = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
        try:
            peer = str(self._sock.getpeername()[0]).removeprefix("::ffff:")  # IPv4 over IPv6
            self.place = Place(None, peer, environ)
        except (ShoalError, OSError) as error:
            return str(error)
        return ""

    def _close_place(self) -> None:
        if self.place is not None:
            self.place.close()
        self.place = None

    def _ended(self) -> None:
        self._close_place()
        self._on_end(self)

    def _take(self, data: bytes) -> bool:
        try:
            messages = self._frames.feed(data)
        except ValueError:
            return False
        now = time.monotonic()
        self._waiting += ((now, message) for message in messages)
        return self._work(now)

    def note(self, note: Note) -> None:
        """Remember it, instead of what was said of the same kind before."""
        for other in [one for one in self.notes if one.kind == note.kind]:
            self.notes.remove(other)
        self.notes.append(note)

    def go_on(self, now: float) -> None:
        """Begin views that wait, and read again, if they have rested long enough."""
        if self.rests_until is not None and now >= self.rests_until:
            self.rests_until = None
            if not self._work(now):
                self.connection.close()

    def _work(self, now: float) -> bool:
        """Answer what has come; views rest if there are too many. False: it makes no sense.

        All else is answered meanwhile: who asks whether we live takes silence for death.
        """
        came, self._waiting = self._waiting, deque()
        for since, message in came:
            is_late = isinstance(message, Meet) and now > since + MEETING_S
            if isinstance(message, Meet) and not is_late and not self._may_meet(now):
                self._waiting.append((since, message))
                continue
            if not self.connection.is_open:
                return True
            reply = self._on_message(self, Missed() if is_late else message)
            if reply is None:
                return False
            self.connection.send(encode(reply))
        reads = len(self._waiting) <= _MOST_RESTING
        self.connection.read(reads)
        is_awaited = reads and not self._frames.is_empty
        self.connection.until = now + PATIENCE_S if is_awaited else None
        return True

    def _may_meet(self, now: float) -> bool:
        if self.rests_until is None:
            dues = [due for due in (pace.due(now) for pace in self._paces) if due is not None]
            self.rests_until = max(dues, default=None)
            if not dues:
                for pace in self._paces:
                    pace.take(now)
        return self.rests_until is None


class HttpConnection:
    """One request, answered and closed."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        health: Callable[[], Health],
        on_end: Callable[[HttpConnection], None],
    ) -> None:
        self._request, self._health = b"", health
        self.connection = Connection(selector, sock, self._take, lambda: on_end(self))
        self.connection.until = time.monotonic() + PATIENCE_S

    def _take(self, data: bytes) -> bool:
        self._request += data[: MOST_BYTES - len(self._request)]
        response = answer(self._request, self._health)
        if response is not None:
            self.connection.send(response, last=True)
        return True
