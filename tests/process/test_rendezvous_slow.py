"""Joins that cannot finish warn of the reason early, and end at their deadline."""

import contextlib
import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from process.joining import LONG_S, ONE_HOST, Log, Misleading, ears_of, hosts, warnings_of
from process.stage import stop

import shoal
from shoal.errors import PeerLost, TimedOut
from shoal.rendezvous import JoinOptions, MemoryStore, Store, TorchStore, join
from shoal.rendezvous.store import asking
from shoal.rendezvous.store.client import TcpStoreClient

HOSTS = hosts("a", "b")


def test_every_rank_warns_of_a_never_started_one_at_doubling_intervals() -> None:
    # Early warnings may name only the store, which was too slow to answer.
    words = "rank 2 never published a record (not started, dead,"
    ears = ears_of(MemoryStore(), 3 * [ONE_HOST], {0: words, 1: words}, least=4)
    doubled = [f"{0.01 * 2**n:g}" for n in range(20)]
    for rank, ear in enumerate(ears):
        # NOT in order: a warning that waits for the store may be overtaken by the next one.
        said = re.compile(rf"rank {rank} of 3 on .* has not joined after ([0-9.]+) s: ")
        after = [found[1] for text in ear.texts if (found := said.match(text))]
        assert len(after) == len(ear.texts)
        assert len(set(after) & set(doubled)) == len(after)


@pytest.mark.parametrize("host", ["127.0.1.1", "10.0.0.1"])
def test_a_rank_that_misses_others_warns_of_a_store_at_a_loopback_address(host: str) -> None:
    store = MemoryStore()
    store.host = host
    words = {0: "rank 1 never published a record"}
    [warned] = warnings_of(store, 2 * [{"MASTER_ADDR": "localhost"}], words)
    text = "a store at the loopback address 127.0.1.1 can be reached from its own host only"
    assert (text in warned) == (host == "127.0.1.1")


@contextlib.contextmanager
def dropping() -> Iterator[int]:
    """A port that neither accepts nor refuses connections, as behind a firewall that drops."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers: list[socket.socket] = []
        # More than its queue holds, and until one is not accepted.
        while len(fillers) < 3 or select.select([], fillers[-1:], [], 0)[1]:
            fillers.append(stack.enter_context(socket.socket()))
            fillers[-1].setblocking(False)
            fillers[-1].connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_both_sides_warn_of_a_firewall_that_drops() -> None:
    with dropping() as port:
        refused = f"at 127.0.0.1:{port} (eth7) could not be reached: no answer within 0.05 s"
        words = {0: "it never connected to 127.0.0.1:", 1: refused}
        texts = warnings_of(Misleading(port), HOSTS, words, dial_s=0.05)
    for rank, text in enumerate(texts):
        assert f"rank {1 - rank} on " in text
        assert "set SHOAL_SOCKET_IFNAME on both hosts" in text


def test_all_ranks_warn_of_the_two_ranks_that_cannot_connect() -> None:
    """Only rank 3 cannot reach its parent, rank 1."""
    elsewhere = "did not link up: it never connected to rank 1, through which it meets"
    words = {0: elsewhere, 1: "rank 3 on ", 2: elsewhere, 3: "rank 1 on "}
    with dropping() as port:
        store = Misleading(port, rank=1)
        texts = warnings_of(store, hosts("a", "b", "c", "d"), words, dial_s=0.05)
    for rank in (0, 2):
        assert f"rank {rank} of 4 on " in texts[rank]
        assert ": rank 3 on " in texts[rank]


SERVERS = {
    "torch's": """from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)""",
    "ours": """from shoal.rendezvous.store.server import TcpStoreServer
store = TcpStoreServer("127.0.0.1", 0)""",
}
SERVE = "\nimport sys\nprint(store.port, flush=True)\nsys.stdin.read()"
Connect = Callable[[], Any]


@contextlib.contextmanager
def served(whose: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a program that serves a store; yield its process and port."""
    command = [sys.executable, "-c", SERVERS[whose] + SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def torch_server() -> Iterator[tuple[subprocess.Popen[bytes], Connect]]:
    """Serve torch's store in a process; yield it and a client with a long timeout."""
    dist = pytest.importorskip("torch.distributed")
    long = timedelta(seconds=10 * LONG_S)
    with served("torch's") as (process, port):
        yield process, lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=long)


def store_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "shoal store"}


