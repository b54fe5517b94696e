"""Ranks join through a store, as threads on simulated hosts; callers that are no ranks do not."""

import contextlib
import logging
import os
import re
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from process import joining
from process.joining import JOIN, LONG_S, ONE_HOST, hosts, in_threads, is_closed, joined, options
from process.ranks import on_new_ranks, run_ranks
from process.stage import Lines, descriptors

from shoal.errors import Closed, UsageError
from shoal.rendezvous import Membership, MemoryStore, join
from shoal.rendezvous.attempt import part_key
from shoal.rendezvous.listener import listen_unix
from shoal.rendezvous.record import decode
from shoal.rendezvous.roll import decode as decode_roll
from shoal.rendezvous.roll import decode_part

_no_descriptor_is_left = pytest.fixture(autouse=True)(joining.no_descriptor_is_left)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 20])
def test_ranks_of_one_host_link_pairwise_without_tcp(size: int) -> None:
    store = MemoryStore()
    grounds = [joining.Ground(rank) for rank in range(size)]
    with joined(store, size * [ONE_HOST], grounds) as members:
        assert len({member.epoch for member in members}) == 1
        assert len({member.job_key for member in members}) == 1
        for rank, member in enumerate(members):
            assert [peer.rank for peer in member.peers] == [r for r in range(size) if r != rank]
            assert all(peer.is_local for peer in member.peers)
            assert not any(name.address for name in member.names)
        for rank, member in enumerate(members):
            joining.check_members(member, grounds[rank])
            assert member.listener_fds == ()
    for rank in range(size if size > 1 else 0):
        assert decode(store.get(f"shoal/0/rank/{rank}", 0)).endpoint is None


def test_ranks_of_several_hosts_know_the_address_of_every_other_rank() -> None:
    grounds = [joining.Ground(rank) for rank in range(5)]
    with joined(MemoryStore(), hosts("a", "a", "b", "c", "b"), grounds) as members:
        for member in members:
            local = [peer.rank for peer in member.peers if peer.is_local]
            assert local == {0: [1], 1: [0], 2: [4], 3: [], 4: [2]}[member.rank]
            for peer in member.peers:
                assert peer.is_local or member.names[peer.rank].address.startswith("127.0.0.1:")
                assert peer.is_local or peer.listens_at == members[peer.rank].listens_at
            for fd in member.listener_fds:
                assert not os.get_inheritable(fd)
            joining.check_members(member, grounds[member.rank])
            for peer in member.peers:  # every member listens, before any leaves
                for place in peer.listens_at:
                    socket.create_connection(place, LONG_S).close()


@pytest.mark.parametrize("n_hosts", [2, 3, 4, 7, 8, 13])
def test_any_number_of_hosts_joins_along_a_tree(n_hosts: int) -> None:
    environs = hosts(*(f"host {rank % n_hosts}" for rank in range(2 * n_hosts - 1)))
    with joined(MemoryStore(), environs) as members:
        assert len({member.epoch for member in members}) == 1
        for member in members:
            ids = [name.host_id for name in member.names]
            assert ids == [name.host_id for name in members[0].names]
            assert len(set(ids)) == n_hosts


def test_each_rank_receives_the_cards_and_paths_of_all_ranks() -> None:
    environs = hosts("a", "b", "b", "c")
    for rank, environ in enumerate(environs):
        environ.update(SHOAL_PATHS=str(1 + rank), SHOAL_SOCKET_IFNAME="lo")
    store = MemoryStore()

    def one(rank: int) -> Membership:
        digest, chosen = b"settings digest of rank %d" % rank, options(environs[rank])
        return join(store, rank, 4, timeout_s=LONG_S, digest=digest, options=chosen)

    for member in in_threads(one, 4):
        with member:
            assert list(member.digests) == [b"settings digest of rank %d" % r for r in range(4)]
            assert len(member.listens_at) == 1 + member.rank
            for peer in member.peers:
                assert len(peer.listens_at) == (0 if peer.is_local else 1 + peer.rank)


