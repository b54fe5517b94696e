"""How the lowest worker finds servers in a job's rendezvous store."""

import threading
from typing import Any

import pytest

from shoal.group.pool import registry
from shoal.group.pool.addresses import Address, JobEndpoint

ENDPOINT, KEY = JobEndpoint("host", 1, "job"), bytes(range(32))


class Store:
    """One whose connection is lost once this many values were read."""

    def __init__(self, last: int = 1 << 60) -> None:
        self._values: dict[str, bytes] = {}
        self._n_left = last

    def add(self, key: str) -> int:
        n = int(self._values.get(key, b"0")) + 1
        self._values[key] = str(n).encode()
        return n

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def try_get(self, key: str) -> bytes | None:
        self._n_left -= 1
        if self._n_left < 0:
            raise ConnectionResetError("it was started again")
        return self._values.get(key)

    def close(self) -> None:
        pass


def test_a_server_is_found_in_a_store_that_was_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores: list[Any] = [Store(last=3), Store()]
    for store, port in ((stores[0], 1), (stores[0], 2), (stores[1], 3)):
        place = registry.take_place(store, ENDPOINT, KEY)
        registry.leave(store, place, ENDPOINT, KEY, Address("server", port))
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
