"""Leaves out, for a while, servers that views could not form with, or were lost by. No I/O.

A server that some worker cannot reach may still answer the lowest one. Unless it is left out, view
after view forms with it and ends by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address

# A link that flapped is used again after the least pause. Each try costs a process on every server;
# no call waits for it. A link that has healed stays unused for the longest pause at most.
_LEAST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 32.0
# A server that is not blamed for this many pauses begins again with the least pause.
_N_PAUSES_FORGIVEN: Final = 4


@dataclass
class _Absence:
    """A server's process, by its identity, that is left out until a time.

    `why` is a verb phrase; empty once a view stands with it again.
    """

    identity: bytes | None
    pause_s: float
    not_before: float
    why: str

    def lasts(self, identity: bytes, now: float) -> bool:
        """Return whether that process is still left out."""
        return self.identity == identity and now < self.not_before


class LeftOut:
    """The servers that are left out. Takes the time as an argument."""

    def __init__(self) -> None:
        self._absences: dict[Address, _Absence] = {}

    def blame(self, address: Address, identity: bytes | None, why: str, now: float) -> None:
        """Leave a server out, twice as long as the last time; `why` is a verb phrase."""
        last, pause_s = self._absences.get(address), _LEAST_PAUSE_S
        if last is not None and last.identity == identity:
            forgiven_at = last.not_before + _N_PAUSES_FORGIVEN * last.pause_s
            pause_s = min(2 * last.pause_s, _LONGEST_PAUSE_S) if now < forgiven_at else pause_s
        self._absences[address] = _Absence(identity, pause_s, now + pause_s, why)

    def used(self, addresses: Iterable[Address]) -> None:
        """Record that a view stands with these servers."""
        for address in addresses:
            if address in self._absences:
                self._absences[address].why = ""

    def may_serve(self, ready: Mapping[Address, bytes], now: float) -> list[Address]:
        """Return the servers that may be in a view, of those that answer with their identities."""
        absences = ((one, self._absences.get(one), ready[one]) for one in ready)
        return [one for one, last, own in absences if last is None or not last.lasts(own, now)]

    def why(self) -> dict[Address, str]:
        """Return the reason for each server that is left out."""
        return {address: last.why for address, last in self._absences.items() if last.why}
