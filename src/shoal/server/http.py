"""/healthz, /readyz and /metrics at the server's port, for anyone: they hold no secrets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final, NamedTuple

MOST_BYTES: Final = 4096  # of a request
BEGINNINGS: Final = (b"GET ", b"HEAD")
_PATIENCE_S: Final = 2.0  # for a request


class Health(NamedTuple):
    """The state of a server that anyone may see.

    Args:
        views: the last report of each view. The names of jobs in it are not sent.
    """

    is_draining: bool
    n_jobs: int
    views: Iterable[dict[str, Any]]


class HttpCaller:
    """A caller that is sent one response. That is short: the buffer of a new socket takes it.

    Owns the non-blocking socket `fd`. `is_open` until it is answered or has left; close it at
    `deadline`.
    """

    def __init__(
        self, selector: selectors.BaseSelector, fd: int, health: Callable[[], Health]
    ) -> None:
        self._selector, self._health = selector, health
        self._sock, self._request = socket.socket(fileno=fd), b""
        self._sock.setblocking(False)
        self.is_open, self.deadline = True, time.monotonic() + _PATIENCE_S
        selector.register(self._sock, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._sock)
            self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._request += data[: MOST_BYTES - len(self._request)]
        response = answer(self._request, self._health) if data else b""
        if response is None:
            return
        with contextlib.suppress(OSError):
            self._sock.send(response)
            self._sock.shutdown(socket.SHUT_WR)
        self.close()


def answer(request: bytes, health: Callable[[], Health]) -> bytes | None:
    """Return the response to a request; None if it is not complete yet."""
    if b"\r\n\r\n" not in request and b"\n\n" not in request:
        return _response(400, "the request is too long") if len(request) >= MOST_BYTES else None
    words = request.split(b"\n", 1)[0].split()
    path = words[1].split(b"?")[0] if len(words) == 3 else b""
    status, text, kind = _page(path, health)
    return _response(status, text, kind, with_body=words[:1] != [b"HEAD"])


def _page(path: bytes, health: Callable[[], Health]) -> tuple[int, str, str]:
    plain = "text/plain; charset=utf-8"
    if path == b"/healthz":
        return 200, "ok\n", plain
    if path == b"/readyz":
        return (503, "draining\n", plain) if health().is_draining else (200, "ready\n", plain)
    if path == b"/metrics":
        return _metrics(health())
    return 404, "there are /healthz, /readyz and /metrics\n", plain


def _metrics(health: Health) -> tuple[int, str, str]:
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
    except ImportError:
        text = "metrics need prometheus_client: pip install prometheus_client\n"
        return 501, text, "text/plain; charset=utf-8"
    registry, views = CollectorRegistry(), list(health.views)
    numbers = {
        "shoal_server_draining": ("Whether it is about to end.", int(health.is_draining)),
        "shoal_server_jobs": ("Jobs that have reserved or are served.", health.n_jobs),
        "shoal_server_views": (
            "Views that are served: one of each job, two at a change.",
            len(views),
        ),
        "shoal_server_calls_in_flight": ("All-reduces in flight.", _sum(views, "n_in_flight")),
        "shoal_server_memory_bytes": ("Held by segments.", _sum(views, "staging_bytes")),
        "shoal_server_receive_bytes_per_second": ("From workers.", _sum(views, "bytes_in_per_s")),
        "shoal_server_send_bytes_per_second": ("To workers.", _sum(views, "bytes_out_per_s")),
    }
    for name, (what, value) in numbers.items():
        Gauge(name, what, registry=registry).set(value)
    return 200, generate_latest(registry).decode(), CONTENT_TYPE_LATEST


def _sum(views: Iterable[dict[str, Any]], name: str) -> float:
    return float(sum(view.get(name, 0) for view in views))


def _response(
    status: int, text: str, kind: str = "text/plain; charset=utf-8", *, with_body: bool = True
) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
