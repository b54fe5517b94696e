"""Real processes join, die on the way, and are started again."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from process import joining
from process.joining import JOIN, LONG_S, ONE_HOST, die_in_silence, hosts, joined, options, shut
from process.ranks import start_ranks

from shoal.errors import PeerLost, TimedOut
from shoal.rendezvous import Membership, MemoryStore, TorchStore, join
from shoal.rendezvous.attempt import record_key
from shoal.rendezvous.environment import find_place
from shoal.rendezvous.links import TreeLink, TreeLinks
from shoal.rendezvous.roster import Entry
from shoal.rendezvous.store import asking
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

_no_descriptor_is_left = pytest.fixture(autouse=True)(joining.no_descriptor_is_left)


def join_and_die_once(when: str) -> int:
    """Rank 1 dies after it published or entered; its successor is process 3 of the test."""
    place = find_place()
    store = TcpStoreClient("127.0.0.1", int(os.environ["STORE_PORT"]), timeout_s=LONG_S)
    rank = 1 if place.rank == 3 else place.rank
    ground = joining.Ground(rank)
    memory, real_set = ground.as_memory(), store.set

    def die() -> None:
        real_set("died", b"")
        os.kill(os.getpid(), signal.SIGKILL)

    def set_last(key: str, value: bytes) -> None:
        real_set(key, value)
        die()

    def enter_last(fd: int, n_local: int, local: int) -> None:
        ground.enter(fd, n_local, local)
        die()

    if place.rank == 1 and when == "published":
        store.set = set_last
    if place.rank == 1 and when == "entered":
        memory = memory._replace(enter=enter_last)
    if place.rank == 3:
        store.get("died", LONG_S)
    with contextlib.closing(ground), join(store, rank, 3, timeout_s=LONG_S, memory=memory) as one:
        joining.check_members(one, ground)
        return one.epoch


@pytest.mark.parametrize("when", ["published", "entered"])
def test_a_rank_that_dies_while_joining_can_be_restarted(when: str) -> None:
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0)) as server:
        port = {"STORE_PORT": str(server.port)}
        with start_ranks(join_and_die_once, 4, when, env=port) as ranks:
            first, third, successor = ranks.survivors(1)
    assert first == third == successor


def test_a_store_file_left_by_an_earlier_job_serves_the_next(tmp_path: Path) -> None:
    """In the second job only two ranks join and give up; the third job is complete."""
    dist = pytest.importorskip("torch.distributed")
    path, left = str(tmp_path / "store"), []

    def one(rank: int, timeout_s: float) -> int | None:
        left.append(dist.FileStore(path))  # NOT deleted, as by a job that is killed
        try:
            with join(TorchStore(left[-1]), rank, 3, timeout_s=timeout_s) as member:
                return member.epoch
        except TimedOut:
            return None

    with ThreadPoolExecutor(3) as pool:
        first = set(pool.map(one, range(3), 3 * [LONG_S]))
        assert list(pool.map(one, (0, 2), 2 * [0.2])) == [None, None]
        third = set(pool.map(one, range(3), 3 * [LONG_S]))
    assert len(first) == len(third) == 1
    assert None not in first | third
    assert first != third


def test_a_rank_restarted_alone_learns_that_all_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_SUSPICIOUS_S", LONG_S)  # however late the store answers
    store = MemoryStore()
    with joined(store, [ONE_HOST, ONE_HOST]), pytest.raises(TimedOut) as caught:
        join(store, 1, 2, timeout_s=0.3)
    text = str(caught.value)
    assert "rank 0 never published" in text
    assert "the attempt before this one ended: rank 1 was started again" in text
    assert "until it is started again" in text


class _DiedError(Exception):
    """Raised in place of a death: everything of the rank is closed."""


def hold_back(monkeypatch: pytest.MonkeyPatch, rank: int, until: threading.Event) -> None:
    is_ready = TreeLinks.is_ready

    def is_ready_in_its_turn(self: TreeLinks) -> bool:
        return is_ready.fget(self) and (self.rank != rank or until.is_set())

    monkeypatch.setattr(TreeLinks, "is_ready", property(is_ready_in_its_turn))


@pytest.mark.parametrize(("dying", "is_rank_0_late"), [(1, False), (3, False), (4, True)])
def test_a_rank_that_dies_after_its_report_can_be_restarted(
    dying: int, is_rank_0_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host reports after the death; a late rank 0 finds both reports at once."""
    last = 1 if dying == 4 else 4
    died, has_reported, are_linked = threading.Event(), threading.Event(), threading.Event()
    send_report, is_ready = TreeLinks.send_report, TreeLinks.is_ready

    def is_ready_late(self: TreeLinks) -> bool:
        if self.rank == 0 and not self.unlinked():
            are_linked.set()  # with all children of rank 0
            assert has_reported.wait(LONG_S)
        return is_ready.fget(self)

    def report_and_die(self: TreeLinks, own: Entry) -> None:
        if self.rank == dying:
            assert are_linked.wait(LONG_S)
        send_report(self, own)
        if self.rank == dying and not died.is_set():
            raise _DiedError
        if self.rank == last:
            has_reported.set()

    if not is_rank_0_late:
        are_linked.set(), has_reported.set()
    monkeypatch.setattr(TreeLinks, "is_ready", property(is_ready_late))
    monkeypatch.setattr(TreeLinks, "send_report", report_and_die)
    hold_back(monkeypatch, last, died)
    die_in_silence(monkeypatch)
    store, environs = MemoryStore(), hosts("a", "b", "b", "b", "c")

    def one(rank: int) -> Membership:
        with contextlib.suppress(_DiedError):
            return join(store, rank, 5, timeout_s=LONG_S, options=options(environs[rank]))
        died.set()  # NOT before its connections are closed: it would be alive till then
        assert has_reported.wait(LONG_S)
        return join(store, rank, 5, timeout_s=LONG_S, options=options(environs[rank]))

    found = joining.in_threads(one, 5)
    assert died.is_set()
    assert len({member.epoch for member in found}) == 1
    for member in found:
        member.close()


