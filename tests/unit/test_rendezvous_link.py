"""What a proven peer says wrongly ends its link, in words, and leaves no descriptor behind."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from shoal.rendezvous.link import Link


@contextlib.contextmanager
def linked(to_come: set[int]) -> Iterator[tuple[Link, Link]]:
    """The guide's end of a link, and that of a rank that awaits introductions to these."""
    guide, member = socket.socketpair()
    with (
        contextlib.closing(Link(1, guide)) as one,
        contextlib.closing(Link(0, member, to_come)) as other,
    ):
        for sock in (guide, member):
            sock.setblocking(False)
        yield one, other


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_introduction_passes_the_memory_once_and_opens_the_link_when_that_is_taken() -> None:
    before = n_open()
    with linked({0, 2}) as (guide, member):
        guide.introduce(0, 3)
        member.step()
        assert (member.is_open, member.introduced) == (False, set())
        fd = member.take_memory()
        assert fd is not None
        assert os.path.sameopenfile(fd, 0)
        assert not os.get_inheritable(fd)
        os.close(fd)
        assert (member.is_open, member.introduced) == (True, {0, 2})
        assert member.take_memory() is None
        assert not member.is_settled
    assert n_open() == before


def test_memory_that_is_not_taken_is_closed_with_the_link() -> None:
    before = n_open()
    with linked({0, 2}) as (guide, member):
        guide.introduce(0, 3)
        member.step()
        assert n_open() == before + 3
    assert n_open() == before


@pytest.mark.parametrize("n_local", [2, 4, 4_000_000_000])
def test_an_introduction_of_another_number_of_ranks_ends_the_link(n_local: int) -> None:
    before = n_open()
    with linked({0, 2}) as (guide, member):
        guide.introduce(0, n_local)
        why = f"it introduced {n_local} ranks of this host, and there are 3"
        with pytest.raises(ConnectionResetError, match=why):
            member.step()
        assert member.take_memory() is None
    assert n_open() == before


def test_an_introduction_that_is_not_due_ends_the_link() -> None:
    before = n_open()
    with linked({0, 2}) as (guide, member):
        guide.introduce(0, 3)
        guide.introduce(0, 3)
        with pytest.raises(ConnectionResetError, match="it spoke out of turn"):
            member.step()
    with linked({0, 2}) as (guide, member):
        member.introduce(0, 1)
        with pytest.raises(ConnectionResetError, match="it spoke out of turn"):
            guide.step()
    assert n_open() == before


def test_a_guide_cannot_wait_for_a_rank_that_is_not_of_this_host() -> None:
    with linked({0, 2}) as (guide, member):
        guide.say_waiting(2)
        member.step()
        assert member.waits_for == 2
        guide.say_waiting(7)
        with pytest.raises(ConnectionResetError, match="it spoke out of turn"):
            member.step()


@contextlib.contextmanager
def linked_by_tcp() -> Iterator[tuple[Link, Link]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname()[:2])
        far, _ = server.accept()
    with contextlib.closing(Link(1, near)) as one, contextlib.closing(Link(0, far)) as other:
        for sock in (near, far):
            sock.setblocking(False)
        yield one, other


@pytest.mark.parametrize(
    ("ports", "where"), [({"127.0.0.1": 4711}, "127.0.0.1:4711"), ({"10.0.0.1": 4711}, "None")]
)
def test_a_peer_that_is_ready_says_where_it_can_be_asked_for_lost_connections(
    ports: dict[str, int], where: str
) -> None:
    with linked_by_tcp() as (one, other):
        one.say_ready(ports)
        while not other.is_settled:
            other.step()
        assert str(other.listens_at) == where
