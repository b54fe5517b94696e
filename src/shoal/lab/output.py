"""Merges the output of many processes line by line, each line after its process's name."""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios
from typing import IO, Any, Final

# A longer line is passed on in pieces, so that no buffer grows without bound.
_MOST_LINE_BYTES: Final = 1 << 16
# Bytes that wait for a slow reader before the processes have to wait too.
_MOST_PENDING_BYTES: Final = 1 << 18
# A writable pipe takes this much at once (pipe(7), PIPE_BUF).
_PIECE_BYTES: Final = 4096


class Output:
    """A descriptor of this process with many writers, which never block on its reader."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending = bytearray()

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    @property
    def has_room(self) -> bool:
        return len(self._pending) < _MOST_PENDING_BYTES

    def add(self, label: str, line: bytes) -> None:
        """Add a line, given without its end."""
        self._pending += f"{label} | ".encode() + line + b"\n"

    def add_own(self, text: str) -> None:
        """Add a line from the lab itself."""
        self._pending += f"shoal lab: {text}\n".encode()

    def write(self) -> None:
        """Write as much as the reader takes now; BrokenPipeError if the reader is gone."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        # Polled before each piece: others share this descriptor, so it must stay blocking.
        while self._pending and poll.poll(0):
            del self._pending[: os.write(self.fd, self._pending[:_PIECE_BYTES])]


class Lines:
    """Passes the lines of one pipe of a process on to an output."""

    def __init__(self, pipe: IO[Any], output: Output, label: str) -> None:
        self._pipe = pipe  # owned: dropping it would close the descriptor
        self.fd = pipe.fileno()
        os.set_blocking(self.fd, False)
        self.output = output
        self.is_open = True
        self._label = label
        self._begun = b""

    def read(self) -> None:
        """Read the available bytes, and pass on complete lines."""
        if not self.is_open:
            return
        try:
            data = os.read(self.fd, _MOST_LINE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.end()
            return
        *whole, self._begun = (self._begun + data).split(b"\n")
        for line in whole:
            self.output.add(self._label, line)
        if len(self._begun) > _MOST_LINE_BYTES:
            self._pass_on_begun()

    def read_rest(self) -> None:
        """Read the bytes in the pipe now, NOT those that children of its process write later."""
        if not self.is_open:
            return
        n_left = int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        while n_left > 0 and self.is_open:
            self.read()
            n_left -= _MOST_LINE_BYTES

    def end(self) -> None:
        """Close the pipe, and pass on a last line without an end."""
        self.is_open = False
        self._pipe.close()
        if self._begun:
            self._pass_on_begun()

    def _pass_on_begun(self) -> None:
        self.output.add(self._label, self._begun)
        self._begun = b""
