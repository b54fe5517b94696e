"""A rank that fails while it joins notifies the others, and can be restarted."""

import contextlib
import os
import signal
import socket
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from process.joining import LONG_S, Log, Misleading, Noticing, hosts, in_threads, shut
from process.ranks import on_ranks
from process.relay import Relay
from process.stage import Stage, on_stage, pretend_hosts

import shoal
from shoal.errors import PeerLost, ShoalError, UsageError
from shoal.rendezvous import HostMemory, JoinOptions, Membership, MemoryStore, join
from shoal.rendezvous.attempt import end_key
from shoal.rendezvous.links import TreeLink
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer


class Counting(Noticing):
    """A store that counts published ranks, and detects a second look for the second end."""

    def __init__(self) -> None:
        super().__init__()
        self.has_looked_twice = threading.Event()
        self._n_looks = 0

    def begin_again(self) -> None:
        self.records.clear()
        self._n_looks = 0
        self.has_looked_twice.clear()

    def await_ranks(self, n_ranks: int) -> None:
        while len(self.records) < n_ranks:
            assert self.published.wait(LONG_S)
            self.published.clear()  # NOT after a look: what comes in between would go unseen

    def try_get(self, key: str) -> bytes | None:
        if key == end_key(1):
            self._n_looks += 1  # the first look finds the attempt
            if self._n_looks > 2:
                self.has_looked_twice.set()
        return super().try_get(key)


def join_with_one_that_fails(
    store: Counting, environs: Sequence[Mapping[str, str]], failing: int, error: BaseException
) -> list[Membership | BaseException]:
    """Join as threads; the failing rank joins last, and fails once it knows all the others."""
    store.begin_again()
    size = len(environs)

    def one(rank: int) -> Membership | BaseException:
        def make_or_enter(*_: int) -> int:
            if rank == failing:
                raise error
            return -1

        if rank == failing:
            store.await_ranks(size - 1)
        options = JoinOptions(environ=environs[rank])
        memory = HostMemory(make_or_enter, make_or_enter)
        try:
            return join(store, rank, size, timeout_s=LONG_S, memory=memory, options=options)
        except BaseException as raised:  # noqa: BLE001 - the test checks it
            return raised

    return in_threads(one, size)


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("ids", ["aaaa", "abab", "abcd"])
def test_the_others_learn_at_once_which_rank_failed_and_why(ids: str, failing: int) -> None:
    store, why = Counting(), UsageError("wrong memory")
    found = join_with_one_that_fails(store, hosts(*ids), failing, why)
    assert found.pop(failing) is why
    for error in found:
        assert isinstance(error, UsageError)
        assert f"rank {failing} on " in str(error)
        assert "cannot join, so nobody can: wrong memory" in str(error)


def test_ranks_that_failed_can_meet_at_the_same_store_again_and_again() -> None:
    store = Counting()
    for _ in range(5):
        found = join_with_one_that_fails(store, hosts("a", "b", "b"), 1, MemoryError())
        assert [type(each) for each in found] == [PeerLost, MemoryError, PeerLost]
        again = join_with_one_that_fails(store, hosts("a", "b", "b"), -1, MemoryError())
        for membership in again:
            assert isinstance(membership, Membership), membership
            membership.close()


def test_a_rank_whose_report_breaks_its_link_knows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send, broken = TreeLink.send_report, list[int]()

    def send_or_break(link: TreeLink, report: bytes) -> None:
        if link.rank == 0 and not broken:
            broken.append(link.rank)
            shut(link)
        send(link, report)

    monkeypatch.setattr(TreeLink, "send_report", send_or_break)
    store, options = MemoryStore(), JoinOptions(warn_s=10 * LONG_S)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, store, 0, 2, timeout_s=LONG_S / 2, options=options)
        with join(store, 1, 2, timeout_s=LONG_S / 2, options=options), first.result():
            assert broken == [0]


def test_a_rank_that_joins_after_a_failure_waits_for_the_successor() -> None:
    store, has_warned = Counting(), threading.Event()
    log = Log(has_warned.set)
    found = join_with_one_that_fails(store, hosts("a", "b"), 1, MemoryError("no room"))
    assert [type(each) for each in found] == [PeerLost, MemoryError]
    store.begin_again()
    with ThreadPoolExecutor(1) as pool:
        options = JoinOptions(log=log, warn_s=10 * LONG_S, gone_s=0.0)
        first = pool.submit(join, store, 0, 2, timeout_s=LONG_S, options=options)
        assert has_warned.wait(LONG_S)
        assert store.has_looked_twice.wait(LONG_S)
        with join(store, 1, 2, timeout_s=LONG_S) as second, first.result() as one:
            assert one.epoch == second.epoch
    (text,) = [text for text in log.texts if "waits for a rank" in text]
    assert "rank 0 of 2 on " in text
    assert "failed to join before rank 0 joined, and has not been started again: " in text
    assert "MemoryError no room" in text


def init_until_interrupted() -> str:
    """Return the output of a program that is one of four ranks, one of them missing."""
    rank = int(os.environ["RANK"])
    try:
        shoal.init(Stage.from_environment().store, rank, 4, timeout_s=10 * LONG_S)
    except (ShoalError, KeyboardInterrupt):
        return traceback.format_exc()
    return ""


