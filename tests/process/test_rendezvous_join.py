"""Ranks that meet through a store: as threads, with pretended hosts, and as real processes."""

import contextlib
import json
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from process.ranks import run_ranks, start_ranks
from process.records import rewritten

from shoal.errors import Closed, TimedOut, UsageError
from shoal.rendezvous import (
    JoinOptions,
    Membership,
    MemoryStore,
    Store,
    TcpStoreClient,
    TcpStoreServer,
    farewell,
    find_place,
    join,
)
from shoal.rendezvous.door import Limits
from shoal.rendezvous.link import Link
from shoal.rendezvous.links import Links
from shoal.rendezvous.listener import listen_tcp, listen_unix, unix_address

LONG_S = 60.0  # a join that should succeed
SHORT_S = 0.3  # a join that cannot: it lasts this long
ONE_HOST: Mapping[str, str] = {}


def hosts(*ids: str, **more: str) -> list[dict[str, str]]:
    """Environments of ranks on these pretended hosts of one machine."""
    return [{"MASTER_ADDR": "127.0.0.1", "SHOAL_HOST_ID": name, **more} for name in ids]


def options(environ: Mapping[str, str], **more: object) -> JoinOptions:
    return JoinOptions(environ=environ, **more)  # type: ignore[arg-type]


def join_all(
    store: Store,
    environs: Sequence[Mapping[str, str]],
    timeout_s: float = LONG_S,
    fds: Callable[[int], Sequence[int]] = lambda _: (),
) -> list[Membership | Exception]:
    """Join as one thread per environment; what each one returned or raised."""

    def one(rank: int) -> Membership | Exception:
        try:
            chosen = options(environs[rank])
            return join(
                store, rank, len(environs), timeout_s=timeout_s, local_fds=fds, options=chosen
            )
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(one, range(len(environs))))


@contextlib.contextmanager
def joined(
    store: Store,
    environs: Sequence[Mapping[str, str]],
    fds: Callable[[int], Sequence[int]] = lambda _: (),
) -> Iterator[list[Membership]]:
    with contextlib.ExitStack() as stack:
        found = join_all(store, environs, fds=fds)
        for each in found:
            if isinstance(each, Exception):
                raise each
        yield [stack.enter_context(each) for each in found if isinstance(each, Membership)]


def say_who_you_are(membership: Membership) -> None:
    for peer in membership.peers:
        os.write(peer.socket_fd, bytes([membership.rank, peer.rank]))


def check_who_is_there(membership: Membership) -> None:
    for peer in membership.peers:
        os.set_blocking(peer.socket_fd, True)
        assert os.read(peer.socket_fd, 9) == bytes([peer.rank, membership.rank])


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = n_open()
    yield
    assert n_open() == before


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 20])
def test_ranks_of_one_host_are_linked_pairwise_without_tcp(size: int) -> None:
    store = MemoryStore()
    with joined(store, size * [ONE_HOST]) as members:
        assert len({member.epoch for member in members}) == 1
        assert len({member.job_key for member in members}) == 1
        for rank, member in enumerate(members):
            assert [peer.rank for peer in member.peers] == [r for r in range(size) if r != rank]
            assert all(peer.is_local and peer.address == "unix" for peer in member.peers)
            assert not any(os.get_inheritable(peer.socket_fd) for peer in member.peers)
            say_who_you_are(member)
        for member in members:
            check_who_is_there(member)
    for rank in range(size if size > 1 else 0):
        assert json.loads(store.get(f"shoal/rank/{rank}", 0))["endpoint"] is None


