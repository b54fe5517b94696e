"""Reaches the ranks that we connect to: when to try, how long, and when to try again."""

from __future__ import annotations

import functools
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from shoal.errors import UsageError
from shoal.rendezvous.handshake import ClientHandshake, Hello, Progress
from shoal.rendezvous.key import HOW_TO_SET_KEY, pair_key
from shoal.rendezvous.link import Dial

if TYPE_CHECKING:
    from shoal.rendezvous.record import Endpoint
    from shoal.rendezvous.roster import Roster

_FIRST_RETRY_S: Final = 0.001
_LONGEST_RETRY_S: Final = 0.2


class Dialing:
    """The dials of one rank, at most one to each other rank at a time.

    Args:
        roster: says where a rank is; is told when something speaks against its record.
        dial_s: seconds for one attempt.
        trouble: by rank, takes what went wrong with it last.
        path_to_dial: which of the paths to a rank is to be opened next.
        on_proven: takes over a socket that has proved to lead to this rank, by this path; the
            selector knows it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        roster: Roster,
        dial_s: float,
        trouble: dict[int, str],
        path_to_dial: Callable[[int], int],
        on_proven: Callable[[int, int, socket.socket], None],
    ) -> None:
        self._selector = selector
        self._roster = roster
        self._dial_s = dial_s
        self._trouble = trouble
        self._path_to_dial = path_to_dial
        self._on_proven = on_proven
        self._dials: dict[int, Dial] = {}
        self._until: dict[int, float] = {}  # when to give a dial up
        self._not_before: dict[int, float] = {}  # when to dial a rank again
        self._retry_s: dict[int, float] = {}

    def dial(self, ranks: Iterable[int], now: float) -> None:
        """Begin to connect to those of these ranks whose turn it is."""
        for rank in ranks:
            if rank in self._dials or now < self._not_before.get(rank, 0.0):
                continue
            path = self._path_to_dial(rank)
            target = self._roster.target(rank, path)
            if target is not None:
                self._dial(rank, path, target, now)

    def expire(self, now: float) -> None:
        """Give up what has taken too long."""
        for rank in [rank for rank in self._dials if now >= self._until[rank]]:
            self.fail(rank, OSError(f"no answer within {self._dial_s:g} s"))

    def fail(self, rank: int, why: OSError | Progress) -> None:
        """Give up this attempt, doubt the record it came from, and try again a little later."""
        self._drop(rank)
        wait_s = self._retry_s.get(rank, _FIRST_RETRY_S)
        self._retry_s[rank] = min(2 * wait_s, _LONGEST_RETRY_S)
        self._not_before[rank] = retry_at = time.monotonic() + wait_s
        # The records are read again right before they are used again, not now.
        if why is Progress.STALE:
            self._trouble[rank] = "it is in another epoch, perhaps still in an earlier group"
            self._roster.doubt(range(self._roster.own.size), retry_at)
        elif isinstance(why, Progress):
            self._trouble[rank] = "what answered there did not prove to be that rank"
            self._roster.doubt((rank,), retry_at)
        else:
            self._trouble[rank] = (why.strerror or str(why)).lower()
            self._roster.doubt((rank,), retry_at)

    def wake_at(self, ranks: Iterable[int]) -> float:
        """When a dial ends, or when one to these ranks may start again."""
        until = [self._until[rank] for rank in self._dials]
        again = [
            self._not_before[rank]
            for rank in ranks
            if rank in self._not_before
            and rank not in self._dials
            and self._roster.target(rank) is not None
        ]
        return min(until + again, default=float("inf"))

    def start_anew(self) -> None:
        """Drop all dials, and whatever made us wait before the next ones."""
        for rank in list(self._dials):
            self._drop(rank)
        self._not_before.clear()
        self._retry_s.clear()

    def close(self) -> None:
        """Close what has not been handed over; idempotent."""
        for dial in self._dials.values():
            dial.close()

    def _dial(self, rank: int, path: int, target: Endpoint | str, now: float) -> None:
        epoch = self._roster.epoch
        if epoch is None:
            return
        own_rank = self._roster.rank
        key = pair_key(self._roster.job_key, epoch, own_rank, rank)
        handshake = ClientHandshake(Hello(epoch, own_rank, rank, path), key)
        try:
            dial = Dial(rank, path, target, handshake)
        except OSError as error:
            self.fail(rank, error)
            return
        self._dials[rank] = dial
        self._until[rank] = now + self._dial_s
        on_ready = functools.partial(self._on_ready, dial)
        self._selector.register(dial.sock, selectors.EVENT_WRITE, on_ready)
        try:
            dial.start()
        except OSError as error:
            self.fail(rank, error)

    def _on_ready(self, dial: Dial) -> None:
        if self._dials.get(dial.rank) is not dial:
            return  # dropped earlier in this wake-up
        was_connected = dial.is_connected
        try:
            progress = dial.step()
        except OSError as error:
            self.fail(dial.rank, error)
            return
        if progress is Progress.DONE:
            del self._dials[dial.rank]
            self._on_proven(dial.rank, dial.path, dial.sock)
        elif progress is Progress.WAITING:
            if not was_connected:
                on_ready = functools.partial(self._on_ready, dial)
                self._selector.modify(dial.sock, selectors.EVENT_READ, on_ready)
        elif progress is Progress.KEY_DIFFERS:
            raise UsageError(
                f"rank {self._roster.rank} may not join: rank {dial.rank} on "
                f"{self._roster.label(dial.rank)} holds another job key. {HOW_TO_SET_KEY}"
            )
        else:
            self.fail(dial.rank, progress)

    def _drop(self, rank: int) -> None:
        dial = self._dials.pop(rank, None)
        if dial is not None:
            self._selector.unregister(dial.sock)
            dial.close()
