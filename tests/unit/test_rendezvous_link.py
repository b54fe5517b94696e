"""Links carry reports; whatever an authenticated peer sends wrongly ends its link, with no leak."""

import contextlib
import gc
import hmac
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from shoal.engine import HANDSHAKE_VERSION
from shoal.rendezvous.link import Ends, TreeLink
from shoal.rendezvous.roster import MAX_ENTRY_BYTES

UP, DOWN = b"u" * 32, b"d" * 32
SIZE = 3


@contextlib.contextmanager
def linked(n_local: int = SIZE) -> Iterator[tuple[TreeLink, TreeLink]]:
    """The upper end of a link, and that of a rank that awaits so many ranks' memory."""
    leader, member = socket.socketpair()
    with (
        contextlib.closing(TreeLink(leader, Ends(1, DOWN, UP, False, 1, 0, SIZE))) as one,
        contextlib.closing(TreeLink(member, Ends(0, UP, DOWN, True, SIZE, n_local, SIZE))) as other,
    ):
        for sock in (leader, member):
            sock.setblocking(False)
        yield one, other


def n_open() -> int:
    gc.collect()  # what an earlier test has left to it must not go meanwhile
    return len(os.listdir("/proc/self/fd"))


def test_an_introduction_passes_the_memory_once_and_opens_the_link_when_that_is_taken() -> None:
    before = n_open()
    with linked() as (leader, member):
        leader.introduce(0, 3)
        member.step()
        assert not member.is_open
        fd = member.take_memory()
        assert fd is not None
        assert os.path.sameopenfile(fd, 0)
        assert not os.get_inheritable(fd)
        os.close(fd)
        assert member.is_open
        assert member.take_memory() is None
        assert member.report is None
    assert n_open() == before


def test_memory_that_is_not_taken_is_closed_with_the_link() -> None:
    before = n_open()
    with linked() as (leader, member):
        leader.introduce(0, 3)
        member.step()
        assert n_open() == before + 3
    assert n_open() == before


@pytest.mark.parametrize("n_local", [2, 4, 4_000_000_000])
def test_an_introduction_of_another_number_of_ranks_ends_the_link(n_local: int) -> None:
    before = n_open()
    with linked() as (leader, member):
        leader.introduce(0, n_local)
        why = f"it introduced {n_local} ranks of this host, and there are 3"
        with pytest.raises(ConnectionResetError, match=why):
            member.step()
        assert member.take_memory() is None
    assert n_open() == before


def test_an_introduction_that_is_not_due_ends_the_link() -> None:
    before = n_open()
    with linked() as (leader, member):
        leader.introduce(0, 3)
        leader.introduce(0, 3)
        with pytest.raises(ConnectionResetError, match="it spoke out of turn"):
            member.step()
    with linked() as (leader, member):
        member.introduce(0, 1)
        with pytest.raises(ConnectionResetError, match="it spoke out of turn"):
            leader.step()
    assert n_open() == before


def test_nobody_can_wait_for_a_rank_that_is_not_of_the_group() -> None:
    with linked() as (leader, member):
        leader.send_waiting(2)
        member.step()
        assert member.waits_for == 2
        leader.send_waiting(SIZE)
        with pytest.raises(ConnectionResetError, match="it spoke out of turn"):
            member.step()


def test_words_go_up_and_down_and_are_heard_whole() -> None:
    with linked(0) as (upper, lower):
        for each in (b"of a few ranks", b""):
            lower.send_report(each)
            upper.step()
            assert upper.report == each
            upper.report = None
        long = os.urandom(SIZE * MAX_ENTRY_BYTES)
        for end in (upper.sock, lower.sock):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        upper.send_report(long)
        n_turns = 0
        while lower.report is None:
            upper.flush()
            lower.step()
            n_turns += 1
        assert lower.report == long
        assert n_turns > 1
        assert not upper.has_more_to_send


def test_the_end_of_who_is_below_is_noticed_after_its_word_and_of_who_is_above_not() -> None:
    with linked(0) as (upper, lower):
        lower.send_report(b"")
        lower.close()
        with pytest.raises(ConnectionResetError, match="it closed the connection"):
            upper.step()
        assert upper.report == b""
    with linked(0) as (upper, lower):
        upper.send_report(b"")
        upper.close()
        lower.step()
        assert lower.report == b""


@pytest.mark.parametrize("at", [0, 10, 16, 20, 40])
def test_a_word_that_is_changed_on_its_way_ends_the_link(at: int) -> None:
    with linked(0) as (upper, lower):
        head = struct.pack("<8sHHI", b"shoal/rv", HANDSHAKE_VERSION, 8, 7)
        said = bytearray(head + b"a word." + hmac.digest(UP, head + b"a word.", "sha256"))
        said[at] ^= 1
        lower.sock.send(said)
        lower.close()  # who awaits a report that has become longer hears that it does not come
        with pytest.raises(ConnectionResetError):
            upper.step()
        assert upper.report is None


def test_a_word_sealed_for_the_other_way_ends_the_link() -> None:
    with linked(0) as (upper, lower):
        head = struct.pack("<8sHHI", b"shoal/rv", HANDSHAKE_VERSION, 8, 0)
        lower.sock.send(head + hmac.digest(DOWN, head, "sha256"))
        with pytest.raises(ConnectionResetError, match="its report was damaged"):
            upper.step()


def test_a_word_longer_than_those_ranks_can_have_ends_the_link_before_it_comes() -> None:
    with linked(0) as (upper, lower):
        lower.sock.send(
            struct.pack("<8sHHI", b"shoal/rv", HANDSHAKE_VERSION, 8, MAX_ENTRY_BYTES + 1)
        )
        with pytest.raises(ConnectionResetError, match="it announced a report of"):
            upper.step()


def test_a_word_before_the_introduction_is_not_due() -> None:
    with linked() as (leader, member):
        leader.send_report(b"")
        with pytest.raises(ConnectionResetError, match="it spoke out of turn"):
            member.step()
