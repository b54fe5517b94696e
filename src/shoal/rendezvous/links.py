"""The links of a rank to the one above it and to the ones below, and the reports on these links.

Inside a host the lowest rank introduces the others: each of them proves the key to that rank alone,
and gets from it the one descriptor of the memory that all share, in which all find each other. That
takes n - 1 handshakes instead of n (n - 1) / 2. The lowest rank holds the job key like the others,
so the proof is no weaker.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from shoal.rendezvous.packing import number
from shoal.rendezvous.roster import MAX_ENTRY_BYTES, Entry, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.engine import Peer
    from shoal.rendezvous.tree import Tree

# Kinds of messages, numbered after the kinds of the handshake.
_REPORT, _INTRODUCTION, _WAITING = range(8, 11)
_N_NUMBER: Final = 4  # bytes


class TreeLink:
    """An authenticated connection, until both ends have sent their report.

    The lower end's report covers it and all ranks below it: they have all their links, and the
    report has their entries for the roster (roster.py). The upper end's report covers all ranks.
    Inside a host, the upper end first passes the memory that the host's ranks share.

    Attributes:
        is_open: True if a report may arrive: the memory was entered, or there is none to wait for.
        report: the report received.
        waits_for: the rank that the other end waits for, see `TreeLinks.send_waiting`.
        has_reported: True once this end's report was sent; nothing is sent after it.
    """

    def __init__(self, rank: int, peer: Peer, n_report_bytes: int, awaits_memory: bool) -> None:
        self.rank, self.peer = rank, peer
        self.is_open = not awaits_memory
        self.report: bytes | None = None
        self.waits_for: int | None = None
        self.has_reported = False
        peer.expect(_REPORT, n_report_bytes)
        peer.expect(_WAITING, _N_NUMBER)
        if awaits_memory:
            peer.expect(_INTRODUCTION, _N_NUMBER, takes_fd=True)

    def send_report(self, report: bytes) -> None:
        """Send this end's report."""
        self.has_reported = True
        self.peer.send(_REPORT, report)