class _Ending(MemoryStore):
    """A store that is gone once rank 0 has sent the group."""

    has_ended = False

    def try_get(self, key: str) -> bytes | None:
        if self.has_ended:
            raise RuntimeError("it is gone")
        return super().try_get(key)


def test_a_rank_lost_in_the_last_broadcast_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    send_report = TreeLink.send_report

    def send_to_all_but_rank_1(self: TreeLink, report: bytes) -> None:
        if self.rank == 1:
            shut(self)
        send_report(self, report)

    monkeypatch.setattr(TreeLink, "send_report", send_to_all_but_rank_1)
    store = _Ending()
    with ThreadPoolExecutor(3) as pool:
        first, lost, third = (pool.submit(join, store, r, 3, timeout_s=LONG_S) for r in range(3))
        with first.result() as one, third.result() as other:
            assert one.epoch == other.epoch
        store.has_ended = True
        assert isinstance(lost.exception(), PeerLost)


def test_a_report_is_void_after_its_sender_loses_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 dies after rank 1 reported for both; rank 3 reports only then."""
    has_reported, is_known = threading.Event(), threading.Event()
    send_report, end_attempt = TreeLinks.send_report, JOIN._Join._end_attempt

    def report_or_die(self: TreeLinks, own: Entry) -> None:
        send_report(self, own)
        if self.rank == 1:
            has_reported.set()
        if self.rank == 2:
            assert has_reported.wait(LONG_S)
            raise _DiedError

    def end_and_let_go(*args: object) -> None:
        is_known.set()  # the links are closed, and rank 0 does not know yet that all meet again
        end_attempt(*args)

    monkeypatch.setattr(TreeLinks, "send_report", report_or_die)
    monkeypatch.setattr(JOIN._Join, "_end_attempt", end_and_let_go)
    hold_back(monkeypatch, 3, is_known)
    die_in_silence(monkeypatch)
    store, environs = _Ending(), hosts("a", "b", "b", "c")

    def one(rank: int) -> BaseException | Membership:
        try:
            return join(store, rank, 4, timeout_s=LONG_S, options=options(environs[rank]))
        except (_DiedError, PeerLost) as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(one, rank) for rank in range(4)]
        for rank in (0, 1, 3):  # all that live meet again
            store.get(record_key(1, rank), LONG_S)
        store.has_ended = True  # so that they do not wait long
        kinds = [type(each.result()) for each in found]
    assert kinds == [PeerLost, PeerLost, _DiedError, PeerLost]
