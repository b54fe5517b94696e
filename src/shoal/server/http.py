"""Serves /healthz, /readyz and /metrics at the server's port, to anyone: they hold no secrets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from shoal.state.prometheus import exposition

MOST_BYTES: Final = 4096  # of a request
BEGINNINGS: Final = (b"GET ", b"HEAD")
_PATIENCE_S: Final = 2.0  # for a request


_PLAIN: Final = "text/plain; charset=utf-8"
_METRICS: Final = {
    "shoal_server_draining": "1 while the server drains, else 0.",
    "shoal_server_jobs": "Jobs that have reserved or are served.",
    "shoal_server_views": "Views that are served: one of each job, two at a change.",
    "shoal_server_calls_in_flight": "All-reduces in flight.",
    "shoal_server_memory_bytes": "Bytes held by segments.",
    "shoal_server_receive_bytes_per_second": "Rate from workers.",
    "shoal_server_send_bytes_per_second": "Rate to workers.",
}
_SUMMED: Final = ("n_in_flight", "staging_bytes", "bytes_in_per_s", "bytes_out_per_s")

State = Callable[[], dict[str, Any]]
"""Returns a server's state. The reports in "views" name jobs, so only their sums are served."""


class HttpCaller:
    """A caller that gets one response, short enough for the send buffer of a new socket.

    Owns the socket `fd`. `is_open` until the caller is answered or has left; close it at
    `deadline`.
    """

    def __init__(self, selector: selectors.BaseSelector, fd: int, state: State) -> None:
        self._selector, self._state = selector, state
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
        response = answer(self._request, self._state) if data else b""
        if response is None:
            return
        with contextlib.suppress(OSError):
            self._sock.send(response)
            self._sock.shutdown(socket.SHUT_WR)
        self.close()


def answer(request: bytes, state: State) -> bytes | None:
    """Return the response to a request; None if it is not complete yet."""
    if b"\r\n\r\n" not in request and b"\n\n" not in request:
        return _response(400, "the request is too long") if len(request) >= MOST_BYTES else None
    words = request.split(b"\n", 1)[0].split()
    path = words[1].split(b"?")[0] if len(words) == 3 else b""
    status, text, kind = _page(path, state)
    return _response(status, text, kind, with_body=words[:1] != [b"HEAD"])


def _page(path: bytes, state: State) -> tuple[int, str, str]:
    if path == b"/healthz":
        return 200, "ok\n", _PLAIN
    if path == b"/readyz":
        return (503, "draining\n", _PLAIN) if state()["is_draining"] else (200, "ready\n", _PLAIN)
    if path == b"/metrics":
        return 200, _metrics(state()), "text/plain; version=0.0.4; charset=utf-8"
    return 404, "the paths are /healthz, /readyz and /metrics\n", _PLAIN


def _metrics(state: dict[str, Any]) -> str:
    views = state["views"]
    sums = [sum(view.get(name, 0) for view in views) for name in _SUMMED]
    values = [int(state["is_draining"]), state["n_jobs"], len(views), *sums]
    metrics = {name: ("gauge", what) for name, what in _METRICS.items()}
    return exposition(metrics, zip(_METRICS, values, [{}] * len(values), strict=True))


def _response(status: int, text: str, kind: str = _PLAIN, *, with_body: bool = True) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