def test_ranks_of_several_hosts_are_linked_over_tcp() -> None:
    with joined(MemoryStore(), hosts("a", "a", "b", "c", "b")) as members:
        for member in members:
            local = [peer.rank for peer in member.peers if peer.is_local]
            assert local == {0: [1], 1: [0], 2: [4], 3: [], 4: [2]}[member.rank]
            for peer in member.peers:
                assert peer.is_local or peer.address.startswith("127.0.0.1:")
                assert not os.get_blocking(peer.socket_fd)
                with socket.socket(fileno=os.dup(peer.socket_fd)) as sock:
                    if not peer.is_local:
                        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            say_who_you_are(member)
        for member in members:
            check_who_is_there(member)


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


def test_descriptors_reach_every_rank_of_the_host_and_no_other() -> None:
    counts: list[int] = []
    with contextlib.ExitStack() as stack:

        def fds(n_local: int) -> Sequence[int]:
            counts.append(n_local)
            pair = os.memfd_create("first"), os.memfd_create("second")
            for fd in pair:
                stack.callback(os.close, fd)
            os.write(pair[0], b"%d" % n_local)
            return pair

        with joined(MemoryStore(), hosts("a", "a", "b"), fds) as members:
            for member in members:
                for peer in member.peers:
                    assert len(peer.fds) == (2 if peer.is_local else 0)
                    assert not any(os.get_inheritable(fd) for fd in peer.fds)
                    if peer.fds:
                        assert os.pread(peer.fds[0], 9, 0) == b"2"
                        assert os.readlink(f"/proc/self/fd/{peer.fds[1]}").startswith(
                            "/memfd:second"
                        )
    assert sorted(counts) == [1, 2, 2]


def test_what_is_taken_is_the_callers_to_close() -> None:
    with joined(MemoryStore(), 2 * [ONE_HOST]) as members:
        peers = members[0].take()
        with pytest.raises(Closed):
            members[0].take()
        members[0].close()
        os.close(peers[0].socket_fd)


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