class Unasked(MemoryStore):
    def set(self, key: str, value: bytes) -> None:
        raise AssertionError(key)

    def try_get(self, key: str) -> bytes | None:
        raise AssertionError(key)


def test_a_single_rank_uses_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JOIN, "_FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(JOIN, "_PER_RANK_S", 0.0)
    never = options(ONE_HOST, warn_s=10 * LONG_S)
    with join(Unasked(), 0, 1, timeout_s=LONG_S, options=never) as member:
        assert member.peers == ()


@pytest.mark.parametrize("ids", ["aaa", "aab", "abc"])
def test_ranks_meet_without_reminders(ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JOIN, "_FIRST_LOOK_S", 10 * LONG_S)
    with joined(MemoryStore(), hosts(*ids), warn_s=10 * LONG_S):
        pass


def test_hosts_may_speak_ipv6() -> None:
    with joined(MemoryStore(), hosts("a", "b", MASTER_ADDR="::1")) as members:
        assert members[1].names[0].address.startswith("[::1]:")


def test_listeners_stay_within_the_port_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        low = taken.getsockname()[1]
        ports = f"{low}-{min(low + 20, 65535)}"
        store = MemoryStore()
        with joined(store, hosts("a", "b", "c", SHOAL_PORT_RANGE=ports)) as members:
            for member in members:
                for _, port in member.listens_at:
                    assert low < port <= low + 20
            endpoint = decode(store.get("shoal/0/rank/0", 0)).endpoint
            assert low < endpoint.port <= low + 20


def test_the_lowest_rank_of_a_host_creates_its_memory_and_each_rank_enters_once() -> None:
    calls: list[tuple[str, int, int]] = []

    class Noting(joining.Ground):
        def make(self, n_local: int) -> int:
            calls.append(("makes", n_local, 0))
            return super().make(n_local)

        def enter(self, fd: int, n_local: int, local: int) -> None:
            calls.append(("enters", n_local, local))
            super().enter(fd, n_local, local)

    grounds = [Noting(rank) for rank in range(6)]
    with joined(MemoryStore(), hosts("a", "b", "a", "a", "b", "c"), grounds):
        sizes = (1, 2, 3)
        makers = [("makes", n_local, 0) for n_local in sizes]
        all_of_them = [("enters", n_local, local) for n_local in sizes for local in range(n_local)]
        assert sorted(calls) == sorted(makers + all_of_them)


def test_the_caller_closes_what_it_took_from_the_join() -> None:
    for environs in (2 * [ONE_HOST], hosts("a", "b")):
        with joined(MemoryStore(), environs) as members:
            taken = members[0].take()
            with pytest.raises(Closed):
                members[0].take()
            members[0].close()
            for fd in taken:
                os.close(fd)


def test_a_store_with_records_of_an_earlier_larger_or_smaller_group_serves_the_next() -> None:
    store = MemoryStore()
    epochs = set()
    for environs in (3 * [ONE_HOST], hosts("a", "b", "c"), 4 * [ONE_HOST], 3 * [ONE_HOST]):
        with joined(store, environs) as members:
            epochs.add(members[0].epoch)
            assert {member.size for member in members} == {len(environs)}
    assert len(epochs) == 4


def test_a_stale_record_with_a_live_but_silent_listener_is_overcome() -> None:
    """The leader of another host is dead, and another program listens at its address."""
    store, environs = MemoryStore(), hosts("a", "b", "b")
    with joined(store, environs):
        record = store.get("shoal/0/rank/1", 0)
    listener, unix_name = listen_unix()
    store.set("shoal/1/rank/1", joining.rewritten(record, unix_name=unix_name))
    impatient = [options(environ, dial_s=0.05) for environ in environs]
    with listener, ThreadPoolExecutor() as pool:
        ranks = {
            rank: pool.submit(join, store, rank, 3, timeout_s=LONG_S, options=impatient[rank])
            for rank in (0, 2)
        }
        listener.accept()[0].close()  # rank 2 has fallen for it
        ranks[1] = pool.submit(join, store, 1, 3, timeout_s=LONG_S, options=impatient[1])
        for rank in ranks.values():
            rank.result().close()


