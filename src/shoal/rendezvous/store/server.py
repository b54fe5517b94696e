"""A store of our own, for users without torch: rank 0 serves it from one daemon thread."""

from __future__ import annotations

import errno
import functools
import logging
import selectors
import socket
import threading
import time
from typing import Final, NamedTuple

from shoal.engine import Endpoint, Hello, Peer, Progress
from shoal.errors import ShoalError, UsageError
from shoal.rendezvous.interface import is_loopback, names_loopback, resolve, routed_address
from shoal.rendezvous.key import HOW_TO_SET_KEY
from shoal.rendezvous.listener import listen_tcp, note_turned_away, run_ready
from shoal.rendezvous.store import MAX_KEY_BYTES, MAX_VALUE_BYTES
from shoal.rendezvous.store.wire import (
    FULL,
    GET,
    MISSING,
    OK,
    REPLY,
    REQUEST,
    SET,
    STORE_HELLO,
    TRY_GET,
    store_key,
)
from shoal.threads import start

_LOG: Final = logging.getLogger("shoal")


class StoreLimits(NamedTuple):
    """What a store may cost its server.

    Args:
        n_clients: connections, one per rank as a rule.
        n_values: with 4 KiB each, 64 MiB at most.
        request_s: seconds for a request that has begun to arrive.
    """

    n_clients: int = 4096
    n_values: int = 16384
    request_s: float = 2.0


class TcpStoreServer:
    """Serves a store at the master's address and no other, until `close`.

    Args:
        host: the master's name or address, as every rank is told it.
        port: 0 takes any; see `port`.
        key: the job key; every client needs the same, or also None.

    Raises:
        UsageError: the port is taken, or the address is not this host's.
        ShoalError: no thread can be had.

    Threads: one of its own, a daemon; `close` may be called from any.
    """

    def __init__(
        self, host: str, port: int, *, key: bytes | None = None, limits: StoreLimits | None = None
    ) -> None:
        listeners = _listen(host, port)
        self.port: int = listeners[0].getsockname()[1]
        self._waker, woken = socket.socketpair()
        serving = _Serving(listeners, woken, key, limits or StoreLimits())
        self._is_deserted = serving.is_deserted
        try:
            self._thread = start("shoal store", serving.run)
        except ShoalError:
            serving.close()
            self._waker.close()
            raise

    def await_leavers(self, timeout_s: float) -> bool:
        """Wait until no client is connected any more; whether that is so."""
        return self._is_deserted.wait(timeout_s)

    def close(self) -> None:
        """Stop serving and close every connection; idempotent."""
        self._waker.close()
        self._thread.join()


class _Serving:
    """The server's thread: one selector, no blocking call but its select."""

    def __init__(
        self,
        listeners: list[socket.socket],
        woken: socket.socket,
        key: bytes | None,
        limits: StoreLimits,
    ) -> None:
        self._key = store_key(key)
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._woken = woken
        self._is_closing = False
        self._selector.register(woken, selectors.EVENT_READ, self._on_woken)
        self._endpoint = Endpoint(self)
        self._selector.register(self._endpoint, selectors.EVENT_READ, lambda: None)
        for listener in listeners:
            self._endpoint.listen(listener.detach())
        self._values: dict[str, bytes] = {}
        self._clients: set[_Client] = set()
        self._until: dict[_Client, float] = {}  # the end of a half-read request, or of a wait
        self._waiting: dict[str, list[_Client]] = {}
        self._has_warned = False
        self.is_deserted = threading.Event()  # set while no client is connected
        self.is_deserted.set()

    def run(self) -> None:
        """Serve until the other end of `woken` is closed."""
        try:
            while not self._is_closing:
                now = time.monotonic()
                self._expire(now)
                self._endpoint.step(now)
                until = min([self._endpoint.deadline, *self._until.values()])
                run_ready(self._selector, until - now)
        finally:
            self.close()

    def close(self) -> None:
        """Close every socket."""
        for client in list(self._clients):
            self._drop(client)
        self._endpoint.close()
        self._selector.close()
        self._woken.close()

    def admit(self, hello: Hello) -> bytes | Progress:
        """Anyone who proves the key."""
        return self._key if hello == STORE_HELLO else Progress.REFUSED

    def welcome(self, peer: Peer, _hello: Hello) -> None:
        """Take requests from it."""
        if len(self._clients) >= self._limits.n_clients:
            peer.close()
            return
        sock = socket.socket(fileno=peer.detach())
        sock.setblocking(False)
        client = _Client(sock)
        self._clients.add(client)
        self.is_deserted.clear()
        on_ready = functools.partial(self._read, client)
        self._selector.register(sock, selectors.EVENT_READ, on_ready)

    def key_differs(self, hello: Hello) -> None:
        """Warn, once: the client is told, but whoever waits for it here would not know why.

        No more than that: anyone who reaches this port can do it.
        """
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "a process that holds another job key tried to reach the store of rank 0, and was "
                "refused: if it is a rank of this job, this job waits for it in vain. %s",
                HOW_TO_SET_KEY,
            )

    def turned_away(self, n_so_far: int, caller: str) -> None:
        """Log a caller for whom there was no descriptor."""
        note_turned_away(n_so_far, caller)

    def _on_woken(self) -> None:
        self._is_closing = not self._woken.recv(4096)

    def _expire(self, now: float) -> None:
        for client in [client for client, until in self._until.items() if now >= until]:
            if client.waits_for is None:
                self._drop(client)
            else:
                self._stop_waiting(client)
                self._reply(client, MISSING, b"")

    def _read(self, client: _Client) -> None:
        while client in self._clients and client.wants:
            try:
                # Who talks while it waits for a reply is dropped.
                data = client.sock.recv(1 if client.waits_for is not None else client.wants)
            except BlockingIOError:
                if client.inbox:
                    self._until.setdefault(client, time.monotonic() + self._limits.request_s)
                return
            except OSError:
                data = b""
            if not data or client.waits_for is not None or not client.take(data):
                self._drop(client)
        if client in self._clients:
            self._until.pop(client, None)
            self._answer(client)

    def _answer(self, client: _Client) -> None:
        op, key, value, wait_ms = client.take_request()
        if op == SET:
            self._reply(client, OK if self._set(key, value) else FULL, b"")
        elif key in self._values:
            self._reply(client, OK, self._values[key])
        elif op == GET:
            client.waits_for = key
            self._until[client] = time.monotonic() + wait_ms / 1000
            self._waiting.setdefault(key, []).append(client)
        else:
            self._reply(client, MISSING, b"")

    def _set(self, key: str, value: bytes) -> bool:
        """Write a value and send it to those who wait for it; False if there is no room."""
        if key not in self._values and len(self._values) >= self._limits.n_values:
            return False
        self._values[key] = value
        for waiter in self._waiting.pop(key, []):
            waiter.waits_for = None
            del self._until[waiter]
            self._reply(waiter, OK, value)
        return True

    def _reply(self, client: _Client, status: int, value: bytes) -> None:
        message = REPLY.pack(status, len(value)) + value
        try:
            # One reply fits into an empty buffer; who does not read its replies is dropped.
            is_sent = client.sock.send(message) == len(message)
        except OSError:
            is_sent = False
        if not is_sent:
            self._drop(client)

    def _stop_waiting(self, client: _Client) -> None:
        if client.waits_for is not None:
            waiters = self._waiting[client.waits_for]
            waiters.remove(client)
            if not waiters:
                del self._waiting[client.waits_for]
            client.waits_for = None
            del self._until[client]

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._stop_waiting(client)
            self._clients.remove(client)
            self._until.pop(client, None)
            self._selector.unregister(client.sock)
            client.sock.close()
            if not self._clients:
                self.is_deserted.set()


