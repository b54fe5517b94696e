"""A job's connection to a server, and the rate at which it gets views."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from shoal.errors import ShoalError
from shoal.group.pool.protocol import FROM_WORKERS, Message, expect, send
from shoal.group.pool.view_mesh import Place

if TYPE_CHECKING:
    from shoal.engine import Peer
    from shoal.server.options import JobKey

# A job whose servers come one after another asks for up to ten views in a second, and then for few.
# Forking one takes the parent 10 ms: a key in a loop gets a 25th of its time.
AT_ONCE: Final = 16
AT_ONCE_OF_KEY: Final = 4 * AT_ONCE
"""Each rail of a job asks for its own views, all at the same time."""
_PAUSE_S: Final = 0.25


class Pace:
    """Allows a number at once, and then one each 0.25 s. Reads no clock."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._early_s = (at_once - 1) * _PAUSE_S
        self._free_at = 0.0

    def allows(self, now: float) -> bool:
        """Return True if one can be taken."""
        return now >= self._free_at - self._early_s

    def take(self, now: float) -> None:
        """Take one, which must be allowed."""
        self._free_at = max(now, self._free_at) + _PAUSE_S


class Job:
    """A job that has proved its key; its lowest worker is connected as long as it wants the server.

    Args:
        peer: its connection.
        pace: of the processes for all holders of its key.

    Attributes:
        name: None until it has reserved.
        place: where its next view is to be served.
    """

    def __init__(self, peer: Peer, key: JobKey, pace: Pace) -> None:
        self.peer, self.key = peer, key
        self.name: str | None = None
        self.place: Place | None = None
        self._paces = pace, Pace()  # of its key, and its own
        expect(peer, FROM_WORKERS)

    @property
    def entry(self) -> bytes:
        """This server's entry in the roster of the next view; empty if there can be none."""
        return b"" if self.place is None else self.place.entry.encode(0)

    def send(self, message: Message) -> None:
        """Queue a message for the lowest worker."""
        send(self.peer, message)

    def open_place(self) -> str:
        """Listen for the workers of the next view; return why not, or an empty string."""
        self._close_place()
        environ = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
        try:
            with socket.socket(fileno=os.dup(self.peer.fileno())) as sock:
                host = str(sock.getpeername()[0]).removeprefix("::ffff:")  # IPv4 over IPv6
            self.place = Place(None, host, environ)
        except (ShoalError, OSError) as error:
            return str(error)
        return ""

    def _close_place(self) -> None:
        if self.place is not None:
            self.place.close()
        self.place = None

    def close(self) -> None:
        """Close its connection; idempotent."""
        self.peer.close()
        self._close_place()

    def take_turn(self, now: float) -> bool:
        """Return True, and count a process, if its key and it may have another one now."""
        if not all(pace.allows(now) for pace in self._paces):
            return False
        for pace in self._paces:
            pace.take(now)
        return True