def test_an_interrupted_rank_is_named_on_the_others_with_a_short_traceback() -> None:
    with on_stage(init_until_interrupted, 3) as (stage, ranks):
        for rank in range(3):
            stage.store.get(f"shoal/0/rank/{rank}", LONG_S)
        os.kill(ranks.pid(2), signal.SIGINT)
        texts = [outcome.value for outcome in ranks.wait()]
    for text, end in zip(texts, ["PeerLost: rank 2 on "] * 2 + ["KeyboardInterrupt"], strict=True):
        assert text.count("Traceback") == 1
        assert text.splitlines()[-1].startswith((end, f"shoal.errors.{end}"))
        assert len(text.splitlines()) < 10
    for text in texts[:2]:
        assert "has left the meeting: KeyboardInterrupt" in text


@pytest.mark.parametrize(
    ("culprit", "name", "value", "n_hosts"),
    [
        (1, "SHOAL_SOCKET_IFNAME", "nosuch0", 3),
        (2, "SHOAL_SOCKET_IFNAME", "eht0,nosuch", 1),
        (1, "SHOAL_SOCKET_IFNAME", "lo,eht0", 1),
        (0, "SHOAL_KEY", "short", 3),
        (1, "SHOAL_ALGO", "fastest", 3),
        (0, "SHOAL_SPIN_US", "-1", 3),
    ],
)
@on_ranks(3, has_stage=True)
def test_a_wrong_variable_on_one_rank_is_named_on_all(
    culprit: int, name: str, value: str, n_hosts: int
) -> None:
    """The culprit joins last, so that all others are present to be notified."""
    stage, rank = Stage.from_environment(), int(os.environ["RANK"])
    pretend_hosts(3 // n_hosts)
    if rank == culprit:
        os.environ[name] = value
        for other in {0, 1, 2} - {culprit}:
            stage.store.get(f"shoal/0/rank/{other}", LONG_S)
    with pytest.raises(UsageError, match=name) as raised:
        shoal.init(stage.store, rank, 3, timeout_s=LONG_S)
    assert rank == culprit or f"rank {culprit} on " in str(raised.value)


EVERY_ONE = ",".join(name for _, name in socket.if_nameindex())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "nosuch0"),
        ("NCCL_SOCKET_IFNAME", "nosuch0"),
        ("SHOAL_SOCKET_IFNAME", f"^{EVERY_ONE}"),
    ],
)
@on_ranks(2)
def test_an_interface_that_no_host_has_ends_no_job_in_one_host(name: str, value: str) -> None:
    if os.environ["RANK"] == "1" or value.startswith("^"):
        os.environ[name] = value
    shoal.init(timeout_s=LONG_S).close()


@on_ranks(3, has_stage=True)
def test_a_rank_0_that_fails_serves_the_others_until_they_know_why() -> None:
    pretend_hosts(1)
    stage, rank = Stage.from_environment(), int(os.environ["RANK"])
    if rank == 0:
        os.environ["SHOAL_SOCKET_IFNAME"] = "nosuch0"
    stage.meet(rank, 3, "about to join")  # rank 0 serves for a second, for ranks that join at once
    with pytest.raises(UsageError, match="nosuch0"):
        shoal.init(timeout_s=LONG_S)


HOSTS = hosts("a", "b")

# Bytes of the complete exchange, by sender.
FROM_CLIENT = {"hello: epoch": 12, "hello: rank": 20, "hello: nonce": 40, "hello: mac": 50}
FROM_CLIENT["proof: mac"] = 64 + 20
FROM_SERVER = {"challenge: nonce": 20, "welcome: kind": 28 + 10, "welcome: mac": 28 + 20}
FLIPS = [("client", *flip) for flip in FROM_CLIENT.items()]
FLIPS += [("server", *flip) for flip in FROM_SERVER.items()]


def flip(rest: bytes) -> bytes:
    return bytes([rest[0] ^ 2]) + rest[1:]


@pytest.mark.parametrize(("sender", "what", "at"), FLIPS)
def test_a_bit_flipped_while_authenticating_fails_no_join(sender: str, what: str, at: int) -> None:
    with Relay(lambda: store.real_port, flip, at, sender) as between:
        store = Misleading(between.port)

        def one(rank: int) -> int:
            options = JoinOptions(environ=HOSTS[rank])
            with join(store, rank, 2, timeout_s=LONG_S, options=options) as membership:
                return membership.epoch

        first, second = in_threads(one, 2)
        assert first == second
        assert between.n_connections > 1, f"nobody minded a wrong {what}"


@pytest.mark.parametrize(("sender", "what", "at"), FLIPS)
def test_a_bit_flipped_towards_the_store_fails_no_job(sender: str, what: str, at: int) -> None:
    with (
        contextlib.closing(TcpStoreServer("127.0.0.1", 0)) as server,
        Relay(lambda: server.port, flip, at, sender) as between,
        contextlib.closing(TcpStoreClient("127.0.0.1", between.port, timeout_s=LONG_S)) as client,
    ):
        client.set("a", b"1")
        assert client.try_get("a") == b"1"
        assert between.n_connections > 1, f"nobody minded a wrong {what}"
