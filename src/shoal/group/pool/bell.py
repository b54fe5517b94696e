"""Wakes the pool's thread: for commands, for servers that come or go, and for groups that end."""

from __future__ import annotations

import os
import select


class Bell:
    """An eventfd that the native core and other threads ring.

    Threads: one opens it and waits; any may ring.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._poll = select.poll()

    @property
    def fd(self) -> int:
        """The descriptor, owned by the bell; -1 before `open`."""
        return self._fd

    def open(self) -> None:
        """Get the descriptor. A bell that is not open cannot be heard.

        Raises:
            OSError: the process has no descriptor left.
        """
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._fd, select.POLLIN)

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that does."""
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> None:
        """Return when it is rung, or after this time."""
        if self._poll.poll(1e3 * timeout_s):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        # NOT before: a thread that rings late must not write to another file.
        if self._fd >= 0:
            os.close(self._fd)
