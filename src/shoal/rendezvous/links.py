"""The links of a rank to the one above it and to those below, and the reports that go over them."""

from __future__ import annotations

import contextlib
import errno
import functools
import selectors
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.rendezvous.link import Ends, TreeLink
from shoal.rendezvous.local_bootstrap import LocalBootstrap
from shoal.rendezvous.roster import Entry, decode

if TYPE_CHECKING:
    from shoal.rendezvous.tree import Tree


class TreeLinks:
    """All links of one rank in one epoch.

    Args:
        tree: says with whom.
        pair_key: by rank and use, what we share with nobody but that rank.
        memory_fd: to pass to the other ranks of our host if we are its host leader, borrowed.
        on_lost: hears of a link that broke, by rank, once it is closed.
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
        self.above: TreeLink | None = None
        self.roster: dict[int, Entry] | None = None  # of all, once the report from above has come
        self.lacked: int | None = None  # who kept all waiting, when we lost the rank above
        self._selector = selector
        self.rank = rank
        self._pair_key = pair_key
        self._on_lost = on_lost
        self._enter = enter
        self._below: dict[int, TreeLink] = {}
        self._entries: dict[int, dict[int, Entry]] = {}  # by rank below, what its report says
        self._bootstrap = LocalBootstrap(memory_fd, tree.members, self._below)
        self._last_report: bytes | None = None  # what all below are told, once we know it

    @property
    def _size(self) -> int:
        return len(self.tree.hosts)

    def add(self, rank: int, sock: socket.socket) -> None:
        """Keep an authenticated socket, which the selector knows, in the place of any before it."""
        self.drop(rank)
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

    def drop(self, rank: int) -> None:
        """Close the link to this rank, if there is one."""
        if rank == self.tree.parent:
            link, self.above = self.above, None
            self.lacked = link.waits_for if link is not None else self.lacked
        else:
            link = self._below.pop(rank, None)
            self._entries.pop(rank, None)
        if link is not None:
            self._selector.unregister(link.sock)
            link.close()
            if rank in self.tree.members:
                self._end_introduction()

    def close(self) -> None:
        """Close every link, the selector being done with; idempotent."""
        for link in self._all():
            link.close()

    def drop_all(self) -> None:
        """Close every link."""
        for link in self._all():
            self._selector.unregister(link.sock)
            link.close()
        self.above = None
        self._below.clear()

    def _all(self) -> list[TreeLink]:
        return [*self._below.values(), *([] if self.above is None else [self.above])]

    # What there is and what is lacking.

    def expects(self, rank: int) -> bool:
        """Whether this rank is to connect to us."""
        return rank in self.tree.below and self._last_report is None

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
        """A rank that is not linked to the one above it, as far as we know or were told."""
        told = [link.waits_for for link in self._all() if link.waits_for is not None]
        if self.lacks_above:
            return self.rank
        return min([*self.lacking(), *told], default=None)

    @property
    def is_introducing(self) -> bool:
        """Whether `introduce` has something left to say."""
        return self._bootstrap.is_under_way

    # What is said.

    def introduce(self) -> None:
        """Introduce the other ranks of our host, as far as that goes now."""
        broken = self._bootstrap.step()
        if broken is not None:
            self._lose(broken, ConnectionResetError(errno.ECONNRESET, "it closed the connection"))

    def send_who_keeps_us_waiting(self) -> None:
        """Tell all whom we are linked to; it serves the text of an error, nothing else."""
        rank = self.kept_waiting_by
        for link in self._all() if rank is not None else ():
            if link.waits_for is None and not link.has_reported and rank is not None:
                with contextlib.suppress(OSError):
                    link.send_waiting(rank)

    def report(self, own: Entry) -> bytes:
        """Ours: what we and all below us have to tell. Needs all their reports."""
        reports = [self._below[rank].report or b"" for rank in sorted(self._below)]
        return own.encode(self.rank) + b"".join(reports)

    def give_word(self, own: Entry) -> None:
        """Send our report to the rank above. We are ready, so that one is there."""
        if self.above is not None:
            self._send(self.above, self.report(own))

    @property
    def has_given_word(self) -> bool:
        """Whether the rank above counts on us, and on all below us."""
        return self.above is not None and self.above.has_reported

    def take_word_back(self) -> None:
        """Close the link to the rank above if we have given it our report."""
        if self.has_given_word and self.tree.parent is not None:
            self.drop(self.tree.parent)

    def conclude(self, own: Entry) -> dict[int, Entry]:
        """All that all must know: we know it, and need nobody any more."""
        if self.tree.parent is None:
            self._last_report, roster = self.report(own), {self.rank: own}
            for entries in self._entries.values():
                roster |= entries
        else:
            self._last_report = (self.above and self.above.report) or b""
            roster = self.roster or {}
            self.drop(self.tree.parent)
        self._bootstrap = LocalBootstrap(
            -1, (), {}
        )  # who leaves from here on needs nothing any more
        return roster

    def pass_on(self) -> None:
        """Tell it to all below; `is_passed_on` says when the last of it is out."""
        for link in list(self._below.values()):
            self._send(link, self._last_report or b"")

    @property
    def is_passed_on(self) -> bool:
        """Whether nothing of what we said is left to send."""
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
        self.drop(link.rank)
        self._on_lost(link.rank, error)

    def _end_introduction(self) -> None:
        """One who took part is gone: the others connect anew, so that all begin together."""
        for link in self._bootstrap.end():
            self.drop(link.rank)
