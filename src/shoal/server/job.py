"""A job's connection to a server, and the views that it has asked for."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from shoal.errors import ShoalError
from shoal.group.pool.protocol import FROM_WORKERS, Meet, Message, expect, send
from shoal.group.pool.view_mesh import MEETING_S, Place

if TYPE_CHECKING:
    from shoal.engine import Peer
    from shoal.server.options import JobKey

_MOST_RESTING: Final = 1  # views that wait for their turn, beyond which nothing more is read

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

    def due(self, now: float) -> float | None:
        """Return when the next one can be taken; None: now."""
        due = self._free_at - self._early_s
        return due if now < due else None

    def take(self, now: float) -> float | None:
        """Take one and return None, or return when the next one can be taken."""
        due = self.due(now)
        if due is None:
            self._free_at = max(now, self._free_at) + _PAUSE_S
        return due


class Job:
    """A job that has proved its key; its lowest worker is connected as long as it wants the server.

    Args:
        peer: its connection.
        pace: of the processes for all holders of its key.
        begin: begins a view, or answers None for one whose workers wait for it no longer.

    Attributes:
        name: None until it has reserved.
        place: where its next view is to be served.
        rests_until: when its next view may begin; None: no view waits.
    """

    def __init__(
        self, peer: Peer, key: JobKey, pace: Pace, begin: Callable[[Job, Meet | None], None]
    ) -> None:
        self.peer, self.key = peer, key
        self.name: str | None = None
        self.place: Place | None = None
        self.rests_until: float | None = None
        self._paces = pace, Pace()  # of its key, and its own
        self._waiting: deque[tuple[float, Meet]] = deque()  # since when
        self._begin = begin
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

    def meet(self, meet: Meet, now: float) -> None:
        """Begin a view, now or in its turn.

        Other messages are answered meanwhile: the lowest worker takes silence for death.
        """
        self._waiting.append((now, meet))
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """Begin the views that wait, as far as it is their turn; read no further behind several."""
        self.rests_until = None
        while self._waiting and self.peer.is_open:
            since, meet = self._waiting[0]
            is_late = now > since + MEETING_S
            if not is_late and not self._may_begin(now):
                break
            self._waiting.popleft()
            self._begin(self, None if is_late else meet)
        self.peer.pause(len(self._waiting) > _MOST_RESTING)

    def _may_begin(self, now: float) -> bool:
        dues = [due for due in (pace.due(now) for pace in self._paces) if due is not None]
        self.rests_until = max(dues, default=None)
        if not dues:
            for pace in self._paces:
                pace.take(now)
        return not dues