class TreeLinks:
    """All links of one rank in one attempt, along its tree.

    `memory_fd`, borrowed, is for the other ranks of the host if this is its lowest rank (-1: none);
    `enter` is from `HostMemory`. Calls `on_lost` with the other rank when a link breaks.
    """

    def __init__(
        self,
        tree: Tree,
        rank: int,
        memory_fd: int,
        on_lost: Callable[[int, OSError], None],
        enter: Callable[[int, int, int], None],
    ) -> None:
        self.tree = tree
        self.rank = rank
        self.above: TreeLink | None = None
        self.roster: dict[int, Entry] | None = None  # of all ranks, from the report from above
        self.awaited: int | None = None  # the rank that a broken link was waiting for
        self.has_reported = False  # other ranks count on this rank and all below it
        self.is_concluded = False  # this rank has the roster and needs no other rank any more
        self._memory_fd = memory_fd
        self._on_lost = on_lost
        self._enter = enter
        self._by_peer: dict[Peer, TreeLink] = {}
        self._below: dict[int, TreeLink] = {}
        self._entries: dict[int, dict[int, Entry]] = {}  # by rank below, from its report
        self._has_introduced = not tree.members

    @property
    def _size(self) -> int:
        return len(self.tree.hosts)

    def add(self, rank: int, peer: Peer) -> None:
        """Keep an authenticated connection; it replaces an earlier one to the same rank."""
        before = self._below.get(rank)
        if before is not None:
            self._lose(before, ConnectionResetError(errno.ECONNRESET, "it connected again"))
        is_above = rank == self.tree.parent
        n_reported = self._size if is_above else len(self.tree.below[rank])
        awaits_memory = is_above and not self.tree.is_leader
        link = TreeLink(rank, peer, n_reported * MAX_ENTRY_BYTES, awaits_memory)
        self._by_peer[peer] = link
        if is_above:
            self.above = link
        else:
            self._below[rank] = link
            self._introduce()

    def _introduce(self) -> None:
        """Pass the memory to the other ranks of this host once all of them are linked."""
        if self._has_introduced or not all(rank in self._below for rank in self.tree.members):
            return
        self._has_introduced = True
        n_local = number(len(self.tree.host), _N_NUMBER)
        for rank in self.tree.members:
            self._below[rank].peer.send(_INTRODUCTION, n_local, self._memory_fd)

    # Linked and missing ranks.

    def expects(self, rank: int) -> bool:
        """Return True if that rank may connect to this one."""
        return rank in self.tree.below and not self.has_reported

    def needs(self, rank: int) -> bool:
        """Return True if the loss of the link to that rank ends the attempt.

        It does not before a rank below has this rank's memory, or the rank above its report.
        """
        is_below = rank != self.tree.parent
        is_early = is_below and (not self._has_introduced or rank not in self.tree.members)
        return self.has_reported or not is_early

    @property
    def awaits_above(self) -> bool:
        return self.above is None and self.tree.parent is not None

    def unlinked(self) -> list[int]:
        """Return the ranks below that are not linked to this one."""
        return sorted(self.tree.below.keys() - self._below.keys())

    def silent(self) -> list[int]:
        """Return the linked ranks below that have not sent their report."""
        return sorted(self._below.keys() - self._entries.keys())

    @property
    def is_ready(self) -> bool:
        """True if this rank can report: all below have, and it has entered its host's memory."""
        is_entered = self.tree.parent is None or (self.above is not None and self.above.is_open)
        return len(self._entries) == len(self.tree.below) and is_entered

    @property
    def kept_waiting_by(self) -> int | None:
        """A rank that is known not to be linked to the one above it."""
        known = [link.waits_for for link in self._by_peer.values() if link.waits_for is not None]
        if self.awaits_above:
            return self.rank
        return min([*self.unlinked(), *known], default=None)

    # Sending.

    def send_waiting(self) -> None:
        """Send `kept_waiting_by` over all links; it is used only in error texts."""
        rank = self.kept_waiting_by
        for link in self._by_peer.values() if rank is not None else ():
            if link.waits_for is None and not link.has_reported and rank is not None:
                link.peer.send(_WAITING, number(rank, _N_NUMBER))

    def send_report(self, own: Entry) -> None:
        """Send the report to the rank above; needs `is_ready`."""
        self.has_reported = True
        if self.above is not None:
            self.above.send_report(self._report(own))

    def _report(self, own: Entry) -> bytes:
        reports = [self._below[rank].report or b"" for rank in sorted(self._below)]
        return own.encode(self.rank) + b"".join(reports)

    def conclude(self, own: Entry) -> dict[int, Entry]:
        """Return the roster of all ranks, and send it to the ranks below.

        Rank 0 makes it from their reports; another rank has received it from above.
        """
        self.has_reported = self.is_concluded = True
        if self.above is None:
            report, roster = self._report(own), {self.rank: own}
            for entries in self._entries.values():
                roster |= entries
        else:
            report, roster = self.above.report or b"", self.roster or {}
            self._drop(self.above)
        for link in self._below.values():
            link.send_report(report)
        return roster

    @property
    def is_passed_on(self) -> bool:
        """True if no sent message is queued any more."""
        return not any(peer.n_queued for peer in self._by_peer)

    # Receiving.

    def receive(self, peer: Peer, kind: int, body: bytes, fd: int) -> None:
        """Handle a message."""
        link = self._by_peer[peer]
        try:
            if kind == _REPORT:
                self._take_report(link, body)
            elif kind == _INTRODUCTION:
                self._take_introduction(link, body, fd)
            else:
                self._take_waiting(link, body)
        except ConnectionError as error:
            self._lose(link, error)

    def _take_introduction(self, link: TreeLink, body: bytes, fd: int) -> None:
        host, n_local = self.tree.host, int.from_bytes(body, "little")
        why = "it spoke out of turn" if link.is_open else ""
        if n_local != len(host):
            why = f"it introduced {n_local} ranks of this host, expected {len(host)}"
        if why:
            if fd >= 0:
                os.close(fd)
            raise ConnectionResetError(errno.EPROTO, why)
        link.is_open = True
        self._enter(fd, n_local, host.index(self.rank))

    def _take_waiting(self, link: TreeLink, body: bytes) -> None:
        rank = int.from_bytes(body, "little")
        if link.report is not None or rank >= self._size:
            raise ConnectionResetError(errno.EPROTO, "it spoke out of turn")
        link.waits_for = rank

    def _take_report(self, link: TreeLink, body: bytes) -> None:
        if link.report is not None or not link.is_open:
            raise ConnectionResetError(errno.EPROTO, "it spoke out of turn")
        link.report, link.waits_for = body, None
        is_above, least_paths = link is self.above, 1 if self.tree.n_hosts > 1 else 0
        ranks = frozenset(range(self._size)) if is_above else self.tree.below[link.rank]
        try:
            entries = decode(body, ranks, least_paths)
        except ValueError as error:
            why = f"its report is malformed: {error}"
            raise ConnectionResetError(errno.ECONNRESET, why) from error
        if is_above:
            self.roster = entries
            link.peer.close()  # it may leave from now on, which is no loss
        else:
            self._entries[link.rank] = entries

    def lose(self, peer: Peer, error: OSError) -> None:
        """Handle the loss of a connection."""
        self._lose(self._by_peer[peer], error)

    def _lose(self, link: TreeLink, error: OSError) -> None:
        self.awaited = link.waits_for
        self._drop(link)
        self._on_lost(link.rank, error)

    def _drop(self, link: TreeLink) -> None:
        if link is self.above:
            self.above = None
        else:
            self._below.pop(link.rank, None)
            self._entries.pop(link.rank, None)
        del self._by_peer[link.peer]
        link.peer.close()
