"""Looks up a server's name on a thread of its own, however long that takes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from shoal.errors import ShoalError
from shoal.rendezvous.interface import resolve
from shoal.rendezvous.record import Endpoint
from shoal.threads import start

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address

_AGAIN_S: Final = 2.0  # from one lookup to the next


class Lookup:
    """The addresses of a server. The last good ones stay until a lookup finds others.

    Args:
        on_found: called on a lookup's thread when it has ended.

    Attributes:
        trouble: a verb phrase: why no address is known.

    Threads: all methods on one; a lookup has a daemon thread of its own.
    """

    def __init__(self, address: Address, on_found: Callable[[], None]) -> None:
        self._address, self._on_found = address, on_found
        self.trouble = ""
        self._endpoints: list[Endpoint] = []
        self._is_running = False
        self._not_before = float("-inf")
        with contextlib.suppress(OSError):
            socket.inet_pton(
                socket.AF_INET6 if ":" in address.host else socket.AF_INET, address.host
            )
            self._endpoints, self._not_before = [Endpoint(*address, "")], float("inf")

    def endpoints(self) -> list[Endpoint]:
        """Return the known addresses, the best first."""
        return list(self._endpoints)

    def prefer(self, endpoint: Endpoint) -> None:
        """Record that the server was reached at this address."""
        self._endpoints = [endpoint, *(one for one in self._endpoints if one != endpoint)]

    def begin(self, now: float) -> float:
        """Look the name up, unless a lookup runs or has just ended; return when to call again."""
        if self._is_running:
            return float("inf")  # it wakes the caller
        if now >= self._not_before:
            self._not_before = now + _AGAIN_S
            self._is_running = True
            try:
                start("shoal lookup", self._run)
            except ShoalError as error:
                self._is_running = False
                self.trouble = f"has a name that cannot be looked up: {error}"
        return self._not_before

    def _run(self) -> None:
        host, port = self._address
        try:
            found = resolve(host, port, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.trouble = f"has a name that does not resolve ({error})"
        else:
            names = dict.fromkeys(str(target[0]) for *_, target in found)
            self._endpoints, self.trouble = [Endpoint(name, port, "") for name in names], ""
        self._is_running = False
        self._on_found()
