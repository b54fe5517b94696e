"""One flipped bit in a handshake costs one more attempt."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from process.joining import LONG_S, Misleading, hosts
from process.relay import Relay

from shoal.rendezvous import JoinOptions, join
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

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
def test_a_bit_flipped_during_authentication_does_not_fail_the_join(
    sender: str, what: str, at: int
) -> None:
    with Relay(lambda: store.real_port, flip, at, sender) as between:
        store = Misleading(between.port)

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
        Relay(lambda: server.port, flip, at, sender) as between,
        contextlib.closing(TcpStoreClient("127.0.0.1", between.port, timeout_s=LONG_S)) as client,
    ):
        client.set("a", b"1")
        assert client.try_get("a") == b"1"
        assert between.n_connections > 1, f"nobody minded a wrong {what}"
