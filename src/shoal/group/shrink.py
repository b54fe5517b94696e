"""Exchanges reports between survivors until they agree on the next view.

`view.py` defines the reports and the agreement. Reports are messages in groups of two, one for each
other rank: such a group lives as long as its one link, even if other ranks are lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, cast

from shoal.errors import PeerLost, ShoalError, TimedOut
from shoal.group.view import MOST_NUMBER, Agreement, Report, View, decode, n_report_bytes
from shoal.plan.text import listed

if TYPE_CHECKING:
    from shoal.engine import Mesh, RankInfo
    from shoal.group.group import Group
    from shoal.group.work import Work

# The start of the reason if a living peer counts this rank as lost (native/engine/life/faults.cc).
GAVE_UP: Final = "gave this rank up"

_MOST_NAMED: Final = 8  # ranks in an error


class Line:
    """One rank's part in all shrinks of a group and of the views that follow it.

    `rank` and `rank_infos` are of the group as it was formed; `pair_with` makes the group of this
    rank and another one. Threads: any; one shrinks at a time.
    """

    def __init__(
        self, rank: int, rank_infos: Sequence[RankInfo], pair_with: Callable[[int], Group]
    ) -> None:
        self._rank_infos = rank_infos
        self._pair_with = pair_with
        self._lock = threading.Lock()
        self._agreement = Agreement(rank, len(rank_infos))
        self._sent: Report | None = None
        self._pairs: dict[int, Group] = {}
        self._receives: dict[int, tuple[Work, bytearray]] = {}
        self._why: dict[int, str] = {}
        self._dismissed: set[int] = set()  # excluded ranks that have the report

    @property
    def number(self) -> int:
        """The highest view number that this rank has asked for or entered."""
        return self._agreement.own.number

    def next_view(
        self,
        view: View,
        number: int,
        out: Iterable[int],
        timeout_s: float,
        mesh: Mesh,
        title: str,
    ) -> View:
        """Return the view after `view`, with all survivors except the ranks `out`.

        Its number is the highest that a member asks for, here at least `number`.

        Raises (this may be called again):
            TimedOut: names the living ranks that did not shrink.
            PeerLost: the others go on without this rank, for good.
            Closed: the links were closed meanwhile.
        """
        with self._lock:
            deadline = time.monotonic() + timeout_s
            agreement = self._agreement
            agreement.ask(number, out)
            self._find_lost(agreement.awaited)
            seen = -1
            while True:
                self._send_report()
                if self._take_reports():
                    continue
                if agreement.is_out:
                    raise self._left_out(view)
                if agreement.is_settled:
                    # A rank that agreed may have been lost since, or may have lost this rank.
                    if self._find_lost(p for p in agreement.members if p != agreement.rank):
                        continue
                    self._dismiss()
                    return View(agreement.own.number, agreement.members, agreement.missing)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimedOut(f"{title}: shrink waited {timeout_s:g} s for {self._late()}")
                # A receive that ended since `_take_reports` has raised the count above `seen`.
                seen = mesh.wait_finished(seen, left_s)

    def _find_lost(self, peers: Iterable[int]) -> bool:
        """Record the lost ones of these peers; return True if there are any."""
        errors = [(peer, self._pair(peer).ended()) for peer in peers]
        lost = [(peer, error) for peer, error in errors if isinstance(error, PeerLost)]
        for peer, error in lost:
            self._lose(peer, error)
        return bool(lost)

    def _send_report(self) -> None:
        """Send this rank's report to all others if it has changed."""
        own = self._agreement.own
        if own == self._sent:
            return
        for peer in self._agreement.reachable:
            if peer in self._dismissed:
                continue
            report = bytearray(own.encode(len(self._rank_infos)))
            pair = self._pair(peer)
            pair.send(report, 1 - pair.rank, async_op=True)  # if it fails, the receive fails too
        self._sent = own  # NOT before: an interrupted rank sends it again

    def _take_reports(self) -> bool:
        """Take the reports that arrived from awaited ranks; return True if there was one."""
        has_any = False
        for peer in self._agreement.awaited:
            if peer not in self._receives:
                pair, report = self._pair(peer), bytearray(n_report_bytes(len(self._rank_infos)))
                receive = cast("Work", pair.recv(report, 1 - pair.rank, work=True))
                self._receives[peer] = receive, report
            receive, report = self._receives[peer]
            if receive.done():
                has_any = True
                self._take(peer, report, receive.error())
                self._receives.pop(peer, None)  # NOT before: an interrupted rank takes it again
        return has_any

    def _take(self, peer: int, report: bytearray, error: ShoalError | None) -> None:
        if error is None:
            found = decode(report, len(self._rank_infos))
            if found.number <= MOST_NUMBER:
                self._agreement.receive(peer, found)
                return
            error = PeerLost(peer, "", "", "shrink", f"reported a view number of {found.number}")
        if isinstance(error, PeerLost):
            self._lose(peer, error)
        else:
            raise error

    def _lose(self, peer: int, error: PeerLost) -> None:
        self._why[peer] = error.reason
        self._agreement.lose(peer, gave_up=error.reason.startswith(GAVE_UP))
        self._receives.pop(peer, None)
        self._pairs.pop(peer).close()

    def _pair(self, peer: int) -> Group:
        if peer not in self._pairs:
            self._pairs[peer] = self._pair_with(peer)
        return self._pairs[peer]

    def _dismiss(self) -> None:
        """Leave the pairs with excluded ranks, so that no receive stays in flight for ever."""
        for peer in self._agreement.own.out & self._pairs.keys():
            self._dismissed.add(peer)
            self._receives.pop(peer, None)
            self._pairs.pop(peer).close()

    def _left_out(self, view: View) -> PeerLost:
        agreement = self._agreement
        who = min(agreement.own.gave_up - agreement.own.out or agreement.left_out_by)
        reason = self._why.get(who, "goes on without this rank")
        parted = [r for r in view.ranks if r in agreement.own.lost]
        if who not in self._why and parted:
            lost = parted[0]
            reason += f", which has lost rank {view.ranks.index(lost)} (it {self._why[lost]})"
        rank_info = self._rank_infos[who]
        doing = f"shrink to view {agreement.own.number}"
        return PeerLost(view.ranks.index(who), rank_info.host, rank_info.address, doing, reason)

    def _late(self) -> str:
        agreement = self._agreement
        late = agreement.silent or agreement.awaited
        named = listed([f"rank {r} ({self._rank_infos[r]})" for r in late], _MOST_NAMED)
        what = "to call it too" if agreement.silent else "to report the ranks it has lost"
        return f"{named} {what}"
