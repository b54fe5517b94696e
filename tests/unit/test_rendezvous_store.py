"""Every store has the same contract; shoal's store over TCP also keeps strangers out."""

import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from process.joining import is_closed
from process.ranks import free_port

from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.launch import _end_service
from shoal.rendezvous import MemoryStore, Store, TorchStore
from shoal.rendezvous.door import Door, visit
from shoal.rendezvous.listener import hold_port
from shoal.rendezvous.store import server as serving
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer
from shoal.rendezvous.store.wire import GET, SET

KEY = b"k" * 32


@pytest.fixture(params=["memory", "torch", "tcp", "tcp with a key"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    """Makes clients of one store."""
    if request.param == "memory":
        memory = MemoryStore()
        yield lambda: memory
    elif request.param == "torch":
        of_torch = pytest.importorskip("torch.distributed").HashStore()
        yield lambda: TorchStore(of_torch)
    else:
        key = KEY if request.param == "tcp with a key" else None
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(served(key))
            yield lambda: stack.enter_context(client(server, key))


@contextlib.contextmanager
def served(key: bytes | None = None) -> Iterator[TcpStoreServer]:
    with contextlib.closing(TcpStoreServer("127.0.0.1", 0, key=key)) as server:
        yield server


@contextlib.contextmanager
def client(server: TcpStoreServer, key: bytes | None = None) -> Iterator[TcpStoreClient]:
    made = TcpStoreClient("127.0.0.1", server.port, timeout_s=30, key=key)
    with contextlib.closing(made):
        yield made


def test_a_value_set_by_one_client_is_read_by_another(connect: Callable[[], Store]) -> None:
    one, other = connect(), connect()
    assert other.try_get("a") is None
    for value in (b"", b"1", bytes(range(256)) * 16):
        one.set("a", value)
        assert other.try_get("a") == other.get("a", 0.0) == value
    assert other.try_get("b") is None


def test_many_values_are_read_at_once_or_none_of_them(connect: Callable[[], Store]) -> None:
    store = connect()
    keys = [f"key {n}" for n in range(40)]
    for key in keys[:-1]:
        store.set(key, key.encode() * 100)
    assert store.try_get_all(keys) is None
    assert store.try_get_all(keys[3:20]) == [key.encode() * 100 for key in keys[3:20]]
    store.set(keys[-1], b"")
    assert store.try_get_all(keys[::-1]) == [b""] + [k.encode() * 100 for k in keys[-2::-1]]
    assert store.try_get_all([]) == []


@pytest.mark.parametrize(("timeout_s", "asked_ms"), [(0.0, 1), (0.0001, 1), (0.0051, 6)])
def test_torchs_short_wait_for_a_value_is_no_lost_store(timeout_s: float, asked_ms: int) -> None:
    hasty = MagicMock()  # waits of torch's stores count whole milliseconds, and are too short
    hasty.wait.side_effect = RuntimeError("wait timeout")
    with pytest.raises(TimedOut):
        TorchStore(hasty).get("a", timeout_s)
    hasty.wait.assert_called_once_with(["a"], timedelta(milliseconds=asked_ms))


def test_a_get_of_no_value_times_out_and_the_store_goes_on(connect: Callable[[], Store]) -> None:
    store = connect()
    with pytest.raises(TimedOut, match=r"'never'.* within 0.01 s"):
        store.get("never", 0.01)
    with pytest.raises(TimedOut):
        store.get("never", -60.0)  # the calling thread is late
    store.set("never", b"after all")
    assert store.try_get("never") == b"after all"


def test_a_get_over_tcp_lasts_no_less_than_its_timeout() -> None:
    with served() as server, client(server) as store:
        for timeout_s in (0.0018, 0.0019, 0.0029):  # frames carry whole milliseconds
            began = time.monotonic()
            with pytest.raises(TimedOut):
                store.get("never", timeout_s)
            assert time.monotonic() - began >= timeout_s


def test_the_torch_store_finds_its_host_through_prefixes() -> None:
    assert TorchStore(SimpleNamespace()).host is None
    inner = SimpleNamespace(host="10.0.0.1")
    assert TorchStore(SimpleNamespace(underlying_store=inner)).host == "10.0.0.1"


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, b"x" * 32), (None, KEY), (KEY, None)])
def test_another_key_is_refused_by_name(ours: bytes | None, theirs: bytes | None) -> None:
    with served(theirs) as server, pytest.raises(UsageError, match=r"another key.*SHOAL_KEY_FILE"):
        TcpStoreClient("127.0.0.1", server.port, timeout_s=30, key=ours)


