"""A connection to a server: of a job that has proved its key, or of whoever asks over HTTP."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from shoal.group.pool.protocol import Frames, Message, encode
from shoal.server.http import MOST_BYTES, answer

if TYPE_CHECKING:
    from shoal.server.http import Health
    from shoal.server.options import JobKey

# Seconds for what has begun to arrive, or has not been taken by the peer.
PATIENCE_S: Final = 2.0
_MOST_ASKED_BYTES: Final = 4096  # of a frame: no request is longer
_READ_BYTES: Final = 4096


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
        self.is_open = True
        self.until: float | None = None  # when to give it up
        selector.register(sock, selectors.EVENT_READ, self._on_ready)

    def send(self, data: bytes, *, last: bool = False) -> None:
        """Send this after what is there; `last`: and close."""
        self._outbox += data
        self._closes_when_sent |= last
        self._write()

    def close(self) -> None:
        """Close it; idempotent."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._sock)
            self._sock.close()
            self._on_end()

    def _on_ready(self) -> None:
        if self.is_open and self._outbox:
            self._write()
        if self.is_open:
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
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._sock, events, self._on_ready)
        if self._outbox:
            self.until = time.monotonic() + PATIENCE_S


class JobConnection:
    """A job's, whose lowest worker holds it as long as it wants the server.

    Args:
        on_message: answers a message; None: it is none that a job says.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        key: JobKey,
        on_message: Callable[[JobConnection, Message], Message | None],
        on_end: Callable[[JobConnection], None],
    ) -> None:
        self.key = key
        self.job: str | None = None  # its name, once it has reserved
        self._frames = Frames(_MOST_ASKED_BYTES)
        self._on_message = on_message
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection = Connection(selector, sock, self._take, lambda: on_end(self))

    def _take(self, data: bytes) -> bool:
        try:
            messages = self._frames.feed(data)
        except ValueError:
            return False
        for message in messages:
            reply = self._on_message(self, message)
            if reply is None:
                return False
            self.connection.send(encode(reply))
        self.connection.until = None if self._frames.is_empty else time.monotonic() + PATIENCE_S
        return True


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
