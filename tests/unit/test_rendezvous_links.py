"""The lowest rank of a host passes the memory once all are here, also if sockets take no more."""

import errno
import selectors
import socket
from collections.abc import Iterator
from itertools import count

import pytest

from shoal.rendezvous.link import TreeLink
from shoal.rendezvous.links import TreeLinks
from shoal.rendezvous.tree import Tree


class Host:
    """The links of rank 0 to so many ranks of its host; notes what each was passed."""

    def __init__(self, n: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.lost: list[int] = []
        self.links = TreeLinks(
            self.selector,
            Tree((1 + n) * (0,), 0),
            0,
            lambda _rank, _use: b"key" * 11,
            42,
            lambda rank, _error: self.lost.append(rank),
            lambda *_: None,
        )
        self._far: list[socket.socket] = []

    def add(self, rank: int) -> None:
        near, far = socket.socketpair()
        self._far.append(far)
        self.selector.register(near, selectors.EVENT_READ)
        self.links.add(rank, near)

    def close(self) -> None:
        self.links.close()
        self.selector.close()
        for sock in self._far:
            sock.close()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What each rank was passed."""
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(TreeLink, "introduce", lambda link, fd, n: found.append((link.rank, fd, n)))
    return found


def refuse(monkeypatch: pytest.MonkeyPatch, turns: Iterator[int], number: int) -> None:
    """Let every third introduction fail."""
    introduce = TreeLink.introduce

    def introduce_or_refuse(link: TreeLink, fd: int, n_local: int) -> None:
        if next(turns) % 3 == 0:
            raise OSError(number, "full")
        introduce(link, fd, n_local)

    monkeypatch.setattr(TreeLink, "introduce", introduce_or_refuse)


@pytest.mark.parametrize("n", [0, 1, 2, 7, 23])
def test_each_is_introduced_once_when_all_are_here(
    n: int, passed: list[tuple[int, int, int]]
) -> None:
    host = Host(n)
    for rank in range(1, n):
        host.add(rank)
        assert not host.links.introduce()
        assert not passed
    if n:
        host.add(n)
    assert not host.links.introduce()
    assert not host.links.introduce()
    assert sorted(passed) == [(rank, 42, 1 + n) for rank in range(1, 1 + n)]
    host.close()


@pytest.mark.parametrize("full", [errno.EAGAIN, errno.ETOOMANYREFS])
def test_what_a_socket_does_not_take_is_sent_later(
    full: int, passed: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, count(), full)
    host = Host(20)
    for rank in range(1, 21):
        host.add(rank)
    n_steps = 1
    while host.links.introduce():
        n_steps += 1
    assert n_steps > 9
    assert sorted(passed) == [(rank, 42, 21) for rank in range(1, 21)]
    assert not host.lost
    host.close()


def test_a_rank_that_is_lost_is_needed_once_the_memory_is_passed(
    passed: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, count(), errno.EPIPE)
    host = Host(3)
    for rank in range(1, 4):
        host.add(rank)
        assert not host.links.needs(rank)
    host.links.introduce()
    assert host.lost == [1]
    assert all(host.links.needs(rank) for rank in range(1, 4))
    assert passed == []
    host.close()
