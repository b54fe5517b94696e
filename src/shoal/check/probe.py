"""Measures the route from one host to another: whether it connects, its latency and its rate.

A prober connects, sends the token of the answerer, then requests of a letter and a length:
`p` is answered with the answerer's clock, `b` is followed by that many bytes, which are confirmed
with one byte. All waits end after `PATIENCE_S`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.rendezvous.interface import Advertised, choose_addresses
from shoal.rendezvous.listener import listen_tcp, port_range
from shoal.settings import n_paths
from shoal.threads import Threads, start

if TYPE_CHECKING:
    from shoal.check.facts import Path

PATIENCE_S: Final = 3.0
_N_TOKEN: Final = 32
_REQUEST: Final = struct.Struct("!cI")
_CLOCK: Final = struct.Struct("!d")
_N_PINGS: Final = 20
_FIRST_BULK: Final = 64 << 10  # many packets: a smaller one may fit where full ones are lost
_MOST_BULK: Final = 256 << 20
_IP_MTU, _IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h
_LONG_ENOUGH_S: Final = 0.25
_CHUNK: Final = memoryview(bytes(1 << 20))


class Probe(NamedTuple):
    """The result of one probe. Times in seconds, rates in bytes per second."""

    error: str = ""
    latency_s: float = 0.0
    rate: float = 0.0
    ahead_s: float = 0.0
    """The lead of the other host's clock."""
    mtu: int = 0
    """The largest packet that the kernel sends on this route, after the transfers; 0: unknown."""


class Answerer:
    """Answers probes from all processes that know its token, until `close`."""

    def __init__(self, master: str | None, environ: Mapping[str, str]) -> None:
        self._token = os.urandom(_N_TOKEN)
        self._workers = Threads("shoal check", 64)
        self._listeners: list[socket.socket] = []
        self.paths: list[tuple[Advertised, int]] = []
        ports: Iterable[int] = port_range(environ)
        for chosen in dict.fromkeys(choose_addresses(n_paths(environ), master, environ)):
            listener = listen_tcp(chosen.address, ports)
            self._listeners.append(listener)
            self.paths.append((chosen, listener.getsockname()[1]))
            start("shoal check", self._accept, listener)

    @property
    def token(self) -> str:
        return self._token.hex()

    def close(self) -> None:
        """Answer no new prober."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                caller, _ = listener.accept()
                caller.settimeout(2 * PATIENCE_S)
                self._workers.submit(functools.partial(self._answer, caller))

    def _answer(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_receive(caller, _N_TOKEN), self._token):
                return
            into = memoryview(bytearray(1 << 20))
            while True:
                kind, n_bytes = _REQUEST.unpack(_receive(caller, _REQUEST.size))
                if kind == b"p":
                    caller.sendall(_CLOCK.pack(time.time()))
                else:
                    while n_bytes > 0:
                        n_bytes -= _some(caller, into[:n_bytes])
                    caller.sendall(b"k")


def probe(path: Path, token: str) -> Probe:
    """Measure the route to this address; a failure is returned as text."""
    try:
        link = socket.create_connection((path.address, path.port), PATIENCE_S)
    except TimeoutError:
        return Probe(
            f"nothing answers at {path.address} port {path.port}: a firewall (set "
            "SHOAL_PORT_RANGE, and open these ports), or no route"
        )
    except OSError as error:
        return Probe(f"{path.address} port {path.port}: {_why(error)}")
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            link.sendall(bytes.fromhex(token))
            latency_s, ahead_s = _ping(link)
        except OSError as error:
            return Probe(f"{path.address} port {path.port} connects but does not answer: {error}")
        try:
            return Probe("", latency_s, _rate(link), ahead_s, _mtu(link))
        except OSError:
            return Probe(
                f"small messages pass but {_FIRST_BULK >> 10} KiB do not: full packets are lost, "
                "for example because an interface has a larger MTU than a switch or a tunnel",
                latency_s,
            )


def _ping(link: socket.socket) -> tuple[float, float]:
    best, ahead_s = float("inf"), 0.0
    for _ in range(_N_PINGS):
        began, since = time.time(), time.perf_counter()
        link.sendall(_REQUEST.pack(b"p", 0))
        [theirs] = _CLOCK.unpack(_receive(link, _CLOCK.size))
        took = time.perf_counter() - since
        if took < best:
            best, ahead_s = took, theirs - (began + took / 2)
    return best / 2, ahead_s


def _rate(link: socket.socket) -> float:
    """Return the bytes per second of the faster of two transfers that take long enough."""
    n_bytes = _FIRST_BULK
    while True:
        took = min(_transfer(link, n_bytes), _transfer(link, n_bytes))
        if took >= _LONG_ENOUGH_S or n_bytes >= _MOST_BULK:
            return n_bytes / took
        n_bytes = min(4 * n_bytes, _MOST_BULK)


def _mtu(link: socket.socket) -> int:
    """Return the MTU reported by routers on the route, else the interface's MTU."""
    if link.family == socket.AF_INET6:
        return link.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
    return link.getsockopt(socket.IPPROTO_IP, _IP_MTU)


def _transfer(link: socket.socket, n_bytes: int) -> float:
    since = time.perf_counter()
    link.sendall(_REQUEST.pack(b"b", n_bytes))
    for begin in range(0, n_bytes, len(_CHUNK)):
        link.sendall(_CHUNK[: n_bytes - begin])
    _receive(link, 1)
    return time.perf_counter() - since


def _receive(link: socket.socket, n_bytes: int) -> bytes:
    data = bytearray(n_bytes)
    at = 0
    while at < n_bytes:
        at += _some(link, memoryview(data)[at:])
    return bytes(data)


def _some(link: socket.socket, into: memoryview) -> int:
    n_bytes = link.recv_into(into)
    if not n_bytes:
        raise ConnectionError("it closes the connection")
    return n_bytes


def _why(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "refused: a firewall that rejects, or another machine has this address"
    return error.strerror or str(error)
