"""The lowest rank of a host introduces the others to the memory that they share.

Each of them proves itself to that rank alone, and gets from it the one descriptor of that memory,
in which all of them find each other: n - 1 handshakes instead of n (n - 1) / 2. Who introduces
holds the job key, as whoever is introduced does, so nothing rests on less proof.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from shoal.rendezvous.link import TreeLink


class HostMemory(NamedTuple):
    """What the ranks of a host share, made by one of them and entered by all.

    Args:
        make: called on the lowest rank of a host with the number of its ranks, once that is known
            (again if the ranks change); it has entered what it makes. Returns the descriptor to
            pass to the others, borrowed; or -1 to pass none.
        enter: called on each of the others with that descriptor, which is its own from here on, the
            number of ranks and its place among them; again if one of them is started again. What
            it raises ends the join. Nobody looks at the memory before all have entered.
    """

    make: Callable[[int], int] = lambda _n_local: -1
    enter: Callable[[int, int, int], None] = lambda _fd, _n_local, _local: None


_LATER: Final = (errno.EAGAIN, errno.ETOOMANYREFS)
"""The receiver has not read what came before, or too many descriptors are on their way."""


class LocalBootstrap:
    """Who introduces the ranks of a host, in one epoch: waits for all of them, then begins.

    Args:
        memory_fd: the descriptor to pass, borrowed.
        others: all other ranks of the host, ascending; none if it is not the lowest.
        links: by rank, its links as they come and go.
    """

    def __init__(
        self, memory_fd: int, others: Sequence[int], links: Mapping[int, TreeLink]
    ) -> None:
        self._memory_fd = memory_fd
        self._others = others
        self._links = links
        self._left: list[TreeLink] | None = None  # to introduce; None before it begins

    @property
    def is_done(self) -> bool:
        """Whether nobody is left to introduce."""
        return not self._others or self._left == []

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun and is not done."""
        return bool(self._left)

    def members(self) -> list[TreeLink]:
        """The links to those of the others that are here."""
        return [self._links[rank] for rank in self._others if rank in self._links]

    def step(self) -> TreeLink | None:
        """Begin once all are here, then go on; returns a link that is of no use any more.

        What cannot be sent now is left for the next step.
        """
        if self._left is None:
            members = self.members()
            if not members or len(members) < len(self._others):
                return None
            self._left = members[::-1]
        while self._left:
            try:
                self._left[-1].introduce(self._memory_fd, 1 + len(self._others))
            except OSError as error:
                return None if error.errno in _LATER else self._left[-1]
            self._left.pop()
        return None

    def end(self) -> list[TreeLink]:
        """Call it off; returns the links that are of no use any more. Idempotent."""
        has_begun, self._left = self._left is not None, None
        return self.members() if has_begun else []
