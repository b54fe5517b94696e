"""Ask a server how it fares, and wait for the answer: `shoal status`."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from shoal.engine import ClientHandshake, Progress
from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.group.pool.protocol import Ask, Frames, Status, encode, hello_of, server_key
from shoal.rendezvous.key import job_key

if TYPE_CHECKING:
    from shoal.group.pool.addresses import Address

_TIMEOUT_S: Final = 5.0


def ask(address: Address, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the server at this address tells whoever holds the job key of the environment.

    Raises:
        UsageError: there is no key, or the server does not know it.
        TimedOut, PeerLost: it does not answer.
        ShoalError: it cannot be reached, or what it says makes no sense.
    """
    key = job_key(environ)
    if key is None:
        raise UsageError("SHOAL_KEY_FILE is not set: a server answers who holds a job's key")
    until = time.monotonic() + _TIMEOUT_S
    try:
        with socket.create_connection(address, timeout=_TIMEOUT_S) as sock:
            _prove(sock, address, key)
            sock.sendall(encode(Ask()))
            return _read(sock, address, until)
    except TimeoutError:
        raise TimedOut(f"server {address} did not answer within {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise ShoalError(f"server {address} cannot be reached: {error}") from error


def _prove(sock: socket.socket, address: Address, key: bytes) -> None:
    handshake = ClientHandshake(hello_of(key), server_key(key))
    sock.sendall(handshake.hello)
    while handshake.wants:
        data = sock.recv(handshake.wants)
        if not data:
            raise ShoalError(
                f"{address} closed the connection: it is no shoal server, or of another version"
            )
        sock.sendall(handshake.feed(data))
    if handshake.progress is Progress.KEY_DIFFERS:
        raise UsageError(f"server {address} holds no job key like this one (SHOAL_KEY_FILE)")
    if handshake.progress is not Progress.DONE:
        raise ShoalError(f"{address} is no shoal server, or of another version")


def _read(sock: socket.socket, address: Address, until: float) -> dict[str, Any]:
    frames = Frames()
    while time.monotonic() < until:
        data = sock.recv(65536)
        if not data:
            raise PeerLost(-1, str(address), reason="closed the connection")
        try:
            for message in frames.feed(data):
                if isinstance(message, Status):
                    return dict(json.loads(message.text))
        except (TypeError, ValueError) as error:
            raise ShoalError(f"server {address} answers what makes no sense: {error}") from None
    raise TimeoutError
