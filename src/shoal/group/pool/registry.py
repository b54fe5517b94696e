"""Servers write their addresses to a job's rendezvous store, and rank 0 finds them there.

The store is torch's, which torchrun serves at `--rdzv-endpoint`, and anyone may write to it.
Servers seal their records with the job's key, and rank 0 ignores other records.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import threading
from collections.abc import Callable
from typing import Final

from shoal.errors import UsageError
from shoal.group.pool.addresses import MOST_SERVERS, Address, JobEndpoint, parse_address
from shoal.group.pool.protocol import key_id
from shoal.rendezvous.key import pair_key
from shoal.rendezvous.store.torch_client import TorchStoreClient
from shoal.threads import start

_LOG: Final = logging.getLogger("shoal")

_LOOK_S: Final = 0.5
_RETRY_S: Final = 2.0
_TIMEOUT_S: Final = 5.0  # for an answer of the store
# A server raises the count of places just before it writes to its place, which may be empty then.
_MOST_LOOKS: Final = 20
_LAST_S: Final = 0.5  # for the thread to end; the store may delay it


def leave(client: TorchStoreClient, endpoint: JobEndpoint, key: bytes, address: Address) -> str:
    """Write a server's address for jobs with this key, unless it is there; return its place.

    The place is a key in the store. OSError or ValueError if the store does not answer as torch's.
    """
    folder = _folder(endpoint, key)
    value = f"{_seal(endpoint, key, str(address))} {address}".encode()
    for at in range(1, _n_places(client, folder) + 1):
        if client.try_get(f"{folder}/{at}") == value:  # left by this server before a restart
            return f"{folder}/{at}"
    place = f"{folder}/{client.add(f'{folder}/n')}"
    client.set(place, value)
    return place


class Registry:
    """Calls `on_found` with the addresses that servers write, on a daemon thread, until `close`.

    Looks twice a second; finds addresses again after each connection to the store.
    """

    def __init__(
        self, endpoint: JobEndpoint, key: bytes, on_found: Callable[[Address], None]
    ) -> None:
        self._endpoint, self._key, self._on_found = endpoint, key, on_found
        self._folder = _folder(endpoint, key)
        self._closing = threading.Event()
        self._is_silent = False
        self._thread = start("shoal registry", self._run)

    def close(self) -> None:
        """Stop looking; idempotent."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                where = self._endpoint.host, self._endpoint.port
                with contextlib.closing(TorchStoreClient(*where, _TIMEOUT_S)) as client:
                    self._look_on(client)
            except (OSError, ValueError) as error:
                if not self._is_silent:
                    _LOG.warning("cannot look for servers at %s: %s", self._endpoint, error)
                self._is_silent = True
            self._closing.wait(_RETRY_S)

    def _look_on(self, client: TorchStoreClient) -> None:
        n_known, looks = 0, dict[int, int]()  # by place without a record yet: the number of looks
        while not self._closing.is_set():
            n = _n_places(client, self._folder)
            if self._is_silent:
                _LOG.info("looking for servers at %s again", self._endpoint)
                self._is_silent = False
            looks.update(dict.fromkeys(range(n_known + 1, n + 1), 0))
            n_known = max(n_known, n)
            for place in list(looks):
                value = client.try_get(f"{self._folder}/{place}")
                looks[place] += 1
                if value is None and looks[place] < _MOST_LOOKS:
                    continue
                del looks[place]
                address = self._read(value or b"")
                if address is not None:
                    self._on_found(address)
            self._closing.wait(_LOOK_S)

    def _read(self, value: bytes) -> Address | None:
        seal, _, text = value.decode(errors="replace").partition(" ")
        if not hmac.compare_digest(seal.encode(), _seal(self._endpoint, self._key, text).encode()):
            return None
        with contextlib.suppress(UsageError):
            return parse_address(text, "a server's address")
        return None


def _folder(endpoint: JobEndpoint, key: bytes) -> str:
    return f"shoal/servers/{endpoint.job}/{key_id(key):016x}"


def _n_places(client: TorchStoreClient, folder: str) -> int:
    return min(MOST_SERVERS, int(client.try_get(f"{folder}/n") or 0))


def _seal(endpoint: JobEndpoint, key: bytes, text: str) -> str:
    """Return the proof that the writer of this text holds the job's key."""
    secret = pair_key(key, 0, 0, 0, "server address")
    sealed = f"{endpoint.job} {text}".encode()
    return hashlib.blake2b(sealed, key=secret[:64], digest_size=16).hexdigest()
