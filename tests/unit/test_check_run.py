"""The rounds of a check, and which ranks take part, on a store in memory."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.check import run
from shoal.errors import TimedOut
from shoal.rendezvous import MemoryStore
from shoal.rendezvous.store import MAX_VALUE_BYTES


class CountingStore(MemoryStore):
    """A store that no value reaches while a get waits; it keeps the keys it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        assert len(value) <= MAX_VALUE_BYTES
        super().set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        self.asked.append(key)
        if (value := self.try_get(key)) is None:
            raise TimedOut(f"no {key} within {timeout_s} s")
        return value


def test_all_ranks_of_a_large_job_learn_which_are_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.facts, "decode", int)
    store, size, absent = CountingStore(), 4000, 77
    for rank in range(size):
        if rank != absent:
            store.set(f"check/facts/{rank}", str(rank).encode())
    places: Any = [SimpleNamespace(rank=rank, size=size) for rank in (0, 1)]
    present = {rank: rank for rank in range(size) if rank != absent}
    assert [run._all_facts(store, place, 30) for place in places] == [present, present]


def test_a_check_waits_once_for_a_host_that_has_died() -> None:
    store = CountingStore()
    hosts: Any = [SimpleNamespace(rank=rank) for rank in (0, 4, 8)]
    own: Any = SimpleNamespace(rank=1)  # shares host 0, and probes nothing
    for shift in (1, 2):
        for rank in (0, 8):
            store.set(f"check/round/{shift}/{rank}", b'[["", 0.5]]')
    found = run._probe_hosts(store, own, hosts)
    assert found.keys() == {(0, 4), (8, 0), (0, 8), (8, 4)}
    assert [key for key in store.asked if key.endswith("/4")] == ["check/round/1/4"]
