"""Messages that links accept from peers, and when a host's lowest rank passes its memory."""

import gc
import os
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from shoal.engine import Endpoint, Hello, Peer, Progress
from shoal.rendezvous.links import TreeLinks
from shoal.rendezvous.listener import listen_unix
from shoal.rendezvous.packing import number
from shoal.rendezvous.roster import MAX_ENTRY_BYTES, Entry
from shoal.rendezvous.tree import Tree

KEY = b"k" * 32
REPORT, INTRODUCTION, WAITING = 8, 9, 10
LONG_S = 60.0


class Rank:
    """A rank of one host with its endpoint and links; records their events."""

    def __init__(self, rank: int, size: int) -> None:
        self.entered: list[tuple[bool, int, int]] = []
        self.losses: list[tuple[int, str]] = []
        self.peers: dict[int, Peer] = {}
        tree, memory_fd = Tree(size * (0,), rank), 0
        self.links = TreeLinks(tree, rank, memory_fd, self._lose, self._enter)
        self.endpoint = Endpoint(self)
        listener, self.name = listen_unix()
        self.endpoint.listen(listener.detach())

    def _lose(self, other: int, error: OSError) -> None:
        self.losses.append((other, error.strerror or ""))

    def _enter(self, fd: int, n_local: int, local: int) -> None:
        self.entered.append((os.path.sameopenfile(fd, 0), n_local, local))
        assert not os.get_inheritable(fd)
        os.close(fd)

    def admit(self, _hello: Hello) -> bytes | Progress:
        return KEY

    def welcome(self, peer: Peer, hello: Hello) -> None:
        self.peers[hello.rank] = peer
        self.links.add(hello.rank, peer)

    def reached(self, peer: Peer, _dial: int) -> None:
        self.peers[0] = peer
        self.links.add(0, peer)

    def received(self, peer: Peer, kind: int, body: bytes, fd: int) -> None:
        self.links.receive(peer, kind, body, fd)

    def lost(self, peer: Peer, error: int, why: str) -> None:
        self.links.lose(peer, OSError(error, why))


class Host:
    """The ranks of a host; rank 1 is linked to the lowest, rank 0."""

    def __init__(self, size: int) -> None:
        self.ranks = [Rank(rank, size) for rank in range(size)]
        self.leader = self.ranks[0]
        self.link(1)

    def link(self, rank: int) -> None:
        """Link this rank to the lowest."""
        one = self.ranks[rank]
        one.endpoint.connect_local(self.leader.name, Hello(0, rank, 0), KEY)
        self.run_until(lambda: 0 in one.peers and rank in self.leader.peers)

    def run_until(self, is_so: Callable[[], object]) -> None:
        until = time.monotonic() + LONG_S
        while not is_so():
            assert time.monotonic() < until
            for rank in self.ranks:
                rank.endpoint.step(time.monotonic())

    def close(self) -> None:
        for rank in self.ranks:
            rank.endpoint.close()


def n_open() -> int:
    gc.collect()  # garbage of an earlier test must not be collected meanwhile
    return len(os.listdir("/proc/self/fd"))


def test_a_lost_rank_is_missed_only_once_the_memory_was_passed() -> None:
    with closing(Host(3)) as made:
        made.ranks[1].endpoint.close()
        made.run_until(lambda: made.leader.losses)
        assert made.leader.losses == [(1, "it closed the connection")]
        assert not made.leader.links.needs(1)
        assert made.leader.links.unlinked() == [1, 2]


# Messages that end a link: the receiver, the kind, the body, and the error text.
TURN = "it spoke out of turn"
WRONG = {
    "an introduction of fewer": (1, INTRODUCTION, number(1, 4), "it introduced 1 ranks of this"),
    "an introduction of more": (1, INTRODUCTION, number(4_000_000_000, 4), "expected 2"),
    "an introduction to the lowest": (0, INTRODUCTION, number(2, 4), TURN),
    "a rank that is none of the group": (0, WAITING, number(2, 4), TURN),
    "a report before the memory": (1, REPORT, Entry("", "", b"").encode(0), TURN),
    "a report of another rank": (0, REPORT, Entry("", "", b"").encode(0), "is malformed"),
    "a report of two ranks": (0, REPORT, 2 * Entry("", "", b"").encode(1), "is malformed"),
    "a report that is too long": (0, REPORT, bytes(MAX_ENTRY_BYTES + 1), "it announced a message"),
    "a kind that is none": (0, 77, b"", TURN),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_message_ends_the_link(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to, kind, body, words = WRONG[what]
    monkeypatch.setattr(TreeLinks, "_introduce", lambda _: None)
    before = n_open()
    with closing(Host(2)) as made:
        fd = 0 if kind == INTRODUCTION and to == 1 else -1
        made.ranks[1 - to].peers[to].send(kind, body, fd)
        made.run_until(lambda: made.ranks[to].losses)
        [(rank, why)] = made.ranks[to].losses
        assert rank == 1 - to
        assert words in why
        assert made.ranks[to].entered == []
    assert n_open() == before


@pytest.mark.parametrize("kind", [REPORT, INTRODUCTION])
def test_a_repeated_message_ends_the_link(kind: int) -> None:
    with closing(Host(2)) as made:
        made.run_until(lambda: made.ranks[1].links.is_ready)
        if kind == INTRODUCTION:
            made.leader.peers[1].send(kind, number(2, 4), 0)
        for _ in range(2 if kind == REPORT else 0):
            made.ranks[1].links.send_report(Entry("id", "node", b""))
        hit = made.leader if kind == REPORT else made.ranks[1]
        made.run_until(lambda: hit.losses)
        assert hit.losses == [(1 if kind == REPORT else 0, TURN)]


def test_a_rank_that_reconnects_has_lost_its_first_link() -> None:
    with closing(Host(3)) as made:
        first = made.leader.peers.pop(1)
        made.link(1)
        assert made.leader.losses == [(1, "it connected again")]
        assert not first.is_open
        assert made.leader.links.unlinked() == [2]
