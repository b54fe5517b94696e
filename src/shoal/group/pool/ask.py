"""Request a server's state, for `shoal status`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from shoal.engine import Endpoint, Peer, Progress
from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.group.pool.protocol import (
    Ask,
    Status,
    decode,
    expect,
    hello_of,
    send,
    server_key,
    why_not_reached,
)
from shoal.rendezvous.interface import resolve
from shoal.rendezvous.key import job_key
from shoal.rendezvous.listener import wait_for

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address

_TIMEOUT_S: Final = 5.0


def ask(address: Address, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of the server at this address, for the job key of the environment.

    Raises UsageError if there is no key, or the server does not have it; TimedOut or PeerLost if it
    does not answer; ShoalError if it cannot be reached, or its answer cannot be read.
    """
    key = job_key(environ)
    if key is None:
        raise UsageError("SHOAL_KEY_FILE is not set: a server answers only holders of a job's key")
    try:
        targets = resolve(address.host)
    except (OSError, UnicodeError) as error:
        raise ShoalError(f"server {address} cannot be reached: {error}") from error
    asking = _Asking(address, len(targets))
    until = time.monotonic() + _TIMEOUT_S
    with contextlib.closing(Endpoint(asking, dial_s=2 * _TIMEOUT_S)) as endpoint:
        for target in targets:
            endpoint.connect(target, address.port, hello_of(key), server_key(key))
        while asking.answer is None:
            if time.monotonic() >= until:
                raise TimedOut(f"server {address} did not answer within {_TIMEOUT_S:g} s")
            wait_for(endpoint, until)
            endpoint.step(time.monotonic())
    return asking.answer


class _Asking:
    """The endpoint's owner. Asks over the first dial that reaches the server."""

    def __init__(self, address: Address, n_dials: int) -> None:
        self._address, self._n_dials = address, n_dials
        self._failures: dict[int, ShoalError] = {}  # by dial
        self._peer: Peer | None = None
        self.answer: dict[str, Any] | None = None

    def reached(self, peer: Peer, _dial: int) -> None:
        """Ask, unless another dial was faster."""
        if self._peer is not None:
            peer.close()
            return
        self._peer = peer
        expect(peer, (Status,))
        send(peer, Ask())

    def not_reached(self, dial: int, error: int, progress: Progress, was_connected: bool) -> None:
        """Record the failure; raise it once all dials have failed."""
        kind = UsageError if progress is Progress.KEY_DIFFERS else ShoalError
        why = why_not_reached(error, progress, was_connected)
        self._failures[dial] = kind(f"server {self._address} {why}")
        if self._peer is None and len(self._failures) == self._n_dials:
            raise max(self._failures.values(), key=lambda one: isinstance(one, UsageError))

    def received(self, _peer: Peer, kind: int, body: bytes, _fd: int) -> None:
        try:
            message = decode(kind, body)
            assert isinstance(message, Status)
            self.answer = dict(json.loads(message.text))
        except (TypeError, ValueError, RecursionError) as error:
            raise ShoalError(
                f"server {self._address} sent an answer that cannot be read: {error}"
            ) from None

    def lost(self, _peer: Peer, _error: int, why: str) -> None:
        raise PeerLost(-1, str(self._address), reason=why)
