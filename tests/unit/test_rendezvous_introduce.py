"""Who is told of whom, with which descriptors, and what happens when a socket takes no more."""

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from shoal.rendezvous.introduce import Introduction


class Member:
    """A link that takes some introductions, then refuses; notes who is at the other end of each."""

    def __init__(self, rank: int, takes: Iterator[int]) -> None:
        self.rank = rank
        self.fds = (1000 + rank,)
        self.told: dict[int, tuple[str, Sequence[int]]] = {}
        self._takes = takes
        self.refuses_with = 0

    def introduce(self, peers: Sequence[tuple[int, Sequence[int]]]) -> None:
        if self.refuses_with and next(self._takes) % 3 == 0:
            raise OSError(self.refuses_with, "full")
        for rank, (sock, *fds) in peers:
            assert rank not in self.told
            self.told[rank] = os.readlink(f"/proc/self/fd/{sock}"), fds


def members(n: int, refuses_with: int = 0) -> list[Member]:
    turns = count()
    found = [Member(rank, turns) for rank in range(1, n + 1)]
    for member in found:
        member.refuses_with = refuses_with
    return found


def check(all_members: Sequence[Member], own_fd: int) -> None:
    for one in all_members:
        assert sorted(one.told) == [r for r in range(len(all_members) + 1) if r != one.rank]
        assert one.told.pop(0)[1] == [], own_fd
        for rank, (_, fds) in one.told.items():
            assert fds == [1000 + rank]


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 23])
def test_everyone_is_told_of_everyone_else_once(n: int) -> None:
    before = os.listdir("/proc/self/fd")
    found = members(n)
    introduction = Introduction(0, (0,), found)  # type: ignore[arg-type]
    assert introduction.step() is None
    assert introduction.is_done
    check(found, 0)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("full", [errno.EAGAIN, errno.ETOOMANYREFS])
def test_what_a_socket_does_not_take_is_said_later(full: int) -> None:
    found = members(20, full)
    introduction = Introduction(0, (0,), found)  # type: ignore[arg-type]
    n_steps = 0
    while not introduction.is_done:
        assert introduction.step() is None
        n_steps += 1
    assert n_steps > 10
    check(found, 0)


def test_a_link_that_is_of_no_use_any_more_is_told_and_nothing_stays_open() -> None:
    before = os.listdir("/proc/self/fd")
    found = members(3, errno.EPIPE)
    introduction = Introduction(0, (0,), found)  # type: ignore[arg-type]
    assert introduction.step() is found[0]
    introduction.close()
    assert os.listdir("/proc/self/fd") == before