class _Client:
    """An authenticated connection, and the request that is arriving on it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = b""
        self.waits_for: str | None = None
        self._n_request_bytes = REQUEST.size

    @property
    def wants(self) -> int:
        """How many bytes this request still lacks, as far as is known."""
        return self._n_request_bytes - len(self.inbox)

    def take(self, data: bytes) -> bool:
        """Add what was read; False if the request is not acceptable."""
        self.inbox += data
        if len(self.inbox) != REQUEST.size:
            return True
        op, n_key_bytes, n_value_bytes, _ = REQUEST.unpack(self.inbox)
        self._n_request_bytes = REQUEST.size + n_key_bytes + n_value_bytes
        is_value_fit = n_value_bytes <= (MAX_VALUE_BYTES if op == SET else 0)
        return op in (SET, GET, TRY_GET) and 1 <= n_key_bytes <= MAX_KEY_BYTES and is_value_fit

    def take_request(self) -> tuple[int, str, bytes, int]:
        """The complete request; ready for the next one afterwards."""
        op, n_key_bytes, _, wait_ms = REQUEST.unpack_from(self.inbox)
        body = self.inbox[REQUEST.size :]
        self.inbox, self._n_request_bytes = b"", REQUEST.size
        key = body[:n_key_bytes].decode(errors="replace")
        return op, key, body[n_key_bytes:], wait_ms


def _listen(host: str, port: int) -> list[socket.socket]:
    try:
        found = resolve(host, port, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"MASTER_ADDR={host} does not resolve ({error})") from error
    addresses = list(dict.fromkeys(str(target[0]) for *_, target in found))
    if not names_loopback(host) and all(map(is_loopback, addresses)):
        # /etc/hosts maps this host's own name to 127.0.1.1 (Debian); the other hosts resolve it to
        # the address that they can reach.
        routed = routed_address()
        addresses += [] if routed is None else [routed]
    listeners: list[socket.socket] = []
    failure: OSError | None = None
    for address in addresses:
        wanted = listeners[0].getsockname()[1] if listeners else port
        try:
            listeners.append(listen_tcp(address, (wanted,)))
        except OSError as error:
            failure = error
            if error.errno == errno.EADDRINUSE:
                break
    if listeners and (failure is None or failure.errno != errno.EADDRINUSE):
        return listeners
    for listener in listeners:
        listener.close()
    raise _why_not(host, port, failure)


def _why_not(host: str, port: int, failure: OSError | None) -> UsageError:
    if failure is not None and failure.errno == errno.EADDRINUSE:
        return UsageError(
            f"port {port} at {host} is taken, so rank 0 cannot serve the store there: set "
            "MASTER_PORT to a free port on every rank, or stop the job that still uses it "
            f"(`ss -ltnp sport = :{port}`)"
        )
    why = failure.strerror if failure is not None else "it has no address"
    return UsageError(
        f"rank 0 cannot serve the store at MASTER_ADDR={host}, port {port}: {why}. MASTER_ADDR "
        "must be a name or address of the host that rank 0 runs on"
    )
