"""A job's connection to a server, and the rate at which the jobs of a key get views."""

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

# A job whose servers start one after another asks for up to ten views in a second, then for few.
# Each rail of a job asks for its own views, all at the same time. Forking a child takes the parent
# 10 ms, so a key that asks in a loop gets a 25th of its time.
AT_ONCE: Final = 64
_PAUSE_S: Final = 0.25


class Pace:
    """Allows 64 views at once, and then one every 0.25 s. Takes the time as an argument."""

    def __init__(self) -> None:
        self.next_at = 0.0  # the earliest time for the next one
        self._early_s = (AT_ONCE - 1) * _PAUSE_S

    def take(self, now: float) -> bool:
        """Return True and count a view if one is allowed now."""
        if now < self.next_at:
            return False
        self.next_at = max(self.next_at, now - self._early_s) + _PAUSE_S
        return True


class Job:
    """A job that has proved its key; its lowest worker stays connected while it uses the server.

    Args:
        peer: the connection to the lowest worker.
        pace: limits the views for all holders of the key.

    Attributes:
        name: None until it has reserved.
        place: the listeners for its next view.
    """

    def __init__(self, peer: Peer, key: JobKey, pace: Pace) -> None:
        self.peer, self.key, self.pace = peer, key, pace
        self.name: str | None = None
        self.place: Place | None = None
        expect(peer, FROM_WORKERS)

    @property
    def entry(self) -> bytes:
        """This server's entry in the roster of the next view; empty if it cannot listen."""
        return b"" if self.place is None else self.place.entry.encode(0)

    def send(self, message: Message) -> None:
        """Queue a message for the lowest worker."""
        send(self.peer, message)

    def open_place(self) -> str:
        """Listen for the workers of the next view; return the error, or an empty string."""
        self._close_place()
        environ = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
        try:
            with socket.socket(fileno=os.dup(self.peer.fileno())) as sock:
                host = str(sock.getpeername()[0]).removeprefix("::ffff:")  # IPv4 over IPv6
            self.place = Place("this server", host, environ)
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