class Noticing(MemoryStore):
    """A store that tells when a record comes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[int, dict[str, object]] = {}
        self.published = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        if key.startswith("shoal/rank/"):
            self.records[int(key.rpartition("/")[2])] = json.loads(value)
            self.published.set()


@contextlib.contextmanager
def waiting_rank_0(
    store: Noticing, size: int = 2, environ: Mapping[str, str] = ONE_HOST
) -> Iterator[tuple[Callable[[], Membership], bytes]]:
    """Rank 0, waiting for the others; gives its result and its Unix address.

    Silence is allowed for as long as the test may take, so nothing here ends by waiting it out.
    """
    patient = options(environ, limits=Limits(pending_s=LONG_S))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(join, store, 0, size, timeout_s=LONG_S, options=patient)
        assert store.published.wait(LONG_S)
        yield waiting.result, unix_address(str(store.records[0]["unix_name"]))


@contextlib.contextmanager
def callers(address: bytes, n_callers: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(n_callers)]
        for sock in made:
            sock.connect(address)
        yield made


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_two_hundred_silent_callers_do_not_hold_up_a_join() -> None:
    store = Noticing()
    with waiting_rank_0(store) as (result, address), callers(address, 200) as silent:
        second = join(store, 1, 2, timeout_s=LONG_S)
        with second, result():
            assert all(map(is_closed, silent))


def test_garbage_is_closed_without_a_reply_and_the_join_goes_on() -> None:
    store = Noticing()
    with waiting_rank_0(store) as (result, address), callers(address, 3) as rude:
        for sock, garbage in zip(
            rude, (b"GET /\r\n\r\n", bytes(9000), b"shoal/rv\x04\x00"), strict=True
        ):
            sock.sendall(garbage)
            assert is_closed(sock)
        with join(store, 1, 2, timeout_s=LONG_S), result():
            pass


def test_strangers_on_tcp_are_treated_alike() -> None:
    store = Noticing()
    environs = hosts("a", "b", "c")
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        waiting = [
            pool.submit(join, store, rank, 3, timeout_s=LONG_S, options=options(environs[rank]))
            for rank in (0, 1)
        ]
        # The TCP listeners open once all ranks are known: a leftover of rank 2 is enough for that.
        record = store.get("shoal/rank/0", LONG_S)
        store.set("shoal/rank/2", rewritten(record, host_id="set:c", key=None))
        while not store.records[0]["endpoint"]:
            store.published.clear()
            store.published.wait(LONG_S)
        endpoint = store.records[0]["endpoint"]
        assert isinstance(endpoint, dict)
        where = endpoint["address"], endpoint["port"]
        silent = [stack.enter_context(socket.create_connection(where)) for _ in range(100)]
        silent[0].sendall(b"SSH-2.0-OpenSSH\r\n")
        assert is_closed(silent[0])
        last = join(store, 2, 3, timeout_s=LONG_S, options=options(environs[2]))
        with last, waiting[0].result(), waiting[1].result():
            assert all(map(is_closed, silent[1:]))


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


def test_too_many_descriptors_are_refused() -> None:
    for error in join_all(MemoryStore(), 2 * [ONE_HOST], fds=lambda _: 17 * (0,)):
        assert isinstance(error, UsageError)
        assert "17 local_fds" in str(error)


# Real processes.


def rank_of_a_job(ranks_per_host: int) -> tuple[int, list[tuple[int, bool, bytes]]]:
    """Join through our own store and read every local peer's memory."""
    place = find_place()
    os.environ["SHOAL_HOST_ID"] = str(place.rank // ranks_per_host)
    memory = os.memfd_create("memory")
    os.write(memory, b"of rank %d" % place.rank)
    with contextlib.ExitStack() as stack:
        if place.rank == 0:
            server = TcpStoreServer(place.master_addr, place.master_port)
            stack.enter_context(contextlib.closing(server))
        store = TcpStoreClient(place.master_addr, place.master_port, timeout_s=LONG_S)
        stack.enter_context(contextlib.closing(store))
        member = join(
            store, place.rank, place.size, timeout_s=LONG_S, local_fds=lambda _: (memory,)
        )
        stack.enter_context(member)
        say_who_you_are(member)
        check_who_is_there(member)
        return member.epoch, [
            (peer.rank, peer.is_local, os.pread(peer.fds[0], 20, 0) if peer.fds else b"")
            for peer in member.peers
        ]


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4])
def test_real_processes_meet_through_our_store(ranks_per_host: int) -> None:
    results = run_ranks(rank_of_a_job, 4, ranks_per_host)
    assert len({epoch for epoch, _ in results}) == 1
    for rank, (_, peers) in enumerate(results):
        for other, is_local, memory in peers:
            assert is_local == (rank // ranks_per_host == other // ranks_per_host)
            assert memory == (b"of rank %d" % other if is_local else b"")


def publish_then_die_once() -> int:
    """Rank 1 dies right after it has published; its successor, rank 2 of the test, takes over."""
    place = find_place()
    store = TcpStoreClient("127.0.0.1", int(os.environ["STORE_PORT"]), timeout_s=LONG_S)
    if place.rank == 1:
        real_set = store.set

        def last_set(key: str, value: bytes) -> None:
            real_set(key, value)
            real_set("died", b"")
            os.kill(os.getpid(), 9)

        store.set = last_set  # type: ignore[method-assign]
    if place.rank == 2:
        store.get("died", LONG_S)
    with join(store, min(place.rank, 1), 2, timeout_s=LONG_S) as member:
        return member.epoch


def test_a_rank_that_dies_while_joining_can_be_started_again() -> None:
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0)) as server:
        port = {"STORE_PORT": str(server.port)}
        with start_ranks(publish_then_die_once, 3, env=port) as ranks:
            first, dead, successor = ranks.wait()
    assert dead.died == "was killed by SIGKILL"
    assert first.value == successor.value is not None, (first, successor)


