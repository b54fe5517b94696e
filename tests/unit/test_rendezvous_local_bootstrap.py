"""Who is introduced, and what happens when a socket takes no more."""

import errno
from collections.abc import Iterator
from itertools import count

import pytest

from shoal.rendezvous.local_bootstrap import LocalBootstrap


class Member:
    """A link that takes some introductions, then refuses; notes what it was told."""

    def __init__(self, rank: int, turns: Iterator[int], refuses_with: int) -> None:
        self.rank = rank
        self.told: list[tuple[int, int]] = []
        self._turns = turns
        self._refuses_with = refuses_with

    def introduce(self, memory_fd: int, n_local: int) -> None:
        if self._refuses_with and next(self._turns) % 3 == 0:
            raise OSError(self._refuses_with, "full")
        self.told.append((memory_fd, n_local))


def members(n: int, refuses_with: int = 0) -> dict[int, Member]:
    turns = count()
    return {rank: Member(rank, turns, refuses_with) for rank in range(1, n + 1)}


def bootstrap_of(found: dict[int, Member], ranks: range) -> LocalBootstrap:
    return LocalBootstrap(42, ranks, found)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 7, 23])
def test_everyone_is_told_once_when_all_are_here(n: int) -> None:
    found = members(n)
    leader = bootstrap_of(found, range(1, n + 1))
    last = found.pop(n)
    assert leader.step() is None
    assert not leader.is_done
    assert not any(member.told for member in found.values())
    found[n] = last
    assert leader.step() is None
    assert leader.is_done
    leader.step()
    assert [member.told for member in found.values()] == n * [[(42, 1 + n)]]


def test_who_is_alone_introduces_nobody() -> None:
    leader = bootstrap_of({}, range(0))
    assert leader.step() is None
    assert leader.is_done


@pytest.mark.parametrize("full", [errno.EAGAIN, errno.ETOOMANYREFS])
def test_what_a_socket_does_not_take_is_said_later(full: int) -> None:
    found = members(20, full)
    leader = bootstrap_of(found, range(1, 21))
    n_steps = 0
    while not leader.is_done:
        assert leader.step() is None
        n_steps += 1
        assert leader.is_under_way != leader.is_done
    assert n_steps > 9
    assert [member.told for member in found.values()] == 20 * [[(42, 21)]]


def test_a_link_that_is_of_no_use_any_more_is_told_and_all_can_begin_anew() -> None:
    found = members(3, errno.EPIPE)
    leader = bootstrap_of(found, range(1, 4))
    assert leader.step() is found[1]
    assert {link.rank for link in leader.end()} == {1, 2, 3}
    assert leader.end() == []
    assert not leader.is_done
