"""The lowest worker's eye on servers: lookups of names, and threads that are late."""

import itertools
import queue
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.engine import Endpoint as NativeEndpoint
from shoal.engine import ServerHandshake
from shoal.group.pool import lookup, watch
from shoal.group.pool.addresses import Address
from shoal.group.pool.protocol import (
    Ask,
    Frames,
    Meet,
    Message,
    Reserve,
    Reserved,
    Status,
    encode,
    server_key,
)
from shoal.group.pool.watch import Watch
from shoal.rendezvous.record import Endpoint
from shoal.rendezvous.roster import Entry

KEY, LONG_S = bytes(32), 20.0
ENTRY = Entry("a host", "host", b"", (Endpoint("127.0.0.1", 1, "lo"),))


class Server:
    """Takes one connection after the other, and drops it when it is told to."""

    def __init__(self) -> None:
        self.met: list[Meet] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.port: int = self._listener.getsockname()[1]
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def drop(self) -> None:
        assert self._sock is not None
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._sock, _ = self._listener.accept()
                with self._sock:
                    self._serve(self._sock)
        except OSError:
            return

    def _serve(self, sock: socket.socket) -> None:
        handshake, frames = ServerHandshake(lambda _hello: server_key(KEY)), Frames()
        while handshake.wants:
            sock.sendall(handshake.feed(sock.recv(handshake.wants)))
        while data := sock.recv(4096):
            for message in frames.feed(data):
                sock.sendall(encode(self._answer(message)))

    def _answer(self, message: Message) -> Message:
        if isinstance(message, Ask):
            return Status("{}")
        if isinstance(message, Meet):
            self.met.append(message)
        return Reserved("", bytes(16), ENTRY.encode(0))


class Changes:
    """Told whenever a server comes or goes, under the lock of the watch."""

    def __init__(self) -> None:
        self._told = queue.SimpleQueue[None]()

    def __call__(self) -> None:
        self._told.put(None)

    def await_that(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._told.get(timeout=LONG_S)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_a_name_that_resolves_slowly_holds_no_other_server_up_and_known_names_are_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_lookups, answers = Counter[str](), threading.Event()

    def resolve(host: str, port: int, _kind: object) -> list[Any]:
        n_lookups[host] += 1
        if host == "slow":
            assert answers.wait(LONG_S)
        return [(0, 0, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(lookup, "resolve", resolve)
    changes, fast = Changes(), Address("fast", server.port)
    seen = Watch([Address("slow", 1), fast], KEY, Reserve("0", "a job", 3), changes)
    try:
        for _ in range(3):
            changes.await_that(lambda: fast in seen.ready())
            server.drop()
            changes.await_that(lambda: fast not in seen.ready())
        changes.await_that(lambda: fast in seen.ready())
        assert n_lookups == {"slow": 1, "fast": 1}
    finally:
        answers.set()
        seen.close()


def test_a_server_that_no_known_address_leads_to_is_looked_up_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = itertools.chain(["127.0.0.2"], itertools.repeat("127.0.0.1"))  # nobody is at the first
    monkeypatch.setattr(lookup, "_AGAIN_S", 0.0)
    monkeypatch.setattr(
        lookup, "resolve", lambda _host, port, _kind: [(0, 0, 0, "", (next(hosts), port))]
    )
    changes, moved = Changes(), Address("moved", server.port)
    seen = Watch([moved], KEY, Reserve("0", "a job", 3), changes)
    try:
        changes.await_that(lambda: moved in seen.ready())
    finally:
        seen.close()


def test_a_roster_longer_than_a_socket_takes_at_once_arrives_whole(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_PING_S", 1e6)  # no ping moves it on
    changes, where = Changes(), Address("127.0.0.1", server.port)
    seen = Watch([where], KEY, Reserve("0", "a job", 3), changes)
    meets = [Meet(view, 3, 3, 4, bytes([view]) * (500 << 10)) for view in (1, 2, 3)]
    try:
        changes.await_that(lambda: where in seen.places())
        sock = seen._servers[0]._sock
        assert sock is not None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        seen.meet((where, meet) for meet in meets)
        changes.await_that(lambda: len(server.met) == len(meets))
        changes.await_that(lambda: where in seen.places())
    finally:
        seen.close()
    assert server.met == meets
    assert seen.places() == {where: ENTRY}


def test_a_thread_that_is_late_reads_what_has_come_before_it_gives_a_server_up() -> None:
    changes: list[None] = []
    with selectors.DefaultSelector() as selector:
        reserve, endpoint = Reserve("0", "a job", 3), NativeEndpoint(object())
        server = watch._Server(
            *(Address("server", 1), KEY, reserve, selector, endpoint),
            *(lambda: changes.append(None), int),
        )
        server._take(Reserved("", bytes(16), ENTRY.encode(0)))
        server._sock, own = socket.socketpair()  # type: ignore[assignment]
        selector.register(server._sock, selectors.EVENT_READ)
        asked_at = server._ping_at
        server._until = asked_at - 10.0
        server.step(read_at=server._until - 0.1)  # an interpreter was held since then
        assert server.identity is not None
        server.step(read_at=server._until)
        assert server.identity is None
        own.close()
        endpoint.close()


def test_what_comes_with_a_refusal_is_not_taken() -> None:
    with selectors.DefaultSelector() as selector:
        where, endpoint = Address("server", 1), NativeEndpoint(object())
        reserve = Reserve("0", "a job", 3)
        server = watch._Server(where, KEY, reserve, selector, endpoint, int, int)
        server._sock, other = socket.socketpair()  # type: ignore[assignment]
        selector.register(server._sock, selectors.EVENT_READ)
        for answer in (Reserved("no", bytes(16)), Reserved("", bytes(16), ENTRY.encode(0))):
            other.sendall(encode(answer))
        server._on_data()
        other.close()
        endpoint.close()
        assert not server.is_connected
        assert (server.identity, server.entry) == (None, None)
        assert server.trouble == "refuses: no"