@pytest.mark.parametrize(
    "requests",
    [
        [(9, b"k")],  # no such request
        [(SET, b"")],
        [(SET, b"\0\0v")],  # no key
        [(SET, b"\2\0k")],  # less than announced
        [(SET, b"\1\1" + bytes(257))],  # too long a key
        [(SET, b"\1\0k" + bytes(4352))],  # too long a value
        [(GET, b"\0\0\0")],
        [(GET, b"\0\0\0\0\xff")],  # not text
        [(GET, bytes(4 + 257))],
        [(GET, b"\xff\xff\0\0k"), (GET, b"\0\0\0\0k")],  # one more while it waits
    ],
)
def test_a_client_that_sends_garbage_is_closed_and_the_store_goes_on(requests: list[Any]) -> None:
    with served() as server, client(server) as good, client(server) as bad:
        for kind, body in requests:
            bad._peer.send(kind, body)
        with pytest.raises(PeerLost, match="no longer serves"):
            bad.get("never", 600)
        good.set("k", b"there")
        assert good.get("k", 1) == b"there"


def test_full_stores_refuse_new_values_and_change_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MOST_BYTES", 1000)
    with served() as server, client(server) as store:
        for key in "abc":
            store.set(key, bytes(40))  # about 300 bytes each
        with pytest.raises(ShoalError, match="is full and did not take 'd'"):
            store.set("d", b"")
        with pytest.raises(ShoalError, match="is full and did not take 'a'"):
            store.set("a", bytes(4096))
        store.set("a", b"2")
        assert store.try_get("a") == b"2"


def test_more_clients_than_allowed_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.Serving, "most_clients", 1)
    with served() as server, client(server) as first:
        with client(server) as second, pytest.raises(PeerLost):
            second.try_get("a")
        first.set("a", b"1")


def test_strangers_are_closed_and_clients_are_served_among_them() -> None:
    """They are silent, send garbage, begin a valid handshake, or hang up."""
    words = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(65536), b"shoal/rv"]
    words += [b"shoal/rv\x02\0\x01\0"]
    with served() as server, contextlib.ExitStack() as stack:
        held = []
        for turn in range(200):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
            with contextlib.suppress(OSError):  # it was closed meanwhile
                sock.sendall(words[turn % len(words)])
            held.append(sock) if turn % 7 else sock.close()
        with client(server) as store:
            store.set("a", b"1")
            assert store.try_get("a") == b"1"
        assert all(map(is_closed, held))


def test_too_large_a_value_or_key_is_refused_before_it_is_sent() -> None:
    with served() as server, client(server) as store:
        with pytest.raises(UsageError, match="4097 bytes for 'a'; expected at most 4096"):
            store.set("a", bytes(4097))
        with pytest.raises(UsageError, match="a key of 257 bytes"):
            store.try_get("k" * 257)
        assert store.try_get("a") is None


def test_an_address_of_another_host_is_named() -> None:
    words = r"MASTER_ADDR=198\.51\.100\.1, port 0: .*host that rank 0 runs"
    with pytest.raises(UsageError, match=words):
        TcpStoreServer("198.51.100.1", 0)


def test_a_held_port_is_used_by_the_store_started_there_and_by_no_other_program() -> None:
    with hold_port() as held, socket.socket() as other:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with contextlib.closing(TcpStoreServer("127.0.0.1", port)) as server:
            assert server.port == port


def test_a_client_connects_to_a_server_that_starts_later() -> None:
    port = free_port()
    found: list[TcpStoreClient] = []
    connecting = threading.Thread(
        target=lambda: found.append(TcpStoreClient("127.0.0.1", port, timeout_s=60))
    )
    connecting.start()
    with contextlib.closing(TcpStoreServer("127.0.0.1", port)):
        connecting.join()
        assert found[0].try_get("a") is None
        found[0].close()


