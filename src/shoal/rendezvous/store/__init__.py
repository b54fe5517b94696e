"""Stores: shared maps through which ranks exchange values before they are connected.

`TorchStore` wraps a store of torch. `TcpStoreServer` and `TcpStoreClient` are shoal's own, for
programs without torch; `MemoryStore` serves ranks that are threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from shoal.errors import TimedOut

MAX_VALUE_BYTES: Final = 4096
MAX_KEY_BYTES: Final = 256
_CLOCK_SLACK_S: Final = 0.01


class Store(Protocol):
    """A shared map from names to short values. A set is seen by every later get."""

    @property
    def host(self) -> str | None:
        """The name or address of the machine that serves the store; None if unknown."""

    def set(self, key: str, value: bytes) -> None:
        """Set a value, or overwrite it."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for the value and return it; `TimedOut` if it is not set in time."""

    def try_get(self, key: str) -> bytes | None:
        """Return the value, or None if it is not set."""

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return all values, or None if any is not set. Needs few requests for many keys."""


class MemoryStore:
    """A store for ranks that are threads of one process."""

    host = None

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """As `Store.set`."""
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """As `Store.get`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimedOut(f"no process set {key!r} within {timeout_s:g} s")
            return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        """As `Store.try_get`."""
        with self._changed:
            return self._values.get(key)

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """As `Store.try_get_all`."""
        with self._changed:
            if any(key not in self._values for key in keys):
                return None
            return [self._values[key] for key in keys]


class TorchStore:
    """Wraps a `torch.distributed.Store`, or an object with its set, get, multi_get, check and wait.

    torch's exceptions pass through, except that an expired wait becomes `TimedOut`. A call may
    block for the torch store's own timeout.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @property
    def host(self) -> str | None:
        """The host of a `TCPStore`, also of one inside `PrefixStore`s."""
        store = self._store
        while (inner := getattr(store, "underlying_store", None)) is not None:
            store = inner
        host = getattr(store, "host", None)
        return host if isinstance(host, str) else None

    def set(self, key: str, value: bytes) -> None:
        """As `Store.set`."""
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """As `Store.get`."""
        from datetime import timedelta  # only torch's stores need it

        started = time.monotonic()
        # torch counts whole milliseconds, and 0 means no limit.
        timeout_ms = max(1, math.ceil(1000 * timeout_s))
        try:
            # NOT set_timeout: that would change the store for its other users.
            self._store.wait([key], timedelta(milliseconds=timeout_ms))
        except RuntimeError as error:
            # torch's DistStoreError has the same text for a timeout and for a lost store, but only
            # a timeout takes that long, by torch's clock. The next call reports a loss missed here.
            if time.monotonic() - started < timeout_s - _CLOCK_SLACK_S:
                raise
            raise TimedOut(f"no process set {key!r} within {timeout_s:g} s") from error
        return bytes(self._store.get(key))

    def try_get(self, key: str) -> bytes | None:
        """As `Store.try_get`."""
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """As `Store.try_get_all`."""
        keys = list(keys)
        if not self._store.check(keys):
            return None
        # Stores of torch without a request for several keys make one request for each.
        return [bytes(value) for value in self._store.multi_get(keys)]
