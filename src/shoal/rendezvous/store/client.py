"""A rank's connection to the store that rank 0 serves."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

from shoal.engine import Endpoint, Peer, Progress
from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.rendezvous.interface import is_loopback, resolve, within_host
from shoal.rendezvous.key import HOW_TO_SET_KEY
from shoal.rendezvous.listener import is_out_of_descriptors, wait_for
from shoal.rendezvous.packing import number
from shoal.rendezvous.store import MAX_KEY_BYTES, MAX_VALUE_BYTES
from shoal.rendezvous.store.wire import (
    FULL,
    GET,
    MISSING,
    N_LENGTH,
    N_WAIT,
    SET,
    STORE_HELLO,
    VALUE,
    store_key,
)

# Rank 0 needs a moment to start, and a refused connect costs microseconds.
_RETRY_S: Final = 0.02
_LONGEST_LOOKUP_S: Final = 2.0  # between lookups of a name that does not resolve
_N_AT_ONCE: Final = 16  # requests in flight: their replies, 64 KiB at most, fit into a socket
# For one attempt to connect. The next attempt finds a server that has restarted meanwhile, or whose
# answer was lost.
_ATTEMPT_S: Final = 5.0
_WARN_S: Final = 10.0  # until it warns that no store answers; again after twice as long
_GRACE_S: Final = 5.0  # beyond a get's own timeout, until a silent server counts as lost

_LOG: Final = logging.getLogger("shoal")


class TcpStoreClient:
    """A connection to a `TcpStoreServer`. One caller at a time; others wait.

    Args:
        timeout_s: for connecting, which is retried until then, and for every single call; a `get`
            has its own timeout, and five seconds more.
        total_s: for connecting and all calls together.
        key: the job key, or None; the same as the server's.
        is_served: True if the server has listened before, so that a refused connect means its end.

    Attributes:
        prefix: of all keys.
        outlives_join: True if the server stays until all have joined, see `Asking`.

    Raises:
        TimedOut: no store answered at this address.
        PeerLost: the server has ended.
        UsageError: the store holds another key, or this process has no descriptor left.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float,
        total_s: float = float("inf"),
        key: bytes | None = None,
        is_served: bool = False,
    ) -> None:
        self.host, self._port = host, port
        self.prefix, self.outlives_join = "", False
        self._is_served = is_served
        self._timeout_s = timeout_s
        self._until = time.monotonic() + total_s
        self._lock = threading.Lock()
        self._peer: Peer | None = None
        self._lost = ""  # why the connection is unusable
        self._replies: list[tuple[int, bytes]] = []
        self._dials: dict[int, str] = {}  # by dial in progress, its address
        self._dial_at, self._lookup_s = 0.0, _RETRY_S
        self._trouble: OSError = TimeoutError("timed out")  # of the last attempt to connect
        try:
            self._endpoint = Endpoint(self, dial_s=_ATTEMPT_S)
            self._waker, self._woken = socket.socketpair()
        except OSError as error:
            self._fail(error)
            raise
        try:
            self._connect(store_key(key))
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        """As `Store.set`; ShoalError if the store is full."""
        if len(value) > MAX_VALUE_BYTES:
            raise UsageError(f"{len(value)} bytes for {key!r}; expected at most {MAX_VALUE_BYTES}")
        name = self._encode(key)
        body = number(len(name), N_LENGTH) + name + value
        ((kind, _),) = self._call(f"set of {key!r}", SET, [body], self._timeout_s)
        if kind == FULL:
            raise ShoalError(f"the store at {self._address} is full and did not take {key!r}")

    def get(self, key: str, timeout_s: float) -> bytes:
        """As `Store.get`."""
        wait_s = max(timeout_s, 0.0)
        wait_ms = math.ceil(min(wait_s * 1000, 2**32 - 1))  # NOT less than the caller waits
        body = number(wait_ms, N_WAIT) + self._encode(key)
        ((kind, value),) = self._call(f"get of {key!r}", GET, [body], wait_s + _GRACE_S)
        if kind == MISSING:
            raise TimedOut(f"no process set {key!r} at {self._address} within {timeout_s:g} s")
        return value

    def try_get(self, key: str) -> bytes | None:
        """As `Store.try_get`."""
        values = self.try_get_all([key])
        return None if values is None else values[0]

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """As `Store.try_get_all`."""
        values: list[bytes] = []
        for first in range(0, len(keys), _N_AT_ONCE):
            batch = keys[first : first + _N_AT_ONCE]
            bodies = [number(0, N_WAIT) + self._encode(key) for key in batch]
            replies = self._call(f"try_get of {batch[0]!r}", GET, bodies, self._timeout_s)
            if any(kind == MISSING for kind, _ in replies):
                return None
            values += [value for _, value in replies]
        return values

    def close(self) -> None:
        """Close the connection; idempotent. Calls in progress and later ones raise `PeerLost`."""
        if self._endpoint.fileno() < 0:  # closed, or in a forked child: the waker is the parent's
            return
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        with self._lock:
            self._lose("this process has closed its connection")
            self._endpoint.close()
            self._waker.close()
            self._woken.close()

    @property
    def is_open(self) -> bool:
        """True until the connection is known to be closed."""
        return self._peer is not None and self._peer.is_open

    @property
    def _address(self) -> str:
        return f"[{self.host}]:{self._port}" if ":" in self.host else f"{self.host}:{self._port}"

    def _encode(self, key: str) -> bytes:
        name = f"{self.prefix}{key}".encode()
        if not 1 <= len(name) <= MAX_KEY_BYTES:
            raise UsageError(f"a key of {len(name)} bytes; expected 1 to {MAX_KEY_BYTES}")
        return name

    def _call(
        self, doing: str, kind: int, bodies: Sequence[bytes], timeout_s: float
    ) -> list[tuple[int, bytes]]:
        """Send all requests and return the kind and the body of each reply."""
        with self._lock:
            self._replies = []
            if self._endpoint.fileno() < 0:
                self._lose("a forked child has no part in the connection of its parent")
            until = min(time.monotonic() + timeout_s, self._until)
            try:
                for body in bodies:
                    if self._peer is not None:
                        self._peer.send(kind, body)  # the next step reports it if this fails
                while len(self._replies) < len(bodies) and not self._lost:
                    if time.monotonic() >= until:
                        self._lose("timed out")
                    else:
                        self._step(until)
            except BaseException:
                # NOT kept open: a late reply would count as the next request's.
                self._lose("a call was interrupted")
                raise
            if len(self._replies) == len(bodies):
                return self._replies
            reason = f"no longer serves the store: {self._lost}"
            raise PeerLost(0, "", self._address, f"store {doing}", reason)

    def _step(self, until: float) -> None:
        if wait_for(self._endpoint, until, self._woken):
            self._lose("this process has closed its connection")
        self._endpoint.step(time.monotonic())

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        if self._peer is not None:
            self._peer.close()

    def _connect(self, key: bytes) -> None:
        started = time.monotonic()
        deadline, warn_at = started + self._timeout_s, started + _WARN_S
        while self._peer is None:
            now = time.monotonic()
            if now >= deadline:
                raise TimedOut(self._no_answer(self._timeout_s)) from self._trouble
            if now >= warn_at:
                _LOG.warning("%s", self._no_answer(now - started))
                warn_at = now + (now - started)
            if now >= self._dial_at:
                self._dial(key)
            self._step(min(deadline, warn_at, self._dial_at))

    def _dial(self, key: bytes) -> None:
        """Connect to every address of the host without a dial in progress."""
        self._dial_at = float("inf")
        try:
            addresses = resolve(self.host)
        except OSError as error:
            self._fail(error)
            # Many ranks may start before rank 0's name exists: they must not flood its DNS.
            self._dial_at = time.monotonic() + self._lookup_s
            self._lookup_s = min(2 * self._lookup_s, _LONGEST_LOOKUP_S)
            return
        for address in addresses:
            if address not in self._dials.values():
                dial = self._endpoint.connect(address, self._port, STORE_HELLO, key)
                self._dials[dial] = address

    def _fail(self, error: OSError) -> None:
        """Record why this attempt to connect failed, and schedule the next one."""
        if is_out_of_descriptors(error):
            raise UsageError(
                f"this process has no file descriptor left to reach the store at "
                f"{self._address}: raise `ulimit -n`"
            ) from error
        if self._is_served and isinstance(error, ConnectionRefusedError):
            raise PeerLost(-1, "", self._address, "connect", "has ended, and serves no store")
        self._trouble = error
        self._dial_at = time.monotonic() + _RETRY_S

    def _no_answer(self, after_s: float) -> str:
        return (
            f"no store of shoal answered at {self._address} within {after_s:.4g} s "
            f"({self._trouble}): is rank 0 running there, and are MASTER_ADDR "
            "and MASTER_PORT the same on every rank?" + self._of_loopback()
        )

    def _of_loopback(self) -> str:
        """Advice for an address that only this host can reach; empty for any other."""
        try:
            addresses = resolve(self.host)
        except OSError:
            return ""
        if not all(map(is_loopback, addresses)):
            return ""
        return (
            f" ({within_host(addresses[0])}: if rank 0 is on another host, set MASTER_ADDR on "
            "every rank to an address of its host that the others can reach)"
        )

    # The endpoint's callbacks.

    def reached(self, peer: Peer, _dial: int) -> None:
        """Keep the first connection to a store, and end the other dials."""
        if self._peer is not None:
            peer.close()
            return
        for other in self._dials:
            self._endpoint.hang_up(other)
        self._peer = peer
        peer.expect(VALUE, MAX_VALUE_BYTES)
        peer.expect(MISSING, 0)
        peer.expect(FULL, 0)

    def not_reached(self, dial: int, error: int, progress: Progress, _was_connected: bool) -> None:
        """Give this attempt up; the host's name may resolve to another address in the next one."""
        self._endpoint.hang_up(dial)
        self._dials.pop(dial, None)
        if progress is Progress.KEY_DIFFERS:
            raise UsageError(f"the store at {self._address} holds another key. {HOW_TO_SET_KEY}")
        if error:
            self._fail(OSError(error, os.strerror(error)))
        else:
            self._fail(ConnectionError("the process that answers there is not a shoal store"))

    def received(self, _peer: Peer, kind: int, body: bytes, _fd: int) -> None:
        """Keep a reply."""
        self._replies.append((kind, body))

    def lost(self, _peer: Peer, _error: int, why: str) -> None:
        """Record why the connection ended."""
        self._lose(why)
