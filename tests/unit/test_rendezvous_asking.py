"""Calls to a store end at their deadline, even while the store blocks."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest

from shoal.errors import PeerLost, TimedOut
from shoal.rendezvous import MemoryStore
from shoal.rendezvous.store import asking as module
from shoal.rendezvous.store.asking import Asking

LONG_S = 60.0


class Stopped(MemoryStore):
    """A store whose `set` returns only once the test releases it."""

    host = "10.0.0.1"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def set(self, key: str, value: bytes) -> None:
        self.threads.put(threading.current_thread())
        super().set(key, value)
        self.goes_on.wait(LONG_S)


@contextlib.contextmanager
def asking(store: MemoryStore, for_s: float = LONG_S) -> Iterator[Asking]:
    with contextlib.closing(Asking(store, time.monotonic() + for_s)) as asked:
        yield asked


def test_a_blocked_call_is_abandoned_at_the_deadline_and_its_thread_ends() -> None:
    store = Stopped()
    with asking(store, 0.01) as asked:
        with pytest.raises(TimedOut, match=r"the store at 10\.0\.0\.1 has not answered .* of 'a'"):
            asked.set("a", b"1")
        assert "has not answered" in asked.silence
        with pytest.raises(TimedOut):
            asked.try_get("a")
    thread = store.threads.get(timeout=LONG_S)
    assert thread.daemon
    assert thread.is_alive()
    store.goes_on.set()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_the_answer_to_an_interrupted_call_does_not_answer_the_next() -> None:
    store = Stopped()

    def interrupt() -> float:
        asked.alarm = lambda: float("inf")
        store.goes_on.set()
        raise KeyboardInterrupt

    with asking(store) as asked:
        asked.alarm = interrupt
        with pytest.raises(KeyboardInterrupt):
            asked.set("a", b"1")
        assert asked.try_get("a") == b"1"


def test_an_answer_just_after_the_deadline_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SUSPICIOUS_S", LONG_S)  # its thread may be slow to start
    store = Stopped()

    def answer() -> float:
        store.goes_on.set()
        return float("inf")

    with asking(store, 0.0) as asked:
        asked.alarm = answer
        asked.set("a", b"1")
        assert asked.silence == ""


def test_a_failed_store_is_a_lost_peer_and_is_not_asked_again() -> None:
    store = MagicMock(spec=MemoryStore)
    store.try_get.side_effect = RuntimeError("connection reset by peer")
    with asking(store) as asked:
        for _ in range(2):
            with pytest.raises(PeerLost, match="no longer serves the store: connection reset"):
                asked.try_get("a")
    store.try_get.assert_called_once()
