"""Callers that are no ranks are turned away, and the join goes on."""

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
from process.joining import JOIN, LONG_S, Noticing, hosts, is_closed, options, waiting_rank_0
from process.ranks import run_ranks, start_ranks
from process.stage import Lines, descriptors

from shoal.rendezvous import MemoryStore, join
from shoal.rendezvous.listener import listen_unix
from shoal.rendezvous.record import decode

_no_descriptor_is_left = pytest.fixture(autouse=True)(joining.no_descriptor_is_left)


class Held(Noticing):
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


def join_without_descriptors() -> tuple[bool, bool, list[int]]:
    """Callers take every descriptor while rank 0 waits; after they leave, rank 1 joins."""
    store = Noticing()
    texts = Lines(logging.NOTSET).texts
    with waiting_rank_0(store) as (result, address):
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
            turned_away = is_closed(silent[-1])
        with join(store, 1, 2, timeout_s=LONG_S), result():
            seen = re.findall(r"turned away (\d+) so far, the last from this host", " ".join(texts))
            return turned_away, len(silent) > n_free, list(map(int, seen))


def test_a_rank_without_descriptors_turns_callers_away_and_counts_them() -> None:
    [(turned_away, were_many, seen)] = run_ranks(join_without_descriptors, 1)
    assert turned_away
    assert were_many
    assert len(seen) > 1
    assert seen == [2**n for n in range(len(seen))]


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_listener_is_named_and_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    _, second = joining.warnings_of(MemoryStore(), 2 * [joining.ONE_HOST], words)
    for fact in ("rank 1", "rank 0 on", "another user"):
        assert fact in second
