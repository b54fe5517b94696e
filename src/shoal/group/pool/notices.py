"""Logs on rank 0 when a server is not used, is used again, reports no rate, or is late."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shoal.group.pool.probe import UNKNOWN, part_of
from shoal.state.document import of_all_channels

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address
    from shoal.group.pool.view import View

_LOG: Final = logging.getLogger("shoal")

_WARN_AFTER_S: Final = 1.0  # after the job's start: servers may be about to start too
# The reason why a server is away may change at each try; all of these count as one reason.
_AWAY: Final = (
    *("has not answered yet", "does not answer", "cannot be reached", "cannot reach", "was lost"),
    *("is about to end", "is cut off", "was silent"),
)
_MOST_REASONS: Final = 4  # logged for one absence; a number in a reason may vary

_EVERY_S: Final = 0.25  # a look takes the lock of the view's mesh
_N_LOOKS: Final = 16
# Sends to servers take turns, so the queue in front of a slow one is the longest: 5 to 8 times as
# long if it has half the rate of the others, 0.8 to 1.3 times if all are equal.
_APART: Final = 3.0
_LEAST_BYTES: Final = 32 << 10  # fewer in front of a server at each look are no queue
_SEGMENT_BYTES: Final = 1448  # of a TCP packet


@dataclass
class _Absence:
    """A server that is not used, and the reasons that were logged."""

    since: float
    logged: set[str] = field(default_factory=set)


class Notices:
    """Logs changes of a job's servers, each once. Takes the time as an argument."""

    def __init__(self, now: float) -> None:
        self._begun = now
        self._steps: dict[Address, int] = {}
        self._absences: dict[Address, _Absence] = {}

    def update(self, used: Container[Address], trouble: Mapping[Address, str], now: float) -> None:
        """Log the changes since the last call.

        Args:
            used: the servers that serve calls.
            trouble: by server, why it cannot serve, as a verb phrase; empty if it can.
        """
        for address, why in trouble.items():
            if why and address not in used:
                self._miss(address, why, now)
        for address in [one for one in self._absences if one in used]:
            absence = self._absences.pop(address)
            if absence.logged:
                _LOG.info("server %s is used again, after %.3g s", address, now - absence.since)

    def take(self, rates: Mapping[Address, tuple[float, int]]) -> None:
        """Log the assumed rate of each server whose host reports none, if it has changed.

        Args:
            rates: the assumed bytes per microsecond, and `probe.step_of`.
        """
        for address, (rate, step) in rates.items():
            if self._steps.get(address) == step:
                continue
            self._steps[address] = step
            found = f"{part_of(step):.2g} of a worker's rate by a short probe"
            _LOG.log(
                logging.WARNING if step else logging.INFO,
                "server %s reports no rate of its link: shoal assumes %g Mbit/s, %s; start it "
                "with SHOAL_LINK=RATE if that is wrong",
                *(address, float(f"{8 * rate:.3g}")),
                "a worker's rate, since it could not be measured" if step == UNKNOWN else found,
            )

    def _miss(self, address: Address, why: str, now: float) -> None:
        absence = self._absences.setdefault(address, _Absence(now))
        reason = "away" if why.startswith(_AWAY) else why
        is_early = now < self._begun + _WARN_AFTER_S
        if is_early or reason in absence.logged or len(absence.logged) == _MOST_REASONS:
            return
        absence.logged.add(reason)
        _LOG.warning("server %s is not used: it %s", address, why)


class LateServers:
    """Watches the queues in front of a view's servers. Takes the time as an argument."""

    def __init__(self) -> None:
        self._view = 0
        self._next_at = 0.0
        self._n_looks = 0
        self._waiting: list[float] = []

    def look(self, view: View, now: float) -> None:
        """Add up the queues, every `_EVERY_S`; after `_N_LOOKS` looks log a late server."""
        mesh = view.group.mesh
        if now < self._next_at or mesh is None or not view.is_busy:
            return
        self._next_at = now + _EVERY_S
        if view.number != self._view:
            self._view, self._n_looks, self._waiting = view.number, 0, [0.0] * len(view.servers)
        state = mesh.state(_EVERY_S) if self._n_looks < _N_LOOKS else None
        if state is None:
            return
        self._n_looks += 1
        for peer in of_all_channels(state)["peers"]:
            if peer["rank"] >= view.n_workers:
                self._waiting[peer["rank"] - view.n_workers] += _waiting_for(peer)
        if self._n_looks == _N_LOOKS:
            server, times = late_server([each / _N_LOOKS for each in self._waiting], view.shares)
            if server is not None:
                _LOG.warning(
                    "server %s is late: relative to its share, its queue is %.1f times as long as "
                    "the other queues; start it with SHOAL_LINK=RATE if its link is slower",
                    *(view.servers[server], times),
                )


def late_server(waiting: Sequence[float], shares: Sequence[int]) -> tuple[int | None, float]:
    """Return the server whose queue, by its share, is far longer than others, and how far."""
    queues = {at: waiting[at] / share for at, share in enumerate(shares) if share}
    if len(queues) < 2:
        return None, 0.0
    longest = max(queues, key=lambda at: queues[at])
    others = sorted(queue for at, queue in queues.items() if at != longest)
    typical = max(others[len(others) // 2], _LEAST_BYTES / max(shares))
    times = queues[longest] / typical
    return (longest, times) if times > _APART else (None, times)


def _waiting_for(peer: dict[str, Any]) -> int:
    sockets = peer["sockets"]
    unsent = sum(one["unsent_bytes"] + one["n_unacked"] * _SEGMENT_BYTES for one in sockets)
    return int(peer["queued_bytes"]) + int(unsent)
