"""Ranks that meet through a store, as threads with pretended hosts."""

import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from process.joining import (
    LONG_S,
    ONE_HOST,
    SHORT_S,
    Ground,
    Noticing,
    check_who_is_there,
    hosts,
    join_all,
    joined,
    no_descriptor_is_left,
    options,
    say_who_you_are,
)
from process.records import rewritten

from shoal.errors import Closed, TimedOut, UsageError
from shoal.rendezvous import Membership, MemoryStore, join
from shoal.rendezvous.listener import listen_tcp, listen_unix

_no_descriptor_is_left = pytest.fixture(autouse=True)(no_descriptor_is_left)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 20])
def test_ranks_of_one_host_are_linked_pairwise_without_tcp(size: int) -> None:
    store = MemoryStore()
    grounds = [Ground(rank) for rank in range(size)]
    with joined(store, size * [ONE_HOST], grounds) as members:
        assert len({member.epoch for member in members}) == 1
        assert len({member.job_key for member in members}) == 1
        for rank, member in enumerate(members):
            assert [peer.rank for peer in member.peers] == [r for r in range(size) if r != rank]
            assert all(peer.is_local and peer.address == "unix" for peer in member.peers)
            say_who_you_are(member)
        for rank, member in enumerate(members):
            check_who_is_there(member, grounds[rank])
    for rank in range(size if size > 1 else 0):
        assert json.loads(store.get(f"shoal/rank/{rank}", 0))["endpoint"] is None


def test_ranks_of_several_hosts_are_linked_over_tcp() -> None:
    grounds = [Ground(rank) for rank in range(5)]
    with joined(MemoryStore(), hosts("a", "a", "b", "c", "b"), grounds) as members:
        for member in members:
            local = [peer.rank for peer in member.peers if peer.is_local]
            assert local == {0: [1], 1: [0], 2: [4], 3: [], 4: [2]}[member.rank]
            for peer in member.peers:
                assert peer.is_local or peer.address.startswith("127.0.0.1:")
                for fd in peer.socket_fds:
                    assert not os.get_blocking(fd)
                    assert not os.get_inheritable(fd)
                    with socket.socket(fileno=os.dup(fd)) as sock:
                        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            say_who_you_are(member)
        for member in members:
            check_who_is_there(member, grounds[member.rank])


def test_hosts_may_speak_ipv6() -> None:
    with joined(MemoryStore(), hosts("a", "b", MASTER_ADDR="::1")) as members:
        assert members[1].peers[0].address.startswith("[::1]:")


def test_listeners_stay_within_the_port_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        low = taken.getsockname()[1]
        ports = f"{low}-{min(low + 20, 65535)}"
        store = MemoryStore()
        with joined(store, hosts("a", "b", "c", SHOAL_PORT_RANGE=ports)):
            for rank in (0, 1):
                endpoint = json.loads(store.get(f"shoal/rank/{rank}", 0))["endpoint"]
                assert low < endpoint["port"] <= low + 20


def test_the_lowest_rank_of_a_host_makes_its_memory_and_each_enters_it_once() -> None:
    said: list[tuple[str, int, int]] = []

    class Noting(Ground):
        def make(self, n_local: int) -> int:
            said.append(("makes", n_local, 0))
            return super().make(n_local)

        def enter(self, fd: int, n_local: int, local: int) -> None:
            said.append(("enters", n_local, local))
            super().enter(fd, n_local, local)

    grounds = [Noting(rank) for rank in range(6)]
    with joined(MemoryStore(), hosts("a", "b", "a", "a", "b", "c"), grounds):
        sizes = (1, 2, 3)
        makers = [("makes", n_local, 0) for n_local in sizes]
        all_of_them = [("enters", n_local, local) for n_local in sizes for local in range(n_local)]
        assert sorted(said) == sorted(makers + all_of_them)


def test_what_is_taken_is_the_callers_to_close() -> None:
    for environs in (2 * [ONE_HOST], hosts("a", "b")):
        with joined(MemoryStore(), environs) as members:
            peers = members[0].take()
            with pytest.raises(Closed):
                members[0].take()
            members[0].close()
            for fd in (*peers[0].socket_fds, *members[0].listener_fds):
                os.close(fd)


def test_a_store_that_still_holds_an_earlier_groups_records_serves_the_next() -> None:
    store = MemoryStore()
    epochs = set()
    for environs in (3 * [ONE_HOST], hosts("a", "b", "c"), 4 * [ONE_HOST], 3 * [ONE_HOST]):
        with joined(store, environs) as members:
            epochs.add(members[0].epoch)
    assert len(epochs) == 4


def test_a_leftover_whose_listener_is_alive_but_silent_is_overcome() -> None:
    store = MemoryStore()
    with joined(store, 2 * [ONE_HOST]):
        record = store.get("shoal/rank/0", 0)
    listener, unix_name = listen_unix()
    store.set("shoal/rank/0", rewritten(record, unix_name=unix_name))
    with listener, ThreadPoolExecutor() as pool:
        impatient = options(ONE_HOST, dial_s=0.05)
        second = pool.submit(join, store, 1, 2, timeout_s=LONG_S, options=impatient)
        listener.accept()[0].close()  # it has fallen for it
        first = pool.submit(join, store, 0, 2, timeout_s=LONG_S, options=impatient)
        with first.result(), second.result():
            pass


def test_a_rank_may_close_at_once_without_harm_to_the_others() -> None:
    def one(rank: int) -> int:
        with join(store, rank, 4, timeout_s=LONG_S) as membership:
            return membership.epoch

    for _ in range(20):
        store = MemoryStore()
        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(one, range(4)))) == 1


