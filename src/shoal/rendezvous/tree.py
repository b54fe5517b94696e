"""Who connects to whom: the ranks of a host to its lowest, and those along a binary tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Tree:
    """Where one rank stands in the tree of all, whose root is rank 0.

    Args:
        hosts: by rank, the number of its host, in the order of their lowest ranks.
    """

    def __init__(self, hosts: Sequence[int], rank: int) -> None:
        self.hosts = hosts
        self.host = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
        self.is_guide = self.host[0] == rank
        self.members = self.host[1:] if self.is_guide else ()
        self.n_hosts = 1 + max(hosts)
        self.parent: int | None = self.host[0]
        self.below: dict[int, frozenset[int]] = {
            other: frozenset({other}) for other in self.members
        }
        if not self.is_guide:
            return
        number, guides = hosts[rank], _guides(hosts)
        self.parent = guides[(number - 1) // 2] if number else None
        for child in _children(number, self.n_hosts):
            inside = set(_subtree(child, self.n_hosts))
            ranks = frozenset(other for other, host in enumerate(hosts) if host in inside)
            self.below[guides[child]] = ranks

    def is_local(self, rank: int) -> bool:
        """Whether a rank is on our host."""
        return rank in self.host

    def parent_of(self, rank: int) -> int | None:
        """The rank above another one; for messages."""
        return Tree(self.hosts, rank).parent

    @property
    def has_hosts_below(self) -> bool:
        """Whether ranks of other hosts connect to this one."""
        return len(self.below) > len(self.members)


def _guides(hosts: Sequence[int]) -> dict[int, int]:
    """By host, its lowest rank."""
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
