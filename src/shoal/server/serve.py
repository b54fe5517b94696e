"""A server's end of one view: connects to the workers, and serves the announced kinds of calls.

Python runs once for each kind of call; the native core runs the calls.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from shoal.engine import make_plan
from shoal.errors import PeerLost, ShoalError
from shoal.group.pool.announce import N_BYTES, TAG, unpack
from shoal.group.pool.probe import answer
from shoal.group.pool.view_mesh import enter, read_roster
from shoal.rendezvous import job_key
from shoal.state.document import WORDS, of_all_channels, waits_of

if TYPE_CHECKING:
    from shoal.group.pool.protocol import Meet
    from shoal.group.pool.view_mesh import PoolGroup

_REPORT_S: Final = 0.5  # between reports to the parent
# For the other workers' calls after worker 0 has left.
_LAST_S: Final = 2.0
_OF_PEERS: Final = ("n_bytes_in", "n_bytes_out", "bytes_in_per_s", "bytes_out_per_s")
_MOST_WAITS: Final = 8  # workers that are named


def serve(meet: Meet, listeners: list[int], report: Callable[[dict[str, Any]], None]) -> None:
    """Serve until the workers leave, or any rank of the view is lost.

    Raises ShoalError if the view does not form, or a kind of call cannot be served; ValueError if
    the roster is malformed.
    """
    key = job_key(os.environ)
    assert key is not None  # the parent has set its file
    roster = read_roster(meet.roster, meet.size)
    with enter(roster, meet.view, meet.rank, meet.n_workers, key, listeners) as group:
        if not group.rates[group.rank]:
            answer(group, lambda: True)
        served = _Served(group, meet)
        with contextlib.suppress(PeerLost):
            served.run(lambda: report(served.state()))
        _linger(group)


class _Served:
    """The kinds of calls of one view, and its state."""

    def __init__(self, group: PoolGroup, meet: Meet) -> None:
        self._group, self._meet = group, meet
        self._n_kinds, self._last_algorithm = 0, ""
        self._started = time.monotonic()

    def run(self, report: Callable[[], None]) -> None:
        """Take announcements from worker 0 until the group ends, and report twice a second."""
        message = bytearray(N_BYTES)
        while True:
            work = self._group.recv(message, 0, TAG, async_op=True)
            if work is None:
                return
            report()
            while not work.drive(_REPORT_S):
                report()
            work.wait()
            self._add(bytes(message))

    def _add(self, message: bytes) -> None:
        group = self._group
        try:
            self._n_kinds += 1
            shape = unpack(message, group.rank, group.size)
            self._last_algorithm = shape.algorithm[:200]
            group.serve(make_plan(shape, self._meet.n_workers))
        except (ValueError, ShoalError) as error:
            why = f"server {group.rank} cannot serve a call that worker 0 announced: {error}"
            group.abort(why)  # the workers log the reason
            raise ShoalError(why) from error

    def state(self) -> dict[str, Any]:
        """Return the state of the view for `shoal status`."""
        meet, mesh = self._meet, self._group.mesh
        engine = mesh.state(0.05) if mesh is not None else None
        state: dict[str, Any] = {
            "view": meet.view,
            "rank": meet.rank - meet.n_workers,
            "n_workers": meet.n_workers,
            "n_servers": meet.size - meet.n_workers,
            "n_kinds": self._n_kinds,
            "algorithm": self._last_algorithm,
            "for_s": round(time.monotonic() - self._started, 1),
            "link_bytes_per_s": self._group.rates[self._group.rank] * 1e6,
        }
        if engine is not None:
            state.update(self._traffic(of_all_channels(engine)))
        return state

    def _traffic(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the calls, bytes and waits of the view, without its receives of announcements."""
        groups, peers = state["groups"], state["peers"]
        calls = [call for group in groups for call in group["in_flight"]]
        served = [call for call in calls if call["is_served"]]
        # A call that is cut has a part in each channel.
        n_besides = len(calls) - len({call["key"] for call in served})
        traffic: dict[str, Any] = {
            "n_in_flight": state["n_in_flight"] - n_besides,
            "n_waiting_for_room": sum(group["n_waiting_for_room"] for group in groups),
            # Windows, its only scratch, among them.
            "staging_bytes": state["staging"]["used_bytes"],
            "waits_for": self._waits_for(served),
        }
        for name in (*_OF_PEERS, "queued_bytes"):
            traffic[name] = sum(peer[name] for peer in peers)
        return traffic

    def _waits_for(self, served: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the workers that calls wait for, the longest wait first."""
        longest: dict[int, dict[str, Any]] = {}
        for wait in (wait for call in served for wait in waits_of(call) if wait["is_blamed"]):
            rank, since_s = wait["rank"], round(wait["since_s"], 2)
            before = longest.get(rank)
            if before is None or since_s > before["since_s"]:
                host = self._group.names[rank]
                why = WORDS[wait["why"]]
                longest[rank] = {"rank": rank, "host": host, "why": why, "since_s": since_s}
        return sorted(longest.values(), key=lambda one: -one["since_s"])[:_MOST_WAITS]


def _linger(group: PoolGroup) -> None:
    """Wait for the calls in flight before the goodbye, for `_LAST_S` at most."""
    until, pause = time.monotonic() + _LAST_S, 0.01
    while group.ended() is None and time.monotonic() < until:
        state = group.mesh.state(0.1) if group.mesh is not None else None
        if state is None or not of_all_channels(state)["n_in_flight"]:
            return
        time.sleep(pause)