def test_ranks_with_different_keys_are_both_told_at_once() -> None:
    environs = [{"SHOAL_KEY": "a key of some length"}, {"SHOAL_KEY": "a key of other length"}]
    for error in join_all(MemoryStore(), environs):
        assert isinstance(error, UsageError)
        assert "rank 1 may not join: rank 0" in str(error)
        assert "holds another job key. SHOAL_KEY_FILE (or SHOAL_KEY)" in str(error)


def test_a_key_on_one_rank_only_is_an_error_on_both() -> None:
    environs = [{"SHOAL_KEY": "a key of some length"}, {}]
    for error in join_all(MemoryStore(), environs):
        assert isinstance(error, UsageError)
        assert "rank 0 was given a job key, rank 1 was not" in str(error)


def test_with_a_key_of_its_own_the_job_puts_none_into_the_store() -> None:
    store = MemoryStore()
    with joined(store, hosts("a", "b", SHOAL_KEY="a key of some length")) as members:
        assert members[0].job_key == members[1].job_key == b"a key of some length"
    assert json.loads(store.get("shoal/rank/0", 0))["key"] is None


@pytest.mark.parametrize(
    ("environs", "n_warnings"),
    [
        (3 * [ONE_HOST], 0),
        (hosts("a", "b", "b"), 1),
        (hosts("a", "b", SHOAL_KEY="a key of some length"), 0),
    ],
)
def test_only_a_job_across_hosts_without_a_key_is_warned_and_once(
    environs: list[dict[str, str]], n_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shoal"), joined(MemoryStore(), environs):
        pass
    assert len(caplog.messages) == n_warnings
    assert all("SHOAL_KEY_FILE" in message for message in caplog.messages)


def test_ranks_that_never_came_are_named() -> None:
    with pytest.raises(TimedOut, match=r"rank 1 of 4 on .* within 0\.3 s: ranks 0, 2, 3 never"):
        join(MemoryStore(), 1, 4, timeout_s=SHORT_S)


def test_a_rank_that_cannot_be_reached_is_named_with_its_address_and_the_remedy() -> None:
    store = MemoryStore()
    with listen_tcp("127.0.0.1", (0,)) as closed:
        port = closed.getsockname()[1]
    with joined(store, hosts("a", "b")):
        record = store.get("shoal/rank/0", 0)
    endpoint = {"address": "127.0.0.1", "port": port, "interface": "eth7"}
    store.set("shoal/rank/0", rewritten(record, host_label="spruce", endpoint=endpoint))
    with pytest.raises(TimedOut) as caught:
        join(store, 1, 2, timeout_s=SHORT_S, options=options(hosts("a", "b")[1]))
    want = f"rank 0 on spruce at 127.0.0.1:{port} (eth7) could not be reached: connection refused"
    assert want in str(caught.value)
    assert "SHOAL_SOCKET_IFNAME" in str(caught.value)


def test_a_rank_that_published_but_never_connected_is_named() -> None:
    store = MemoryStore()
    with joined(store, hosts("a", "b")):
        pass
    with pytest.raises(
        TimedOut, match=r"rank 1 on .* it never connected to 127\.0\.0\.1:\d+ \(lo\)"
    ):
        join(store, 0, 2, timeout_s=SHORT_S, options=options(hosts("a", "b")[0]))


def test_the_rank_that_keeps_a_host_waiting_is_named_and_no_other() -> None:
    store = MemoryStore()
    with joined(store, 3 * [ONE_HOST]):
        pass
    with ThreadPoolExecutor() as pool:
        first = pool.submit(join, store, 0, 3, timeout_s=3 * SHORT_S)
        second = str(pool.submit(join, store, 1, 3, timeout_s=SHORT_S).exception())
    assert "rank 2 on" in str(first.exception())
    assert "rank 2 on" in second
    assert "it never connected to rank 0, which introduces the ranks of this host" in second
    assert "rank 0 on" not in second


def test_two_processes_of_one_rank_do_not_both_wait() -> None:
    store = Noticing()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(join, store, 1, 2, timeout_s=LONG_S)
        assert store.published.wait(LONG_S)
        store.published.clear()
        second = pool.submit(join, store, 1, 2, timeout_s=LONG_S)
        assert store.published.wait(LONG_S)
        with join(store, 0, 2, timeout_s=LONG_S):
            outcomes = [future.exception() or future.result() for future in (first, second)]
    lost, winner = outcomes
    assert isinstance(lost, UsageError)
    assert "another process joined as rank 1" in str(lost)
    assert isinstance(winner, Membership)
    winner.close()


@pytest.mark.parametrize(
    ("rank", "size", "timeout_s", "environ", "why"),
    [
        (2, 2, 1.0, {}, "rank 2 is not in a group of 2"),
        (-1, 2, 1.0, {}, "rank -1"),
        (0, 2, 0.0, {}, "timeout_s=0.0"),
        (0, 2, float("nan"), {}, "timeout_s=nan"),
        (0, 2, 1.0, {"SHOAL_PORT_RANGE": "5-4"}, "SHOAL_PORT_RANGE='5-4'"),
        (0, 2, 1.0, {"SHOAL_KEY": "short"}, "SHOAL_KEY holds 5 bytes"),
    ],
)
def test_wrong_arguments_are_refused(
    rank: int, size: int, timeout_s: float, environ: dict[str, str], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        join(MemoryStore(), rank, size, timeout_s=timeout_s, options=options(environ))