def test_a_rank_may_close_right_after_joining() -> None:
    def one(rank: int) -> int:
        with join(store, rank, 4, timeout_s=LONG_S) as membership:
            return membership.epoch

    for _ in range(20):
        store = MemoryStore()
        assert len(set(in_threads(one, 4))) == 1


def test_ranks_with_different_keys_both_fail_at_once() -> None:
    environs = [{"SHOAL_KEY": "a key of some length"}, {"SHOAL_KEY": "a key of other length"}]
    for error in joining.join_all(MemoryStore(), environs):
        assert isinstance(error, UsageError)
        assert "rank 1 may not join: rank 0" in str(error)
        assert "holds another job key. SHOAL_KEY_FILE (or SHOAL_KEY)" in str(error)


def test_a_job_with_its_own_key_puts_none_into_the_store() -> None:
    store = MemoryStore()
    with joined(store, hosts("a", "b", SHOAL_KEY="a key of some length")) as members:
        assert members[0].job_key == members[1].job_key == b"a key of some length"
    part = decode_part(store.get(part_key(0, 0), 0), 2)
    assert decode_roll([part], 2).key is None


@pytest.mark.parametrize(
    ("environs", "n_warnings"),
    [
        (3 * [ONE_HOST], 0),
        (hosts("a", "b", "b"), 1),
        (hosts("a", "b", SHOAL_KEY="a key of some length"), 0),
    ],
)
def test_only_a_job_across_hosts_without_a_key_warns_and_once(
    environs: list[dict[str, str]], n_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shoal"), joined(MemoryStore(), environs):
        pass
    assert len(caplog.messages) == n_warnings
    assert all("SHOAL_KEY_FILE" in message for message in caplog.messages)


def test_only_the_rank_that_keeps_a_host_waiting_is_named() -> None:
    store = MemoryStore()
    with joined(store, 3 * [ONE_HOST]):
        store.set("shoal/1/rank/2", store.get("shoal/0/rank/2", 0))
    words = {
        0: "rank 2 on ",
        1: "it never connected to rank 0, which introduces the ranks of this host",
    }
    _, second = joining.warnings_of(store, 3 * [ONE_HOST], words)
    assert "rank 2 on" in second
    assert "rank 0 on" not in second


def test_two_processes_with_one_rank_are_an_error_on_all_ranks() -> None:
    store = joining.Noticing()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(join, store, 1, 3, timeout_s=LONG_S)
        assert store.published.wait(LONG_S)
        others = [pool.submit(join, store, rank, 3, timeout_s=LONG_S) for rank in (1, 0)]
        errors = [future.exception() for future in (first, *others)]
    for error in errors:
        assert isinstance(error, UsageError)
        assert "another process joined as rank 1" in str(error)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3, 4)])
def test_ranks_that_disagree_about_the_size_all_fail(sizes: tuple[int, ...]) -> None:
    store = MemoryStore()
    with ThreadPoolExecutor() as pool:
        joins = [pool.submit(join, store, *at, timeout_s=LONG_S) for at in enumerate(sizes)]
        errors = [future.exception() for future in joins]
    for error in errors:
        assert isinstance(error, UsageError)
        assert "WORLD_SIZE differs: rank 0 on" in str(error)
        assert f"group of {sizes[0]}, rank {len(sizes) - 1} in one of {sizes[-1]}" in str(error)


