"""Shoal's own store, for programs without torch: rank 0 serves it from one daemon thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from shoal.engine import Endpoint, Hello, Peer, Progress
from shoal.errors import ShoalError, UsageError
from shoal.rendezvous.interface import (
    is_loopback,
    list_interfaces,
    names_loopback,
    only_address,
    resolve,
    routed_address,
)
from shoal.rendezvous.key import HOW_TO_SET_KEY
from shoal.rendezvous.listener import listen_tcp, note_turned_away, wait_for
from shoal.rendezvous.packing import Unpacker
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
from shoal.threads import start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

_LOG: Final = logging.getLogger("shoal")
_ENTRY_BYTES: Final = 256  # of a dictionary's entry, besides its key and value
MOST_CLIENTS: Final = 4096  # of one store, usually one per rank
# Of all keys and values. A meeting of 1,024 ranks takes half a MiB, so there is room for a hundred
# restarts.
_MOST_BYTES: Final = 64 << 20
_MOST_QUEUED: Final = 4 * MAX_VALUE_BYTES  # of replies that a client does not read


class StoreServer:
    """Serves a store until `close`, on a daemon thread; ShoalError if no thread can be started.

    Threads: `close` and `submit` may be called from any.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        try:
            self._thread = start("shoal store", serving.run)
        except ShoalError:
            serving.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def await_leavers(self, timeout_s: float) -> bool:
        """Wait until no client is connected; return False after a timeout."""
        return self._serving.is_deserted.wait(timeout_s)

    def close(self) -> None:
        """Stop serving and close every connection; idempotent."""
        self._serving.submit(None)
        self._thread.join()


class TcpStoreServer(StoreServer):
    """Serves a store at the master's address and no other, until `close`.

    Port 0 takes any port; see `port`. Every client needs the same key, or None too. UsageError if
    the port is taken or the address is not this host's; ShoalError if no thread can be started.
    """

    def __init__(self, host: str, port: int, *, key: bytes | None = None) -> None:
        listeners = _listen(host, port)
        self.port: int = listeners[0].getsockname()[1]
        super().__init__(Serving(listeners, key))


