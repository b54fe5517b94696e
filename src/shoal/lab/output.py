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

_COLOURS: Final = (36, 33, 32, 35, 34, 31)  # cyan first; ECMA-48, SGR


class Output:
    """A descriptor of this process with many writers, which never block on its reader."""

    def __init__(self, fd: int, colourful: bool) -> None:
        self.fd = fd
        self._colourful = colourful
        self._pending = bytearray()

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    @property
    def has_room(self) -> bool:
        return len(self._pending) < _MOST_PENDING_BYTES

    def add(self, label: str, line: bytes, number: int = 0) -> None:
        """Add a line, given without its end; `number` chooses the colour of its label."""
        start = f"{label} | ".encode()
        if self._colourful:
            colour = _COLOURS[number % len(_COLOURS)]
            start = b"\x1b[%dm%s\x1b[0m" % (colour, start)
        self._pending += start + line + b"\n"

    def say(self, text: str) -> None:
        """Add a line of the lab's own."""
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

    def __init__(self, pipe: IO[Any], output: Output, label: str, number: int) -> None:
        self._pipe = pipe  # owned: dropping it would close the descriptor
        self.fd = pipe.fileno()
        os.set_blocking(self.fd, False)
        self.output = output
        self.is_open = True
        self._label = label
        self._number = number
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
            self.output.add(self._label, line, self._number)
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
        self.output.add(self._label, self._begun, self._number)
        self._begun = b""


def is_colourful(fd: int) -> bool:
    """True if a descriptor is a terminal with colours, and NO_COLOR is unset (no-color.org)."""
    return os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