@pytest.mark.parametrize("whose", ["torch's", "ours"])
def test_a_join_ends_at_its_deadline_though_the_store_is_stopped(whose: str) -> None:
    """The stuck thread ends once the store continues or our client is closed."""
    with contextlib.ExitStack() as stack:
        if whose == "ours":
            server, port = stack.enter_context(served(whose))
            ours = TcpStoreClient("127.0.0.1", port, timeout_s=10 * LONG_S)
            store: Store = ours
        else:
            server, connect = stack.enter_context(torch_server())
            store = TorchStore(connect())
        stop(server.pid)
        before = store_threads()
        started = time.monotonic()
        with pytest.raises(TimedOut) as caught:
            join(store, 1, 2, timeout_s=0.5)
        assert time.monotonic() - started < LONG_S
        for fact in ("rank 1 of 2 on ", "within 0.5 s", "the store at 127.0.0.1 has not answered"):
            assert fact in str(caught.value)
        (left,) = store_threads() - before
        if whose == "ours":
            ours.close()
        else:
            os.kill(server.pid, signal.SIGCONT)
        left.join(LONG_S)
        assert not left.is_alive()


def test_init_ends_at_its_deadline_if_torchruns_store_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch.distributed")
    with served("torch's") as (server, port):
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            monkeypatch.setenv(name, str(value))
        stop(server.pid)
        before = store_threads()
        with pytest.raises(TimedOut, match=r"torchrun's store at 127\.0\.0\.1 has not answered"):
            shoal.init(timeout_s=0.5)
        (left,) = store_threads() - before
        server.kill()
        left.join(LONG_S)
        assert not left.is_alive()


class Failing(MemoryStore):
    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        raise RuntimeError("connection reset by peer")


def test_a_dropped_error_releases_its_store() -> None:
    gc.disable()  # a cycle would keep the connection until the next collection
    try:
        store = Failing()
        is_there = weakref.ref(store)
        with contextlib.suppress(PeerLost):
            join(store, 0, 2, timeout_s=LONG_S)
        for thread in store_threads():
            thread.join(LONG_S)
        del store
        assert is_there() is None
    finally:
        gc.enable()


def test_a_join_warns_of_a_stopped_torch_store_and_succeeds_when_it_continues() -> None:
    with torch_server() as (server, connect), ThreadPoolExecutor(2) as pool:
        stores = [TorchStore(connect()) for _ in range(2)]
        stop(server.pid)

        def go_on() -> None:
            is_named = "the store at 127.0.0.1 has not answered for" in log.texts[-1]
            if len(log.texts) > 1 and is_named:
                os.kill(server.pid, signal.SIGCONT)

        log = Log(go_on)
        chosen = JoinOptions(warn_s=0.01, log=log)
        first = pool.submit(join, stores[0], 0, 2, timeout_s=LONG_S, options=chosen)
        second = pool.submit(join, stores[1], 1, 2, timeout_s=LONG_S)
        with first.result() as one, second.result() as other:
            assert one.epoch == other.epoch
    assert len(log.texts) >= 2


def test_a_join_fails_at_once_when_its_torch_store_dies() -> None:
    with torch_server() as (server, connect), ThreadPoolExecutor(1) as pool:
        store, witness = TorchStore(connect()), connect()
        waiting = pool.submit(join, store, 1, 2, timeout_s=10 * LONG_S)
        witness.wait(["shoal/0/rank/1"])
        server.kill()
        error = waiting.exception(LONG_S)
    assert isinstance(error, PeerLost)
    assert "at 127.0.0.1 no longer serves the store" in str(error)
    assert "rank 0 has not called all ranks, and the store did not show" in str(error)
    assert "never published" not in str(error)  # a rank that waits for rank 0 reads no other record


class Going(MemoryStore):
    """A store that fails at the record of rank 2, which only the error text needs."""

    def try_get(self, key: str) -> bytes | None:
        if key == "shoal/0/rank/2":
            raise RuntimeError("it is gone")
        return super().try_get(key)


def test_a_store_lost_at_a_deadline_is_blamed_and_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_SUSPICIOUS_S", LONG_S)  # however late it answers
    with pytest.raises(PeerLost) as caught:
        join(Going(), 1, 3, timeout_s=0.05)
    text = str(caught.value)
    assert "no longer serves the store: it is gone" in text
    assert "could not join within 0.05 s" in text
    assert "never published" not in text