class Serving:
    """The server's thread, and the owner of its endpoint."""

    key_differs_text = (
        "a process that holds another job key tried to reach the store of rank 0, and was refused: "
        "if it is a rank of this job, the job cannot form its group"
    )
    most_clients = MOST_CLIENTS

    def __init__(self, listeners: Sequence[socket.socket], key: bytes | None) -> None:
        self._key = store_key(key)
        self._waker, self._woken = socket.socketpair()
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.endpoint = Endpoint(self, most_queued=_MOST_QUEUED)
        for listener in listeners:
            self.endpoint.listen(listener.detach())
        self._values: dict[str, bytes] = {}
        self._n_bytes = 0
        self._clients: dict[Peer, str | None] = {}  # the key that each client waits for
        self._waiting: dict[str, dict[Peer, float]] = {}  # by key: waiting clients and deadlines
        self._has_warned = False
        self.is_deserted = threading.Event()  # set while no client is connected
        self.is_deserted.set()

    def submit(self, job: Callable[[], object] | None) -> None:
        """Run a job on the server's thread soon; None ends the thread. From any thread."""
        if self.endpoint.fileno() >= 0:  # NOT in a forked child: the waker is the parent's
            self._jobs.put(job)
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")

    def run(self) -> None:
        """Serve until a job is None."""
        try:
            until = float("inf")
            while True:
                if wait_for(self.endpoint, until, self._woken) and not self._run_jobs():
                    return
                now = time.monotonic()
                self.endpoint.step(now)
                until = self._expire(now)
        finally:
            self.close()

    def _run_jobs(self) -> bool:
        """Run the jobs of other threads; return False if the thread must end."""
        for _ in self._woken.recv(1 << 10):  # one byte per job, sent after the job was queued
            job = self._jobs.get()
            if job is None:
                return False
            job()
        return True

    def close(self) -> None:
        """Close every socket."""
        self.endpoint.close()
        self._waker.close()
        self._woken.close()
        self.is_deserted.set()

    # The endpoint's callbacks.

    def admit(self, hello: Hello) -> bytes | Progress:
        """Return the store's key for every client."""
        return self._key if hello == STORE_HELLO else Progress.REFUSED

    def welcome(self, peer: Peer, _hello: Hello) -> None:
        """Take requests from a client that has proved the key."""
        if len(self._clients) >= self.most_clients:
            peer.close()
            return
        peer.expect(SET, N_LENGTH + MAX_KEY_BYTES + MAX_VALUE_BYTES)
        peer.expect(GET, N_WAIT + MAX_KEY_BYTES)
        self._clients[peer] = None
        self.is_deserted.clear()

    def key_differs(self, _hello: Hello) -> None:
        """Warn once: the client gets an error, but ranks that wait for it here do not.

        NOT every time, because any process that reaches the port can cause it.
        """
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("%s. %s", self.key_differs_text, HOW_TO_SET_KEY)

    turned_away = staticmethod(note_turned_away)

    def received(self, peer: Peer, kind: int, body: bytes, _fd: int) -> None:
        """Answer a request; drop a client that sends a malformed one, or one while it waits."""
        try:
            if self._clients[peer] is not None:
                raise ValueError("out of turn")
            request = Unpacker(body)
            if kind == SET:
                key = request.take(request.number(N_LENGTH, 1, MAX_KEY_BYTES)).decode()
                self._set(peer, key, request.rest())
            else:
                wait_ms = request.number(N_WAIT, 0, 2**32 - 1)
                self._get(peer, request.rest().decode(), wait_ms)
        except ValueError:
            peer.close()
            self.lost(peer)

    def lost(self, peer: Peer, _error: int = 0, _why: str = "") -> None:
        """Drop a client."""
        self._stop_waiting(peer)
        del self._clients[peer]
        if not self._clients:
            self.is_deserted.set()

    def _set(self, peer: Peer, key: str, value: bytes) -> None:
        """Write a value for a client, if there is room."""
        self._reply(peer, VALUE if self._put(key, value) else FULL)

    def _put(self, key: str, value: bytes) -> bool:
        """Write a value and send it to waiting clients; return False if there is no room."""
        before = self._values.get(key)
        n_more = len(value) - (-len(key) - _ENTRY_BYTES if before is None else len(before))
        if n_more > _MOST_BYTES - self._n_bytes:
            return False
        self._n_bytes += n_more
        self._values[key] = value
        for waiter in list(self._waiting.get(key, ())):
            self._reply(waiter, VALUE, value)
        return True

    def _drop(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._n_bytes -= len(key) + len(value) + _ENTRY_BYTES

    def _get(self, peer: Peer, key: str, wait_ms: int) -> None:
        if key in self._values:
            self._reply(peer, VALUE, self._values[key])
        elif wait_ms:
            self._clients[peer] = key
            self._waiting.setdefault(key, {})[peer] = time.monotonic() + wait_ms / 1000
        else:
            self._reply(peer, MISSING)

    def _reply(self, peer: Peer, kind: int, value: bytes = b"") -> None:
        self._stop_waiting(peer)
        peer.send(kind, value)  # a client that does not read its replies is lost

    def _stop_waiting(self, peer: Peer) -> None:
        key, self._clients[peer] = self._clients[peer], None
        if key is not None:
            del self._waiting[key][peer]
            if not self._waiting[key]:
                del self._waiting[key]

    def _expire(self, now: float) -> float:
        """Answer the clients whose wait has ended; return when the next wait ends."""
        ends = [end for waiters in self._waiting.values() for end in waiters.items()]
        for peer, until in ends:
            if now >= until:
                self._reply(peer, MISSING)
        return min((until for _, until in ends if now < until), default=float("inf"))


def _listen(host: str, port: int) -> list[socket.socket]:
    try:
        addresses = resolve(host)
    except OSError as error:
        raise UsageError(f"MASTER_ADDR={host} does not resolve ({error})") from error
    if not names_loopback(host) and all(map(is_loopback, addresses)):
        # /etc/hosts maps this host's own name to 127.0.1.1 (Debian); other hosts resolve it to an
        # address that they can reach.
        routed = routed_address() or only_address(list_interfaces())
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
            f"(`ss -ltnp sport = :{port}`); if torch.distributed holds it in this process, call "
            "shoal.init() before init_process_group()"
        )
    why = failure.strerror if failure is not None else "it has no address"
    return UsageError(
        f"rank 0 cannot serve the store at MASTER_ADDR={host}, port {port}: {why}. MASTER_ADDR "
        "must be a name or address of the host that rank 0 runs on"
    )