def test_a_server_that_closes_is_a_lost_peer_and_stays_lost() -> None:
    with served() as server, client(server) as store:
        server.close()
        server.close()
        words = r"rank 0 at 127\.0\.0\.1:.* no longer serves the store"
        for _ in range(2):
            with pytest.raises(PeerLost, match=words):
                store.try_get("a")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_a_client_without_a_store_warns_names_the_address_and_explains_loopback(
    host: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.rendezvous.store.client._WARN_S", 0.0)
    with hold_port() as held:  # no listener
        port = held.getsockname()[1]
        with pytest.raises(TimedOut) as raised:
            TcpStoreClient(host, port, timeout_s=0.05)
    assert f"no store of shoal answered at {host}:{port}" in caplog.messages[0]
    text = str(raised.value)
    for fact in (f"{host}:{port} within 0.05 s", "refused", "MASTER_PORT", "loopback address"):
        assert fact in text
    assert "from its own host only: if rank 0" in text


def test_names_that_do_not_resolve_are_looked_up_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups: list[str] = []

    def fail(host: str) -> list[str]:
        lookups.append(host)
        raise OSError(f"{host} is unknown")

    monkeypatch.setattr("shoal.rendezvous.store.client.resolve", fail)
    with pytest.raises(TimedOut, match="is unknown"):
        TcpStoreClient("head", 9, timeout_s=0.3)
    assert len(lookups) <= 6  # after 0, 20, 60, 140 and 300 ms, and for the text of the error


def test_an_error_about_no_store_elsewhere_does_not_mention_loopback() -> None:
    with pytest.raises(TimedOut) as raised:
        TcpStoreClient("192.0.2.1", 9, timeout_s=0.05)
    assert "loopback" not in str(raised.value)


def test_a_server_warns_once_of_clients_with_another_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"), served(KEY) as server:
        for _ in range(3):
            with pytest.raises(UsageError):
                TcpStoreClient("127.0.0.1", server.port, timeout_s=30, key=b"x" * 32)
    (text,) = caplog.messages
    assert "holds another job key tried to reach the store of rank 0, and was refused" in text
    assert "SHOAL_KEY_FILE" in text


def test_a_server_can_wait_until_its_clients_have_left() -> None:
    with served() as server:
        assert server.await_leavers(0)
        with client(server) as store:
            store.set("a", b"1")
            assert not server.await_leavers(0)
        assert server.await_leavers(60)


def test_a_forked_child_does_not_use_or_close_its_parents_clients() -> None:
    with served() as server, client(server) as store:
        store.set("a", b"1")
        child = os.fork()
        if child == 0:
            is_refused = False
            try:
                store.try_get("a")
            except PeerLost:
                is_refused = True
            finally:
                store.close()
                server.close()
                os._exit(not is_refused)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert store.try_get("a") == b"1"
        with client(server) as other:
            assert other.try_get("a") == b"1"


def test_an_interrupted_wait_for_readers_frees_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    server = TcpStoreServer("127.0.0.1", free_port())
    monkeypatch.setattr(server, "await_leavers", interrupt)
    monkeypatch.setattr("shoal.launch._LEAST_SERVICE_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        _end_service(server, KeyboardInterrupt)
    with contextlib.closing(TcpStoreServer("127.0.0.1", server.port)):
        pass


def test_a_client_without_a_descriptor_fails_at_once_and_does_not_blame_rank_0() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
        with pytest.raises(UsageError, match=r"no file descriptor left to reach .*ulimit -n"):
            TcpStoreClient("127.0.0.1", 1, timeout_s=60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_visitor_that_asks_after_anothers_loss_does_not_wait() -> None:
    with Door({}) as door, contextlib.ExitStack() as visits:

        def enter() -> TcpStoreClient:
            return visits.enter_context(visit(door.address, "meeting", 60, {}, silent_s=60))

        door.open("meeting")
        early = enter()
        early.set("here/0", b"")
        with (
            contextlib.suppress(KeyError),
            visit(door.address, "meeting", 60, {}, silent_s=60) as lost,
        ):
            lost.set("here/1", b"")
            raise KeyError
        for asking in (early, enter()):
            with pytest.raises(PeerLost):
                asking.get("size", 60)


def test_a_stopped_process_is_named_by_the_address_of_its_door() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # its kernel still accepts connections
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        with pytest.raises(TimedOut) as raised, visit(address, "meeting", 60, {}, silent_s=0.1):
            pass
    assert str(raised.value).endswith(": is it stopped, or its host cut off?")
    assert f"the process at {address} did not answer within 0.1 s" in str(raised.value)
    assert "MASTER_ADDR" not in str(raised.value)
