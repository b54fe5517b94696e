"""A rank's connection to the store that rank 0 serves."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

from shoal.engine import ClientHandshake, Progress
from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.rendezvous.interface import is_loopback, resolve, within_host
from shoal.rendezvous.key import HOW_TO_SET_KEY
from shoal.rendezvous.listener import is_out_of_descriptors
from shoal.rendezvous.store import MAX_KEY_BYTES, MAX_VALUE_BYTES
from shoal.rendezvous.store.wire import (
    FULL,
    GET,
    OK,
    REPLY,
    REQUEST,
    SET,
    STORE_HELLO,
    TRY_GET,
    store_key,
)

# Rank 0 needs a moment to start, and a refused connect costs microseconds.
_CONNECT_RETRY_S: Final = 0.02
_N_AT_ONCE: Final = 16  # requests on the way: their replies, 64 KiB at most, fit into a socket
# For one attempt to connect: a server that has restarted meanwhile, or whose answer was lost, is
# found by the next one.
_ATTEMPT_S: Final = 5.0
_GRACE_S: Final = 5.0  # beyond a get's own timeout, until a silent server counts as lost

_LOG: Final = logging.getLogger("shoal")


class TcpStoreClient:
    """A connection to a `TcpStoreServer`. One caller at a time; others wait.

    Args:
        timeout_s: for connecting, which is retried until then, and for every single call; a `get`
            has its own time, and five seconds more.
        key: the job key, or None; the same as the server's.
        warn_s: until it warns that nobody answers; again after twice, four times as long.

    Raises:
        TimedOut: no store answered at this address.
        UsageError: the store holds another key, or this process has no descriptor left.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float,
        key: bytes | None = None,
        warn_s: float = 10.0,
    ) -> None:
        self.host: str | None = host
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sock = self._connect(store_key(key), warn_s)

    def set(self, key: str, value: bytes) -> None:
        """Write a value, over whatever is there."""
        if len(value) > MAX_VALUE_BYTES:
            raise UsageError(f"{len(value)} bytes for {key!r}; expected at most {MAX_VALUE_BYTES}")
        if self._call(SET, key, value, 0.0)[0] == FULL:
            raise ShoalError(f"the store at {self._address} is full and did not take {key!r}")

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value, waiting until there is one; `TimedOut` if it does not come."""
        status, value = self._call(GET, key, b"", timeout_s)
        if status != OK:
            raise TimedOut(f"nobody set {key!r} at {self._address} within {timeout_s:g} s")
        return value

    def try_get(self, key: str) -> bytes | None:
        """The value if there is one by now."""
        status, value = self._call(TRY_GET, key, b"", 0.0)
        return value if status == OK else None

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """All values if there are all by now."""
        values: list[bytes] = []
        for first in range(0, len(keys), _N_AT_ONCE):
            batch = keys[first : first + _N_AT_ONCE]
            replies = self._call_all(TRY_GET, batch, b"", 0.0)
            if any(status != OK for status, _ in replies):
                return None
            values += [value for _, value in replies]
        return values

    def close(self) -> None:
        """Close the connection; idempotent. Calls under way and later ones raise `PeerLost`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a close alone wakes no thread that waits for it
        self._sock.close()

    @property
    def is_open(self) -> bool:
        """Whether the server serves us, as far as is known."""
        return self._sock.fileno() >= 0

    @property
    def _address(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def _call(self, op: int, key: str, value: bytes, wait_s: float) -> tuple[int, bytes]:
        return self._call_all(op, (key,), value, wait_s)[0]

    def _call_all(
        self, op: int, keys: Sequence[str], value: bytes, wait_s: float
    ) -> list[tuple[int, bytes]]:
        """Say all requests, then hear all replies."""
        wait_ms = min(int(wait_s * 1000), 2**32 - 1)
        requests = b""
        for key in keys:
            name = key.encode()
            if not 1 <= len(name) <= MAX_KEY_BYTES:
                raise UsageError(f"a key of {len(name)} bytes; expected 1 to {MAX_KEY_BYTES}")
            requests += REQUEST.pack(op, len(name), len(value), wait_ms) + name + value
        with self._lock:
            try:
                until = time.monotonic() + (wait_s + _GRACE_S if op == GET else self._timeout_s)
                self._sock.settimeout(_left_s(until))
                self._sock.sendall(requests)
                return [self._hear(until) for _ in keys]
            except OSError as error:
                # A late reply would be taken for the next one's: the connection is of no use now.
                self._sock.close()
                doing = f"store {('set', 'get', 'try_get')[op - 1]} of {keys[0]!r}"
                reason = f"no longer serves the store: {error}"
                raise PeerLost(0, "", self._address, doing, reason) from error

    def _hear(self, until: float) -> tuple[int, bytes]:
        status, n_bytes = REPLY.unpack(_receive(self._sock, REPLY.size, until))
        if n_bytes > MAX_VALUE_BYTES:
            raise ConnectionError("it sent nonsense")
        return status, _receive(self._sock, n_bytes, until)

    def _connect(self, key: bytes, warn_s: float) -> socket.socket:
        started = time.monotonic()
        deadline = started + self._timeout_s
        pause = threading.Event()  # waited on only for its timeout
        trouble: OSError = TimeoutError("timed out")
        while True:
            until = min(deadline, time.monotonic() + _ATTEMPT_S)
            try:
                return self._try_to_connect(key, until, trouble)
            except OSError as error:
                trouble = error
            if is_out_of_descriptors(trouble):
                raise UsageError(
                    f"this process has no file descriptor left to reach the store at "
                    f"{self._address}: raise `ulimit -n`"
                ) from trouble
            now = time.monotonic()
            if now + _CONNECT_RETRY_S >= deadline:
                raise TimedOut(self._no_answer(self._timeout_s, trouble)) from trouble
            if now >= started + warn_s:
                _LOG.warning("%s", self._no_answer(now - started, trouble))
                warn_s *= 2
            pause.wait(_CONNECT_RETRY_S)

    def _no_answer(self, after_s: float, trouble: OSError) -> str:
        return (
            f"no store of shoal answered at {self._address} within {after_s:.4g} s ({trouble}): is "
            "rank 0 running there, and are MASTER_ADDR and MASTER_PORT the same on every rank?"
            + self._of_loopback()
        )

    def _of_loopback(self) -> str:
        """What to do where the address is one of this host alone."""
        try:
            found = resolve(self._host, self._port, socket.SOCK_STREAM)
        except OSError:
            return ""
        addresses = [str(target[0]) for *_, target in found]
        if not all(map(is_loopback, addresses)):
            return ""
        return (
            f" ({within_host(addresses[0])}: if rank 0 is on another, set MASTER_ADDR on every "
            "rank to an address of its host which the others can reach)"
        )

    def _try_to_connect(self, key: bytes, until: float, failure: OSError) -> socket.socket:
        """Raises what the last address failed by; if there is no time for any, that `failure`."""
        found = resolve(self._host, self._port, socket.SOCK_STREAM)
        for at, (family, kind, protocol, _, target) in enumerate(found):
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            sock = socket.socket(family, kind, protocol)
            # One that is silent must leave time for the others.
            sock.settimeout(left_s / (len(found) - at))
            try:
                sock.connect(target)
            except OSError as error:
                sock.close()
                failure = error
                continue
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._prove(sock, key, until)
            except BaseException:
                sock.close()
                raise
            return sock
        raise failure

    def _prove(self, sock: socket.socket, key: bytes, until: float) -> None:
        handshake = ClientHandshake(STORE_HELLO, key)
        sock.sendall(handshake.hello)
        while handshake.wants:
            reply = handshake.feed(_receive(sock, handshake.wants, until))
            if reply:  # NOT an empty send: it fails if the server has closed after a refusal
                sock.sendall(reply)
        if handshake.progress is Progress.KEY_DIFFERS:
            raise UsageError(f"the store at {self._address} holds another key. {HOW_TO_SET_KEY}")
        if handshake.progress is not Progress.DONE:
            raise ConnectionError("what answers there is no store of shoal")


def _receive(sock: socket.socket, n_bytes: int, until: float) -> bytes:
    data = b""
    while len(data) < n_bytes:
        sock.settimeout(_left_s(until))
        more = sock.recv(n_bytes - len(data))
        if not more:
            raise ConnectionError("it closed the connection")
        data += more
    return data


def _left_s(until: float) -> float:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
