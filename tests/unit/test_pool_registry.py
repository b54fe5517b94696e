"""The lowest worker finds servers in a job's rendezvous store."""

import threading
from typing import Any

import pytest

from shoal.group.pool import registry
from shoal.group.pool.addresses import Address, JobEndpoint
from shoal.rendezvous import MemoryStore

ENDPOINT, KEY = JobEndpoint("host", 1, "job"), bytes(range(32))


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
