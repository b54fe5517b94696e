"""The links of a rank to the one above it and to those below, and the reports that go over them.

Inside a host the lowest rank introduces the others: each of them proves itself to that rank alone,
and gets from it the one descriptor of the memory that all share, in which all find each other. That
is n - 1 handshakes instead of n (n - 1) / 2. The lowest rank holds the job key, as the others do,
so nothing rests on less proof.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import selectors
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from shoal.rendezvous.link import Ends, TreeLink
from shoal.rendezvous.roster import Entry, decode

if TYPE_CHECKING:
    from shoal.rendezvous.tree import Tree

_LATER: Final = (errno.EAGAIN, errno.ETOOMANYREFS)
"""The receiver has not read what came before, or too many descriptors are on their way."""


class TreeLinks:
    """All links of one rank in one attempt.

    Args:
        tree: says with whom.
        pair_key: by rank and use, what we share with that rank alone.
        memory_fd: to pass to the other ranks of our host if we are its lowest, borrowed.
        on_lost: called when a link broke, by rank, before it is closed.
        enter: see `HostMemory`.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        tree: Tree,
        rank: int,
        pair_key: Callable[[int, str], bytes],
        memory_fd: int,
        on_lost: Callable[[int, OSError], None],
        enter: Callable[[int, int, int], None],
    ) -> None:
        self.tree = tree
        self.rank = rank
        self.above: TreeLink | None = None
        self.roster: dict[int, Entry] | None = None  # of all, once the report from above has come
        self.lacked: int | None = None  # the rank that a link which broke was waiting for
        self.has_reported = False  # other ranks count on us, and on all below us
        self.is_concluded = False  # we know all, and need no other rank any more
        self._selector = selector
        self._pair_key = pair_key
        self._memory_fd = memory_fd
        self._on_lost = on_lost
        self._enter = enter
        self._below: dict[int, TreeLink] = {}
        self._entries: dict[int, dict[int, Entry]] = {}  # by rank below, from its report
        self._left: list[TreeLink] | None = None  # to introduce; None before that begins
        self._last_report = b""  # for all below, once we are concluded

    @property
    def _size(self) -> int:
        return len(self.tree.hosts)

    def add(self, rank: int, sock: socket.socket) -> None:
        """Keep an authenticated socket, which the selector knows, in the place of any before it."""
        before = self._below.get(rank)
        if before is not None:
            self._lose(before, ConnectionResetError(errno.ECONNRESET, "it connected again"))
        link = TreeLink(sock, self._ends(rank))
        if rank == self.tree.parent:
            self.above = link
        else:
            self._below[rank] = link
        self._watch(link, selectors.EVENT_READ)

    def _ends(self, rank: int) -> Ends:
        up, down = self._pair_key(rank, "report up"), self._pair_key(rank, "report down")
        if rank != self.tree.parent:
            n_reported = len(self.tree.below[rank])
            return Ends(rank, down, up, False, n_reported, 0, self._size)
        n_local = 0 if self.tree.is_leader else len(self.tree.host)
        return Ends(rank, up, down, True, self._size, n_local, self._size)

    def close(self) -> None:
        """Close every link, the selector being done with; idempotent."""
        for link in self._all():
            link.close()

    def _all(self) -> list[TreeLink]:
        return [*self._below.values(), *([] if self.above is None else [self.above])]

    # What there is and what is lacking.

    def expects(self, rank: int) -> bool:
        """Whether this rank is to connect to us."""
        return rank in self.tree.below and not self.has_reported

    def needs(self, rank: int) -> bool:
        """Whether the loss of its link ends the attempt.

        It does not before a rank below has our memory, or the rank above our report.
        """
        is_below = rank != self.tree.parent
        is_early = is_below and (self._left is None or rank not in self.tree.members)
        return self.has_reported or not is_early

    @property
    def lacks_above(self) -> bool:
        """Whether we are still to connect to the rank above."""
        return self.above is None and self.tree.parent is not None

    def lacking(self) -> list[int]:
        """The ranks below that are not linked to us."""
        return sorted(self.tree.below.keys() - self._below.keys())

    def silent(self) -> list[int]:
        """The ranks below that are linked to us and have not sent their report."""
        return sorted(self._below.keys() - self._entries.keys())

    @property
    def is_ready(self) -> bool:
        """Whether we can send our report: all below have, and we are in our host's memory."""
        is_entered = self.tree.parent is None or (self.above is not None and self.above.is_open)
        return len(self._entries) == len(self.tree.below) and is_entered

    @property
    def kept_waiting_by(self) -> int | None:
        """A rank that is not linked to the one above it, as far as we know."""
        known = [link.waits_for for link in self._all() if link.waits_for is not None]
        if self.lacks_above:
            return self.rank
        return min([*self.lacking(), *known], default=None)

    # What is sent.

    def introduce(self) -> bool:
        """Pass the memory to the other ranks of our host once all are here; True: call it again.

        What a socket does not take is left for then.
        """
        if self._left is None:
            if not all(rank in self._below for rank in self.tree.members):
                return False
            self._left = [self._below[rank] for rank in self.tree.members[::-1]]
        while self._left:
            try:
                self._left[-1].introduce(self._memory_fd, 1 + len(self.tree.members))
            except OSError as error:
                if error.errno not in _LATER:
                    self._lose(self._left[-1], error)
                return True
            self._left.pop()
        return False

    def send_who_keeps_us_waiting(self) -> None:
        """Send it over all links; it serves the text of an error, nothing else."""
        rank = self.kept_waiting_by
        for link in self._all() if rank is not None else ():
            if link.waits_for is None and not link.has_reported and rank is not None:
                with contextlib.suppress(OSError):
                    link.send_waiting(rank)

    def send_report(self, own: Entry) -> None:
        """Send our report to the rank above. We are ready, so that one is there."""
        self.has_reported = True
        if self.above is not None:
            self._send(self.above, self._report(own))

    def _report(self, own: Entry) -> bytes:
        reports = [self._below[rank].report or b"" for rank in sorted(self._below)]
        return own.encode(self.rank) + b"".join(reports)

    def conclude(self, own: Entry) -> dict[int, Entry]:
        """Return the roster of all, and send it to the ranks below.

        Rank 0 makes it of their reports; any other has got it from above.
        """
        self.has_reported = self.is_concluded = True
        if self.above is None:
            self._last_report, roster = self._report(own), {self.rank: own}
            for entries in self._entries.values():
                roster |= entries
        else:
            self._last_report, roster = self.above.report or b"", self.roster or {}
            self._drop(self.above)
        for link in list(self._below.values()):
            self._send(link, self._last_report)
        return roster

    @property
    def is_passed_on(self) -> bool:
        """Whether nothing of what we sent is on its way out."""
        return not any(link.has_more_to_send for link in self._all())

    def _send(self, link: TreeLink, report: bytes) -> None:
        try:
            link.send_report(report)
            self._watch(link, selectors.EVENT_READ)
        except OSError as error:
            self._lose(link, error)

    # What happens to them.

    def _watch(self, link: TreeLink, events: int) -> None:
        events |= selectors.EVENT_WRITE if link.has_more_to_send else 0
        self._selector.modify(link.sock, events, functools.partial(self._on_ready, link))

    def _on_ready(self, link: TreeLink) -> None:
        if link not in (self.above, self._below.get(link.rank)):
            return  # dropped earlier in this wake-up
        try:
            if link.has_more_to_send:
                link.flush()
                self._watch(link, selectors.EVENT_READ)
            waited_for = link.waits_for
            link.step()
            if link.waits_for not in (None, waited_for):
                self.send_who_keeps_us_waiting()
            self._heed(link)
        except OSError as error:
            self._lose(link, error)

    def _heed(self, link: TreeLink) -> None:
        """Act on what has come over this link."""
        memory_fd = link.take_memory()
        if memory_fd is not None:
            host = self.tree.host
            self._enter(memory_fd, len(host), host.index(self.rank))
        if link.report is None:
            return
        least_paths = 1 if self.tree.n_hosts > 1 else 0
        try:
            if link is not self.above:
                if link.rank not in self._entries:
                    ranks = self.tree.below[link.rank]
                    self._entries[link.rank] = decode(link.report, ranks, least_paths)
            elif self.roster is None:
                self.roster = decode(link.report, frozenset(range(self._size)), least_paths)
        except ValueError as error:
            why = f"its report makes no sense: {error}"
            raise ConnectionResetError(errno.ECONNRESET, why) from error

    def _lose(self, link: TreeLink, error: OSError) -> None:
        self.lacked = link.waits_for
        self._on_lost(link.rank, error)
        self._drop(link)

    def _drop(self, link: TreeLink) -> None:
        if link is self.above:
            self.above = None
        else:
            self._below.pop(link.rank, None)
            self._entries.pop(link.rank, None)
        self._selector.unregister(link.sock)
        link.close()
