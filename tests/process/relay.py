"""A relay between two processes, which damages bytes of the first connection through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator

LONG_S = 60.0

Fault = Callable[[bytes], bytes]


class Relay:
    """Forwards connections to a port. Leaving the context closes them.

    Args:
        port: called for each connection.
        fault: changes the bytes after a place; the connection closes where none are left.
        at: the place, in the bytes that one side sends over the first connection.
        sender: "client", which connects, or "server".
    """

    def __init__(
        self, port: Callable[[], int], fault: Fault, at: int, sender: str = "client"
    ) -> None:
        self._target = port
        self._faults = {sender: (fault, at)}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.n_connections = 0
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.n_connections += 1
                try:
                    far = socket.create_connection(("127.0.0.1", self._target()))
                except OSError:  # its listener has ended
                    near.close()
                    continue
                self._open += [near, far]
                for sender, one, other in (("client", near, far), ("server", far, near)):
                    data = _read(one)
                    if sender in self._faults:
                        data = _damage(data, *self._faults.pop(sender))
                    self._start(_forward, one, other, data)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_error: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG_S)
        for sock in (self._listener, *self._open):
            sock.close()


def _forward(one: socket.socket, other: socket.socket, pieces: Iterable[bytes]) -> None:
    with contextlib.suppress(OSError):
        for piece in pieces:
            other.sendall(piece)
    for sock, how in ((other, socket.SHUT_WR), (one, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            sock.shutdown(how)


def _read(sock: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while piece := sock.recv(1 << 16):
            yield piece


def _damage(pieces: Iterator[bytes], fault: Fault, at: int) -> Iterator[bytes]:
    n_bytes = 0
    for piece in pieces:
        place = at - n_bytes
        n_bytes += len(piece)
        if 0 <= place < len(piece):
            rest = fault(piece[place:])
            yield piece[:place] + rest
            if not rest:
                return
        else:
            yield piece
