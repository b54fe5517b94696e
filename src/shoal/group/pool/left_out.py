"""Servers that a view could not form with, or was lost by: they are left out for a while. No I/O.

A server that some worker cannot reach may well answer the lowest one: without this, view after view
would form with it and end by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address

# A link that flapped is back after the least. Each try costs a process on every server, no call
# waits for it; one that has healed is used again after the longest.
_LEAST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 32.0
# One that has served for as many pauses begins anew with the least.
_N_PAUSES_FORGIVEN: Final = 4


@dataclass
class _Absence:
    """Until when a server is left out, or was last.

    Args:
        identity: of its process; another one begins anew.
        used_at: when it was in a view again; None: it is left out.
    """

    identity: bytes | None
    pause_s: float
    not_before: float = 0.0
    used_at: float | None = None


class LeftOut:
    """All of them. Reads no clock."""

    def __init__(self) -> None:
        self._absences: dict[Address, _Absence] = {}
        self._why: dict[Address, str] = {}

    def blame(self, address: Address, identity: bytes | None, why: str, now: float) -> None:
        """Leave it out for a while, longer each time.

        Args:
            why: a verb phrase.
        """
        absence = self._absences.get(address)
        if absence is None or absence.identity != identity or _is_forgiven(absence, now):
            absence = self._absences[address] = _Absence(identity, _LEAST_PAUSE_S / 2)
        absence.pause_s = min(2 * absence.pause_s, _LONGEST_PAUSE_S)
        absence.not_before = now + absence.pause_s
        absence.used_at = None
        self._why[address] = why

    def used(self, addresses: Iterable[Address], now: float) -> None:
        """A view stands with these."""
        for address in addresses:
            if self._why.pop(address, None) is not None:
                self._absences[address].used_at = now

    def may_serve(self, ready: Mapping[Address, bytes], now: float) -> list[Address]:
        """Those of the servers that are ready, by the identities of their processes."""
        return [one for one, identity in ready.items() if self._may_serve(one, identity, now)]

    def why(self) -> dict[Address, str]:
        """Why those that are left out are."""
        return dict(self._why)

    def _may_serve(self, address: Address, identity: bytes, now: float) -> bool:
        absence = self._absences.get(address)
        return absence is None or absence.identity != identity or now >= absence.not_before


def _is_forgiven(absence: _Absence, now: float) -> bool:
    used_at = absence.used_at
    return used_at is not None and now - used_at >= _N_PAUSES_FORGIVEN * absence.pause_s
