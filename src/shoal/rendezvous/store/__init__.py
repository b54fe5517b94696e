"""Where ranks leave each other notes before they are connected.

`TorchStore` wraps the store that torch already has. `TcpStoreServer` and `TcpStoreClient`
are ours, for users without torch; `MemoryStore` serves ranks that are threads.
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
        """The name or address of the machine that serves it; None if nobody can say."""

    def set(self, key: str, value: bytes) -> None:
        """Write a value, over whatever is there."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value, waiting until there is one; `TimedOut` if it does not come."""

    def try_get(self, key: str) -> bytes | None:
        """The value if there is one by now."""

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """All values if there are all by now: a few requests, however many keys."""


class MemoryStore:
    """A store for ranks that are threads of one process."""

    host = None

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Write a value, over whatever is there."""
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value, waiting until there is one; `TimedOut` if it does not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimedOut(f"no process set {key!r} within {timeout_s:g} s")
            return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        """The value if there is one by now."""
        with self._changed:
            return self._values.get(key)

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """All values if there are all by now."""
        with self._changed:
            if any(key not in self._values for key in keys):
                return None
            return [self._values[key] for key in keys]


class TorchStore:
    """A `torch.distributed.Store`, or anything with its set, get, multi_get, check and wait.

    What torch raises passes through, except that an expired wait becomes `TimedOut`. A call may
    block for as long as the torch store's own timeout says.
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
        """Write a value, over whatever is there."""
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value, waiting until there is one; `TimedOut` if it does not come."""
        from datetime import timedelta  # torch wants it; our own stores do without

        started = time.monotonic()
        # torch counts in whole milliseconds, and takes none for no limit.
        timeout_ms = max(1, math.ceil(1000 * timeout_s))
        try:
            # NOT set_timeout: that would change the store for everybody else who uses it.
            self._store.wait([key], timedelta(milliseconds=timeout_ms))
        except RuntimeError as error:
            # torch's DistStoreError says the same for a timeout and for a lost store, but only a
            # timeout takes that long, by its own clock. Who takes a loss for one hears of it next.
            if time.monotonic() - started < timeout_s - _CLOCK_SLACK_S:
                raise
            raise TimedOut(f"no process set {key!r} within {timeout_s:g} s") from error
        return bytes(self._store.get(key))

    def try_get(self, key: str) -> bytes | None:
        """The value if there is one by now."""
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """All values if there are all by now."""
        keys = list(keys)
        if not self._store.check(keys):
            return None
        # Where torch has no request for several keys, it makes one for each.
        return [bytes(value) for value in self._store.multi_get(keys)]
