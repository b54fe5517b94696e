"""One flipped bit in a handshake costs one more attempt."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from process.joining import LONG_S, hosts
from process.records import record_of, rewritten

from shoal.rendezvous import JoinOptions, MemoryStore, join
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

HOSTS = hosts("a", "b")

# Bytes of the complete exchange, by sender.
FROM_CLIENT = {"hello: epoch": 12, "hello: rank": 20, "hello: nonce": 40, "hello: mac": 50}
FROM_CLIENT["proof: mac"] = 64 + 20
FROM_SERVER = {"challenge: nonce": 20, "welcome: kind": 28 + 10, "welcome: mac": 28 + 20}
FLIPS = [("client", *flip) for flip in FROM_CLIENT.items()]
FLIPS += [("server", *flip) for flip in FROM_SERVER.items()]


class Relay:
    """Forwards connections to a port and flips one bit in the first."""

    def __init__(self, port: Callable[[], int], sender: str, at: int) -> None:
        self._target = port
        self._flips = {sender: at}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.n_connections = 0

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.n_connections += 1
                far = socket.create_connection(("127.0.0.1", self._target()))
                self._open += [near, far]
                for sender, one, other in (("client", near, far), ("server", far, near)):
                    way = one, other, self._flips.pop(sender, -1)
                    self._threads.append(threading.Thread(target=self._pass_on, args=way))
                    self._threads[-1].start()

    def _pass_on(self, one: socket.socket, other: socket.socket, at: int) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(4096)):
                if 0 <= at < len(data):
                    data[at] ^= 2
                at -= len(data)
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG_S)
        for sock in self._open:
            sock.close()


@contextlib.contextmanager
def relay(port: Callable[[], int], sender: str, at: int) -> Iterator[Relay]:
    with contextlib.closing(Relay(port, sender, at)) as made:
        yield made


class Detour(MemoryStore):
    """Publishes the relay as the address of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.real_port = 0
        self.relay_port = 0

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/rank/0") and (endpoint := record_of(value).endpoint) is not None:
            self.real_port = endpoint.port
            value = rewritten(value, endpoint=endpoint._replace(port=self.relay_port))
        super().set(key, value)


@pytest.mark.parametrize(("sender", "what", "at"), FLIPS)
def test_a_bit_flipped_during_authentication_does_not_fail_the_join(
    sender: str, what: str, at: int
) -> None:
    store = Detour()
    with relay(lambda: store.real_port, sender, at) as between:
        store.relay_port = between.port

        def one(rank: int) -> int:
            options = JoinOptions(environ=HOSTS[rank])
            with join(store, rank, 2, timeout_s=LONG_S, options=options) as membership:
                return membership.epoch

        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(one, range(2))
        assert first == second
        assert between.n_connections > 1, f"nobody minded a wrong {what}"


@pytest.mark.parametrize(("sender", "what", "at"), FLIPS)
def test_a_bit_flipped_on_the_way_to_the_store_does_not_fail_the_job(
    sender: str, what: str, at: int
) -> None:
    with (
        contextlib.closing(TcpStoreServer("127.0.0.1", 0)) as server,
        relay(lambda: server.port, sender, at) as between,
        contextlib.closing(TcpStoreClient("127.0.0.1", between.port, timeout_s=LONG_S)) as client,
    ):
        client.set("a", b"1")
        assert client.try_get("a") == b"1"
        assert between.n_connections > 1, f"nobody minded a wrong {what}"