def offer_then_die_once() -> int:
    """Rank 1 dies when rank 0 could already introduce it; its successor is rank 3 of the test."""
    place = find_place()
    store = TcpStoreClient("127.0.0.1", int(os.environ["STORE_PORT"]), timeout_s=LONG_S)
    if place.rank == 1:
        real_offer = Link.offer

        def last_offer(self: Link, fds: Sequence[int]) -> None:
            real_offer(self, fds)
            store.set("died", b"")
            os.kill(os.getpid(), 9)

        Link.offer = last_offer  # type: ignore[method-assign]
    if place.rank == 3:
        store.get("died", LONG_S)
    rank = 1 if place.rank == 3 else place.rank
    with join(store, rank, 3, timeout_s=LONG_S) as member:
        say_who_you_are(member)
        check_who_is_there(member)
        return member.epoch


def test_a_rank_that_dies_while_it_is_introduced_can_be_started_again() -> None:
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0)) as server:
        port = {"STORE_PORT": str(server.port)}
        with start_ranks(offer_then_die_once, 4, env=port) as ranks:
            first, dead, third, successor = ranks.wait()
    assert dead.died == "was killed by SIGKILL"
    assert first.value == third.value == successor.value is not None, (first, third, successor)


def join_without_descriptors() -> tuple[bool, bool]:
    """Callers take every descriptor while rank 0 waits; once they are gone, rank 1 gets in."""
    store = Noticing()
    with waiting_rank_0(store) as (result, address):
        limit = n_open() + 100
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
            # More connect than there are descriptors for: the last ones are closed at once.
            turned_away = is_closed(silent[-1])
        with join(store, 1, 2, timeout_s=LONG_S), result():
            return turned_away, len(silent) > n_free


class _DiedError(Exception):
    """In the place of a death: everything of the rank is closed."""


def test_a_rank_that_dies_once_it_is_ready_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has heard all that it wants from ranks 1 and 3, and sees only rank 2 begin anew."""
    died = threading.Event()
    say_ready = Links.say_ready

    def say_ready_and_die(self: Links) -> None:
        if self._rank == 2 and not died.is_set():
            return
        say_ready(self)
        if self._rank == 1 and self.is_open and not died.is_set():
            died.wait(0.1)  # until the others have heard
            died.set()
            raise _DiedError

    monkeypatch.setattr(Links, "say_ready", say_ready_and_die)
    monkeypatch.setattr(farewell, "say_farewell", lambda *_: None)  # as who is killed
    store, environs = MemoryStore(), hosts("a", "b", "b", "b")

    def one(rank: int) -> Membership:
        while True:
            with contextlib.suppress(_DiedError):
                return join(store, rank, 4, timeout_s=10.0, options=options(environs[rank]))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(4)))
    assert len({member.epoch for member in found}) == 1
    for member in found:
        member.close()


def test_running_out_of_descriptors_turns_callers_away_and_harms_nobody() -> None:
    assert run_ranks(join_without_descriptors, 1) == [(True, True)]


def call_as_nobody(address: bytes) -> bool:
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        return is_closed(sock)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_is_turned_away() -> None:
    store = Noticing()
    with waiting_rank_0(store) as (result, address):
        with start_ranks(call_as_nobody, 1, address) as stranger:
            (outcome,) = stranger.wait()
        assert outcome.value is True, outcome
        with join(store, 1, 2, timeout_s=LONG_S), result():
            pass


def test_a_silent_caller_is_closed_at_the_limit_while_the_join_goes_on() -> None:
    store = Noticing()
    with ThreadPoolExecutor() as pool:
        quick = JoinOptions(environ=ONE_HOST, limits=Limits(pending_s=0.01))
        waiting = pool.submit(join, store, 0, 2, timeout_s=LONG_S, options=quick)
        assert store.published.wait(LONG_S)
        with callers(unix_address(str(store.records[0]["unix_name"])), 1) as (silent,):
            assert is_closed(silent)
        with join(store, 1, 2, timeout_s=LONG_S), waiting.result():
            pass
