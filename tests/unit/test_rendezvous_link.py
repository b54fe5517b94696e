"""What a proven peer says wrongly ends its link, in words, and leaves no descriptor behind."""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

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


def test_introductions_to_those_that_are_awaited_are_taken() -> None:
    with linked({0, 2}) as (guide, member):
        guide.introduce([(0, (0,)), (2, (0, 1))])
        member.step()
        assert member.is_open
        assert member.introduced == {0, 2}
        assert (len(member.fds), member.is_settled) == (1, False)


@pytest.mark.parametrize(
    ("ranks", "strange"), [([0, 7], 7), ([0, 1], 1), ([4_000_000_000, 2], 4_000_000_000)]
)
def test_an_introduction_to_a_rank_that_is_not_of_this_host_ends_the_link(
    ranks: Sequence[int], strange: int
) -> None:
    before = n_open()
    with linked({0, 2}) as (guide, member):
        guide.introduce([(rank, (0, 1)) for rank in ranks])
        with pytest.raises(ConnectionResetError, match=f"it introduced rank {strange}, which is"):
            member.step()
        assert member.introduced == set()
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
