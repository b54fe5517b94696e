"""Log which server the calls of a view wait for: one line for a view, by rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.state.document import of_all_channels

if TYPE_CHECKING:
    from shoal.group.pool.view import View

_LOG: Final = logging.getLogger("shoal")

_EVERY_S: Final = 0.25  # a look takes the lock of the view's mesh
_N_LOOKS: Final = 16
# Sends to servers take turns, so the queue in front of a slow one is the longest: 5 to 8 times as
# long in front of one with half the rate of the others, 0.8 to 1.3 times where all are alike.
_APART: Final = 3.0
_LEAST_BYTES: Final = 32 << 10  # in front of a server at each look: less is no queue
_SEGMENT_BYTES: Final = 1448  # of a TCP packet


class LateServers:
    """Look at the queues in front of a view's servers while its calls last. Reads no clock."""

    def __init__(self) -> None:
        self._view = 0
        self._next_at = 0.0
        self._n_looks = 0
        self._waiting: list[float] = []

    def look(self, view: View, now: float) -> None:
        """Add up the queues, if it is time to, and log the late server after `_N_LOOKS`."""
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
                    "server %s is late: in front of it wait %.1f times as many bytes of its share "
                    "as in front of others; start it with SHOAL_LINK=RATE if its link is slower",
                    *(view.servers[server], times),
                )


def late_server(waiting: Sequence[float], shares: Sequence[int]) -> tuple[int | None, float]:
    """Return the server with the longest queue for its share, if it is far longer than others'.

    Args:
        waiting: bytes in front of each server.
        shares: weights by which the servers reduce.
    """
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
