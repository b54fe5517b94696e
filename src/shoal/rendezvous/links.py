"""The proven connections of a rank: keeps them, and says READY over them once it lacks nothing."""

from __future__ import annotations

import errno
import functools
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence

from shoal.rendezvous.introduce import Guide
from shoal.rendezvous.link import Link


class Links:
    """The links of one rank: to every rank of another host, to the guide of its own.

    The lowest rank of a host is its guide: it has a link to every other one, and introduces them
    to each other.

    Args:
        on_lost: hears of a link that broke, by rank, once it is closed.
        enter: see `HostMemory`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        selector: selectors.BaseSelector,
        on_lost: Callable[[int, OSError], None],
        enter: Callable[[int, int, int], None],
    ) -> None:
        self.host: Sequence[int] = [rank]  # the ranks of our host; the first is the guide
        self.ports: dict[str, int] = {}  # by our address, where we listen for other hosts
        self._rank = rank
        self._selector = selector
        self._on_lost = on_lost
        self._enter = enter
        # With whom we prove ourselves to each other, rather than being introduced.
        self._direct = [other for other in range(size) if other != rank]
        self._links: dict[int, Link] = {}
        self._guide = Guide(-1, [], self._links)
        self._lacked: int | None = None  # by our guide, before we lost it

    def begin(self, host: Sequence[int], remote: Sequence[int], memory_fd: int) -> None:
        """Expect links to these ranks, all others of the group. None may be left of before.

        Args:
            host: the ranks of our host, ascending, ourselves included.
            remote: the ranks of other hosts.
            memory_fd: to pass to the other ranks of our host if we are its guide, borrowed.
        """
        guide, *others = host
        is_guide = guide == self._rank
        self.host = host
        self._direct = sorted([*remote, *(others if is_guide else [guide])])
        self._guide = Guide(memory_fd, others if is_guide else [], self._links)

    def add(self, rank: int, sock: socket.socket, n_paths: int = 1) -> None:
        """Keep a proven socket, which the selector knows already: the first of `n_paths`."""
        is_guide = rank == self.host[0]
        to_come = set(self.host) - {self._rank} if is_guide else frozenset()
        link = Link(rank, sock, to_come, n_paths)
        self._links[rank] = link
        on_ready = functools.partial(self._on_ready, link)
        self._selector.modify(sock, selectors.EVENT_READ, on_ready)

    def add_path(self, rank: int, path: int, sock: socket.socket) -> None:
        """Keep another proven socket to a rank that we are linked to; else it is closed."""
        link = self._links.get(rank)
        if link is None or not link.add_path(path, sock):
            sock.close()

    def drop(self, rank: int) -> None:
        """Close the link to this rank, if there is one."""
        link = self._links.pop(rank, None)
        if link is not None:
            if not link.is_settled:
                self._selector.unregister(link.sock)
            link.close()
            if link.is_local:
                self._lacked = link.waits_for
                self._end_introduction()

    def drop_all(self) -> None:
        """Close every link."""
        for rank in list(self._links):
            self.drop(rank)

    def take(self) -> Iterator[Link]:
        """Every link, which is the caller's from here on."""
        while self._links:
            yield self._links.popitem()[1]

    def close(self) -> None:
        """Close every link that was not taken, the selector being done with; idempotent."""
        self._end_introduction()
        for link in self._links.values():
            link.close()

    # What there is and what is lacking.

    def expects(self, rank: int) -> bool:
        """Whether this rank is one to link to, rather than to be introduced to."""
        return rank in self._direct

    def to_dial(self) -> list[int]:
        """The lower ranks that a link, or a path of it, is lacking to."""
        return [rank for rank in self._direct if rank < self._rank and self._lacks(rank)]

    def path_to_dial(self, rank: int) -> int:
        """The path to such a rank that is to be opened next."""
        link = self._links.get(rank)
        return 0 if link is None else link.next_path

    def _lacks(self, rank: int) -> bool:
        link = self._links.get(rank)
        return link is None or link.next_path < link.n_paths

    def met(self) -> set[int]:
        """The ranks that we are linked to, or were introduced to."""
        return set(self._links).union(*(link.introduced for link in self._links.values()))

    @property
    def lacked(self) -> int | None:
        """Whom our guide lacks to introduce us to the others, or lacked when we lost it."""
        guide = self._links.get(self.host[0])
        return self._lacked if guide is None else guide.waits_for

    @property
    def is_open(self) -> bool:
        """Whether we have all our links."""
        if len(self._links) < len(self._direct):
            return False
        return all(link.is_open for link in self._links.values()) and self._guide.is_done

    @property
    def is_complete(self) -> bool:
        """Whether all peers have all theirs as well."""
        return self.is_open and all(link.is_settled for link in self._links.values())

    def unready(self) -> list[int]:
        """The ranks that have not said READY to us yet, of those that we are linked to."""
        return sorted(rank for rank, link in self._links.items() if not link.is_settled)

    @property
    def is_introducing(self) -> bool:
        """Whether `introduce` has something left to say."""
        return self._guide.is_under_way

    # What is said.

    def introduce(self) -> None:
        """Introduce the other ranks of our host, as far as that goes now."""
        broken = self._guide.step()
        if broken is not None:
            self._lose(broken, ConnectionResetError(errno.ECONNRESET, "it closed the connection"))

    def say_whom_we_lack(self) -> None:
        """Tell the others of our host whom they wait for, if we are their guide."""
        self._guide.say_whom_we_lack()

    def say_ready(self) -> None:
        """Once all our links are open, tell every peer.

        So no rank returns, and perhaps closes its group again, while another still needs it: the
        first to return has heard from all ranks that they lack nothing but such words.
        """
        if self.is_open:
            members = self._guide.members()
            # For its members the guide's word stands for all of the host.
            are_ready = all(link.is_settled for link in members)
            for link in list(self._links.values()):
                if are_ready or link not in members:
                    self._say_ready_on(link)

    def _say_ready_on(self, link: Link) -> None:
        try:
            link.say_ready(self.ports)
        except OSError as error:
            # A peer that is settled may have returned and closed before it heard from us.
            if not link.is_settled:
                self._lose(link, error)

    # What happens to them.

    def _on_ready(self, link: Link) -> None:
        if self._links.get(link.rank) is not link:
            return  # dropped earlier in this wake-up
        try:
            link.step()
        except OSError as error:
            self._lose(link, error)
            return
        memory_fd = link.take_memory()
        if memory_fd is not None:
            self._enter(memory_fd, len(self.host), self.host.index(self._rank))
        if link.is_settled:
            self._selector.unregister(link.sock)

    def _lose(self, link: Link, error: OSError) -> None:
        self.drop(link.rank)
        self._on_lost(link.rank, error)

    def _end_introduction(self) -> None:
        """One who took part is gone: the others connect anew, so that all begin together."""
        for link in self._guide.end():
            self.drop(link.rank)