@pytest.mark.parametrize(
    ("rank", "size", "timeout_s", "why"),
    [
        (2, 2, 1.0, "rank 2 is not in a group of 2"),
        (-1, 2, 1.0, "rank -1"),
        (0, 2, 0.0, "timeout_s=0.0"),
        (0, 2, float("nan"), "timeout_s=nan"),
    ],
)
def test_wrong_arguments_are_refused(rank: int, size: int, timeout_s: float, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        join(MemoryStore(), rank, size, timeout_s=timeout_s)


# Callers that are no ranks are turned away, and the join goes on.


class Held(joining.Noticing):
    """A store that shows the address of rank 0 only once the strangers are connected."""

    def __init__(self) -> None:
        super().__init__()
        self.are_in = threading.Event()

    def try_get(self, key: str) -> bytes | None:
        value = super().try_get(key)
        if key == "shoal/0/rank/0" and value and decode(value).endpoint is not None:
            assert self.are_in.wait(LONG_S)
        return value


def test_strangers_are_closed_and_the_join_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 0 looks around by the store, which holds it too, and so would not close the strangers.
    monkeypatch.setattr(JOIN, "_FIRST_LOOK_S", 10 * LONG_S)
    store = Held()
    environs = hosts("a", "b", "c")
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        stack.callback(store.are_in.set)
        waiting = [
            pool.submit(join, store, rank, 3, timeout_s=LONG_S, options=options(environs[rank]))
            for rank in range(3)
        ]
        endpoint = None
        while endpoint is None:
            assert store.published.wait(LONG_S)
            store.published.clear()  # NOT after a look: what comes in between would go unseen
            endpoint = store.records[0].endpoint if 0 in store.records else None
        where = endpoint.address, endpoint.port
        silent = [stack.enter_context(socket.create_connection(where)) for _ in range(100)]
        silent[0].sendall(b"SSH-2.0-OpenSSH\r\n")
        assert is_closed(silent[0])
        store.are_in.set()
        with waiting[0].result(), waiting[1].result(), waiting[2].result():
            assert all(map(is_closed, silent[1:]))


@on_new_ranks(1)
def test_a_rank_without_descriptors_turns_callers_away_and_counts_them() -> None:
    """Callers take every descriptor while rank 0 waits; after they leave, rank 1 joins."""
    store = joining.Noticing()
    texts = Lines(logging.NOTSET).texts
    with joining.waiting_rank_0(store) as (result, address):
        limit = len(descriptors()) + 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        with contextlib.ExitStack() as stack:
            silent: list[socket.socket] = []
            with contextlib.suppress(OSError):
                while True:
                    silent.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            n_free = 20
            for sock in silent[:n_free]:
                sock.close()
            silent = silent[n_free:]
            for sock in silent:
                sock.connect(address)
            # More callers connect than there are descriptors: the last ones are closed at once.
            assert len(silent) > n_free
            assert is_closed(silent[-1])
        with join(store, 1, 2, timeout_s=LONG_S), result():
            seen = re.findall(r"turned away (\d+) so far, the last from this host", " ".join(texts))
    assert len(seen) > 1
    assert seen == [str(2**n) for n in range(len(seen))]


def call_as_nobody(address: bytes) -> bool:
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        return is_closed(sock)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_is_turned_away() -> None:
    store = joining.Noticing()
    with joining.waiting_rank_0(store) as (result, address):
        assert run_ranks(call_as_nobody, 1, address) == [True]
        with join(store, 1, 2, timeout_s=LONG_S), result():
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_listener_is_named_and_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    one_at_a_time = threading.Lock()  # the user belongs to the process, which holds both ranks

    def listen_as_nobody() -> tuple[socket.socket, str]:
        listener, name = listen_unix()
        with one_at_a_time:
            os.seteuid(65534)
            try:
                listener.listen()  # the kernel records the user who listens
            finally:
                os.seteuid(0)
        return listener, name

    monkeypatch.setattr(JOIN, "listen_unix", listen_as_nobody)
    words = {0: "rank 1 on ", 1: "another user"}
    _, second = joining.warnings_of(MemoryStore(), 2 * [ONE_HOST], words)
    for fact in ("rank 1", "rank 0 on", "another user"):
        assert fact in second
