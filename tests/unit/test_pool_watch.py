"""The lowest worker's connections to servers: name lookups, late threads, and a job's store."""

import itertools
import os
import queue
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from process.serving import Talker

from shoal.engine import Peer
from shoal.group.pool import registry, watch
from shoal.group.pool.addresses import Address, JobEndpoint
from shoal.group.pool.protocol import Ask, Leaving, Meet, Reserve, Reserved, Status, encode, send
from shoal.group.pool.watch import Watch
from shoal.rendezvous import MemoryStore
from shoal.rendezvous.record import Endpoint
from shoal.rendezvous.roster import Entry

KEY, LONG_S = bytes(32), 20.0
ENTRY = Entry("a host", "host", b"", (Endpoint("127.0.0.1", 1, "lo"),))
LEAVING = encode(Leaving())
PLACE = Reserved("", bytes(16), ENTRY.encode(0))


class Server(Talker):
    """A server on its own thread."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self.is_silent = self._is_over = False
        self.refusal = ""
        self.port = self.listen(SO_RCVBUF=4096)
        self._thread = threading.Thread(target=self.run_until, args=(lambda: self._is_over,))
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self.endpoint.close()

    def received(self, peer: Peer, kind: int, body: bytes, fd: int) -> None:
        super().received(peer, kind, body, fd)
        message = self.messages[-1]
        if self.is_silent:
            return
        if self.refusal:
            send(peer, Reserved(self.refusal, bytes(16)))
        send(peer, Status("{}") if isinstance(message, Ask) else PLACE)


class Changes:
    """Records changes; called under the watch's lock whenever a server arrives or is lost."""

    def __init__(self) -> None:
        self._n = queue.SimpleQueue[None]()

    def __call__(self) -> None:
        self._n.put(None)

    def await_that(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            self._n.get(timeout=LONG_S)


Seen = tuple[Watch, Changes, Address]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def watched(*addresses: Address) -> tuple[Watch, Changes]:
    changes = Changes()
    return Watch(addresses, KEY, Reserve("0", "a job", 3), changes), changes


@pytest.fixture
def seen(server: Server) -> Iterator[Seen]:
    where = Address("127.0.0.1", server.port)
    made, changes = watched(where)
    changes.await_that(lambda: where in made.ready())
    yield made, changes, where
    made.close()


def test_a_slow_name_lookup_delays_no_other_server_and_known_addresses_are_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_lookups, answers = Counter[str](), threading.Event()

    def resolve(host: str) -> list[str]:
        n_lookups[host] += 1
        if host == "slow":
            assert answers.wait(LONG_S)
        return ["127.0.0.1"]

    monkeypatch.setattr(watch, "resolve", resolve)
    fast = Address("fast", server.port)
    seen, changes = watched(Address("slow", 1), fast)
    try:
        for _ in range(3):
            changes.await_that(lambda: fast in seen.ready())
            server.peers[-1].close()
            changes.await_that(lambda: fast not in seen.ready())
        changes.await_that(lambda: fast in seen.ready())
        assert n_lookups == {"slow": 1, "fast": 1}
    finally:
        answers.set()
        seen.close()


def test_a_lost_address_is_looked_up_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = itertools.chain(["127.0.0.2"], itertools.repeat("127.0.0.1"))  # the first has no server
    monkeypatch.setattr(watch, "_LOOKUP_S", 0.0)
    monkeypatch.setattr(watch, "resolve", lambda _host: [next(hosts)])
    moved = Address("moved", server.port)
    seen, changes = watched(moved)
    try:
        changes.await_that(lambda: moved in seen.ready())
    finally:
        seen.close()


def test_a_roster_longer_than_a_sockets_buffer_arrives_completely_without_a_ping(
    server: Server, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_PING_S", 1e6)
    made, changes, where = seen
    meets = [Meet(view, 3, 3, 4, bytes([view]) * (500 << 10)) for view in (1, 2, 3)]
    changes.await_that(lambda: where in made.places())
    peer = made._servers[0].peer
    with socket.socket(fileno=os.dup(peer.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    made.meet((where, meet) for meet in meets)
    assert where not in made.places()
    changes.await_that(lambda: len(server.messages) == 1 + len(meets))
    changes.await_that(lambda: where in made.places())
    assert server.messages == [Reserve("0", "a job", 3), *meets]


def test_a_server_is_not_lost_when_its_worker_leaves(seen: Seen) -> None:
    made, _, where = seen
    made.close()
    assert (set(made.ready()), made.trouble(), made.gone()) == ({where}, {}, {where})


def test_a_late_thread_reads_messages_before_giving_a_server_up(server: Server, seen: Seen) -> None:
    made, _, where = seen
    with made._lock:  # the watch's thread waits
        one, now = made._servers[0], time.monotonic()
        for server.is_silent in (False, True):
            one._ping_at = 0.0
            one.step(now)
            if not server.is_silent:
                assert select.select([one.peer.fileno()], [], [], LONG_S)[0]
            made._step(now + 10.0)  # the pong has been waiting as long
            assert (where in made.ready()) is not server.is_silent
        assert made.trouble() == {where: "does not answer"}


def test_a_server_that_a_view_has_lost_is_given_up_soon_if_it_does_not_answer(
    server: Server, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, changes, where = seen
    monkeypatch.setattr(watch, "_PONG_S", 1e6)
    server.is_silent = True
    monkeypatch.setattr(watch, "_CHECK_S", 0.01)
    made.check(where)
    changes.await_that(lambda: where not in made.ready())
    assert made.trouble() == {where: "does not answer"}


def test_a_dialled_server_is_awaited_at_once(seen: Seen) -> None:
    made, *_ = seen
    with made._lock:
        made._servers[0].fail("was lost", 0.0)
        now = time.monotonic()
        assert made._step(now) <= now


def test_messages_after_a_refusal_are_ignored(server: Server, seen: Seen) -> None:
    made, changes, where = seen
    server.refusal = "no"
    with made._lock:
        made._servers[0].send(Ask())
    changes.await_that(lambda: where not in made.ready())
    assert made.trouble() == {where: "refuses: no"}
    assert made.gone() == {where}
    assert not made.places()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ((99, b""), "was lost: it spoke out of turn"),
        (encode(Ask()), "was lost: it spoke out of turn"),
        ((encode(PLACE)[0], b"x"), "was lost: it sent a malformed message (too short)"),
        (encode(PLACE._replace(entry=b"x")), "was lost: it sent a malformed message (too short)"),
        (LEAVING, "is about to end"),
    ],
)
def test_a_server_that_sends_garbage_is_lost_and_dialled_again(
    message: tuple[int, bytes], why: str, server: Server, seen: Seen
) -> None:
    made, changes, where = seen
    reasons: list[str] = []

    def on_change() -> None:
        reasons.append(made.trouble().get(where, ""))
        changes()

    made.on_change = on_change
    server.peers[-1].send(*message)
    changes.await_that(lambda: reasons)
    assert reasons[0] == why
    if message != LEAVING:
        changes.await_that(lambda: where in made.ready())


ENDPOINT = JobEndpoint("host", 1, "job")


class Store(MemoryStore):
    """A store whose connection is lost once `n_left` values were read."""

    n_left = 1 << 60

    def add(self, key: str) -> int:
        n = int(self.try_get(key) or 0) + 1
        self.set(key, str(n).encode())
        return n

    def try_get(self, key: str) -> bytes | None:
        self.n_left -= 1
        if self.n_left < 0:
            raise ConnectionResetError("it was started again")
        return super().try_get(key)

    def close(self) -> None:
        pass


def test_a_server_is_found_in_a_restarted_store(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[Any] = [Store(), Store()]
    for store, port in ((stores[0], 1), (stores[0], 2), (stores[1], 3)):
        registry.leave(store, ENDPOINT, KEY, Address("server", port))
    stores[0].n_left = 3
    connections = iter(stores)
    monkeypatch.setattr(registry, "TorchStoreClient", lambda *_: next(connections))
    monkeypatch.setattr(registry, "_RETRY_S", 0.0)
    found: list[int] = []
    is_there = threading.Event()

    def on_found(address: Address) -> None:
        found.append(address.port)
        if address.port == 3:
            is_there.set()

    looking = registry.Registry(ENDPOINT, KEY, on_found)
    was_found = is_there.wait(10.0)
    looking.close()
    assert was_found
    assert found == [1, 2, 3]


def test_a_restarted_server_takes_no_second_place() -> None:
    store: Any = Store()
    first, second = Address("server", 1), Address("server", 2)
    places = [registry.leave(store, ENDPOINT, KEY, one) for one in (first, second, first, second)]
    assert places == 2 * [f"{registry._folder(ENDPOINT, KEY)}/{at}" for at in (1, 2)]
    assert len(store._values) == 3  # and the number of places
