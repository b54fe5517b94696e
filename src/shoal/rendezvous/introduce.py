"""The lowest rank of a host introduces the others to each other.

Each of them proves itself to that rank alone, and gets from it, for every other rank of the host,
that rank's descriptors and one end of a new socket pair: n - 1 handshakes instead of n (n - 1) / 2.
Who introduces holds the job key, as whoever is introduced does, so nothing rests on less proof.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Generator, Mapping, Sequence
from typing import Final

from shoal.rendezvous.link import MAX_FDS, MAX_FDS_AT_ONCE, Link

# How many ranks are introduced by one message, and a bound on the sockets that are open meanwhile.
_N_AT_ONCE: Final = 8
assert _N_AT_ONCE * (1 + MAX_FDS) <= MAX_FDS_AT_ONCE

_UNIX: Final = socket.AF_UNIX

Telling = tuple[Link, list[tuple[int, Sequence[int]]]]


class Guide:
    """Who introduces the ranks of a host, in one epoch: waits for all of them, then begins.

    Args:
        rank: who introduces.
        fds: its own descriptors, borrowed.
        others: all other ranks of the host, ascending; none if it is not the lowest.
        links: by rank, its links as they come and go.
    """

    def __init__(
        self, rank: int, fds: Sequence[int], others: Sequence[int], links: Mapping[int, Link]
    ) -> None:
        self._rank = rank
        self._fds = fds
        self._others = others
        self._links = links
        self._introduction: Introduction | None = None

    @property
    def is_done(self) -> bool:
        """Whether nobody is left to introduce."""
        return not self._others or (self._introduction is not None and self._introduction.is_done)

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun and is not done."""
        return self._introduction is not None and not self._introduction.is_done

    def members(self) -> list[Link]:
        """The links to those of the others that are here."""
        return [self._links[rank] for rank in self._others if rank in self._links]

    def step(self) -> Link | None:
        """Begin once all are here, then go on; returns a link that is of no use any more."""
        if self._introduction is None:
            members = self.members()
            is_time = members and len(members) == len(self._others)
            if not is_time or not all(link.is_open for link in members):
                return None
            self._introduction = Introduction(self._rank, self._fds, members)
        return self._introduction.step()

    def say_whom_we_lack(self) -> None:
        """Tell those who are here whom they wait for, if they do."""
        members = self.members()
        lacking = set(self._others) - {link.rank for link in members}
        for link in members if lacking else ():
            with contextlib.suppress(OSError):  # it serves the text of an error, nothing else
                link.say_waiting(min(lacking))

    def end(self) -> list[Link]:
        """Call it off; returns the links that are of no use any more. Idempotent."""
        introduction, self._introduction = self._introduction, None
        if introduction is None:
            return []
        introduction.close()
        return self.members()


class Introduction:
    """One round of introductions, sent as far as the sockets take it.

    Args:
        rank: who introduces.
        fds: its own descriptors, borrowed.
        members: proven links to all other ranks of the host, whose descriptors are here.
    """

    def __init__(self, rank: int, fds: Sequence[int], members: Sequence[Link]) -> None:
        self.is_done = False
        self._tellings = _tellings(rank, fds, members)
        self._next = next(self._tellings)

    def step(self) -> Link | None:
        """Go on; returns a link that is of no use any more, if there is one.

        What cannot be sent because the receiver has not read what came before (also: because too
        many descriptors are on their way, ETOOMANYREFS) is left for the next step.
        """
        while not self.is_done:
            link, peers = self._next
            try:
                link.introduce(peers)
            except OSError as error:
                wait = error.errno in (errno.EAGAIN, errno.ETOOMANYREFS)
                return None if wait else link
            following = next(self._tellings, None)
            self.is_done = following is None
            if following is not None:
                self._next = following
        return None

    def close(self) -> None:
        """Close what has not been sent; idempotent."""
        self._tellings.close()


def _tellings(
    rank: int, fds: Sequence[int], members: Sequence[Link]
) -> Generator[Telling, None, None]:
    blocks = [members[at : at + _N_AT_ONCE] for at in range(0, len(members), _N_AT_ONCE)]
    for at, block in enumerate(blocks):
        for other in blocks[at:]:
            both = list(block) + (list(other) if other is not block else [])
            told: dict[int, list[tuple[int, Sequence[int]]]] = {link.rank: [] for link in both}
            made: list[socket.socket] = []
            try:
                for one in block:
                    if other is block:
                        told[one.rank].append((rank, fds))
                    for two in other:
                        if one.rank < two.rank:
                            ends = socket.socketpair(
                                _UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
                            )
                            made += ends
                            told[one.rank].append((two.rank, (ends[0].fileno(), *two.fds)))
                            told[two.rank].append((one.rank, (ends[1].fileno(), *one.fds)))
                yield from ((link, told[link.rank]) for link in both)
            finally:
                for sock in made:
                    sock.close()
