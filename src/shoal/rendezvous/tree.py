"""The tree of connections: a host's ranks to its lowest, and the lowest along a binary tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Tree:
    """One rank's place in the tree of all ranks, whose root is rank 0.

    Args:
        hosts: by rank, the number of its host, in the order of their lowest ranks.
    """

    def __init__(self, hosts: Sequence[int], rank: int) -> None:
        self.hosts = hosts
        self.host = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
        self.is_leader = self.host[0] == rank
        self.members = self.host[1:] if self.is_leader else ()
        self.n_hosts = 1 + max(hosts)
        self.parent: int | None = self.host[0]
        self.below: dict[int, frozenset[int]] = {
            other: frozenset({other}) for other in self.members
        }
        if not self.is_leader:
            return
        number, leaders = hosts[rank], _leaders(hosts)
        self.parent = leaders[(number - 1) // 2] if number else None
        for child in _children(number, self.n_hosts):
            inside = set(_subtree(child, self.n_hosts))
            ranks = frozenset(other for other, host in enumerate(hosts) if host in inside)
            self.below[leaders[child]] = ranks

    def is_local(self, rank: int) -> bool:
        """Return True if a rank is on this rank's host."""
        return rank in self.host

    def parent_of(self, rank: int) -> int | None:
        """Return the rank above another one, for messages."""
        return Tree(self.hosts, rank).parent

    @property
    def has_hosts_below(self) -> bool:
        """True if ranks of other hosts connect to this one."""
        return len(self.below) > len(self.members)


def _leaders(hosts: Sequence[int]) -> dict[int, int]:
    """Return the lowest rank of each host."""
    found: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, rank)
    return found


def _children(host: int, n_hosts: int) -> range:
    return range(2 * host + 1, min(2 * host + 3, n_hosts))


def _subtree(host: int, n_hosts: int) -> Iterator[int]:
    yield host
    for child in _children(host, n_hosts):
        yield from _subtree(child, n_hosts)
