"""What is logged of servers: one line when one cannot be used, and one when it is used again."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shoal.group.pool.probe import UNKNOWN, part_of

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address

_LOG: Final = logging.getLogger("shoal")

_WARN_AFTER_S: Final = 1.0  # of the job: a server may be about to start, as it is itself
# Why one is away may be said in other words each time that it is tried: that is one reason.
_AWAY: Final = (
    *("has not answered yet", "does not answer", "cannot be reached", "cannot reach", "was lost"),
    *("has closed the connection", "is about to end", "is cut off", "was silent"),
)
_MOST_REASONS: Final = 4  # that are told of one absence: some have numbers in them


@dataclass
class _Absence:
    """Since when a server is not used, and what was said of it."""

    since: float
    told: set[str] = field(default_factory=set)


class Notices:
    """Of all servers of a job. Reads no clock.

    Args:
        now: when the job began to look for them.
    """

    def __init__(self, now: float) -> None:
        self._begun = now
        self._steps: dict[Address, int] = {}
        self._absences: dict[Address, _Absence] = {}

    def update(self, used: Container[Address], trouble: Mapping[Address, str], now: float) -> None:
        """Log what has changed.

        Args:
            used: those that serve calls.
            trouble: by server why it cannot, as a verb phrase; for those that can, nothing.
        """
        for address, why in trouble.items():
            if why and address not in used:
                self._miss(address, why, now)
        for address in [one for one in self._absences if one in used]:
            absence = self._absences.pop(address)
            if absence.told:
                _LOG.info("server %s is used again, after %.3g s", address, now - absence.since)

    def take(self, rates: Mapping[Address, tuple[float, int]]) -> None:
        """Log what each server is taken for whose host reports no rate, where that is news.

        Args:
            rates: the bytes of each microsecond that it is taken for, and `probe.step_of`.
        """
        for address, (rate, step) in rates.items():
            if self._steps.get(address) == step:
                continue
            self._steps[address] = step
            found = f"{part_of(step):.2g} of what a worker's carries by a short probe"
            _LOG.log(
                logging.WARNING if step else logging.INFO,
                "server %s reports no rate of its link: it is taken for %g Mbit/s, %s; start it "
                "with SHOAL_LINK=RATE if that is wrong",
                *(address, float(f"{8 * rate:.3g}")),
                "as a worker's, since it could not be measured" if step == UNKNOWN else found,
            )

    def _miss(self, address: Address, why: str, now: float) -> None:
        absence = self._absences.setdefault(address, _Absence(now))
        reason = "away" if why.startswith(_AWAY) else why
        is_early = now < self._begun + _WARN_AFTER_S
        if is_early or reason in absence.told or len(absence.told) == _MOST_REASONS:
            return
        absence.told.add(reason)
        _LOG.warning("server %s is not used: it %s", address, why)
