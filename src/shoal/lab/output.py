"""What many processes print, line by line, each with its process's name before it."""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios
from typing import IO, Any, Final

# A line that is longer goes on in pieces, so that nothing grows without bound.
_MOST_LINE_BYTES: Final = 1 << 16
# What waits for a slow reader before its writers have to wait too.
_MOST_PENDING_BYTES: Final = 1 << 18
# A pipe that can be written to at all takes so much at once (pipe(7), PIPE_BUF).
_PIECE_BYTES: Final = 4096

_COLOURS: Final = (36, 33, 32, 35, 34, 31)  # cyan first; ECMA-48, SGR


class Output:
    """A descriptor of this process that many write to; it never waits for a reader."""

    def __init__(self, fd: int, colourful: bool) -> None:
        self.fd = fd
        self._colourful = colourful
        self._pending = bytearray()

    @property
    def is_pending(self) -> bool:
        """Whether something has yet to be written."""
        return bool(self._pending)

    @property
    def has_room(self) -> bool:
        """Whether more lines may be added, for now."""
        return len(self._pending) < _MOST_PENDING_BYTES

    def add(self, label: str, line: bytes, number: int = 0) -> None:
        """Add a line, without its end; `number` chooses the colour of its label."""
        start = f"{label} | ".encode()
        if self._colourful:
            colour = _COLOURS[number % len(_COLOURS)]
            start = b"\x1b[%dm%s\x1b[0m" % (colour, start)
        self._pending += start + line + b"\n"

    def say(self, text: str) -> None:
        """Add a line of the lab's own."""
        self._pending += f"shoal lab: {text}\n".encode()

    def write(self) -> None:
        """Write what the reader takes now.

        Raises:
            BrokenPipeError: there is no reader any more.
        """
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        # Asked before each piece: this descriptor is not ours alone, so it has to stay blocking.
        while self._pending and poll.poll(0):
            del self._pending[: os.write(self.fd, self._pending[:_PIECE_BYTES])]


class Lines:
    """The lines that come out of one pipe of a process, on their way to an output."""

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
        """Take what is there, and pass on the lines that are complete."""
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
        """Take what lies in the pipe, NOT what children of its process still write to it."""
        n_left = _n_bytes_in(self.fd) if self.is_open else 0
        while n_left > 0 and self.is_open:
            self.read()
            n_left -= _MOST_LINE_BYTES

    def end(self) -> None:
        """Pass on what has no end of line; nothing comes any more."""
        self.is_open = False
        self._pipe.close()
        if self._begun:
            self._pass_on_begun()

    def _pass_on_begun(self) -> None:
        self.output.add(self._label, self._begun, self._number)
        self._begun = b""


def _n_bytes_in(pipe: int) -> int:
    """How much could be read now."""
    answer = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def is_colourful(fd: int) -> bool:
    """Whether a descriptor is a terminal that shows colours, and nobody minds (no-color.org)."""
    return os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
