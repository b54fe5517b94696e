"""Writes a server's address to a job's rendezvous store, from a separate process.

The process waits for the store, writes again after the store has restarted, and ends with the
server. The address stays in the store; jobs notice that an ended server does not answer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shoal.group.pool.addresses import Address
from shoal.group.pool.registry import leave
from shoal.rendezvous.key import job_key
from shoal.rendezvous.store.torch_client import TorchStoreClient
from shoal.server.child import fork

if TYPE_CHECKING:
    from shoal.group.pool.addresses import JobEndpoint
    from shoal.server.options import JobKey

_LOG: Final = logging.getLogger("shoal")
_LOOK_S: Final = 2.0
_RETRY_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_ANYWHERE: Final = ("0.0.0.0", "::")


def start_registrar(
    endpoint: JobEndpoint, keys: Sequence[JobKey], addresses: Sequence[tuple[str, int]]
) -> None:
    """Fork the registrar, which ends with this process."""

    def work() -> None:
        found = [job_key({"SHOAL_KEY_FILE": key.path}) for key in keys]
        register_on(endpoint, [key for key in found if key is not None], addresses)

    fork(f"registering at {endpoint}", work)


def register_on(
    endpoint: JobEndpoint, keys: Sequence[bytes], addresses: Sequence[tuple[str, int]]
) -> None:
    """Register, and again whenever the store is new or lost the records. Never returns."""
    is_silent = False
    while True:
        try:
            with contextlib.closing(
                TorchStoreClient(endpoint.host, endpoint.port, _TIMEOUT_S)
            ) as client:
                address = address_for(client, addresses)
                places = [leave(client, endpoint, key, address) for key in keys]
                _LOG.info("registered at %s as %s", endpoint, address)
                is_silent = False
                while all(client.try_get(place) is not None for place in places):
                    time.sleep(_LOOK_S)
        except (OSError, ValueError) as error:
            if not is_silent:
                _LOG.warning("cannot register at %s: %s; retrying", endpoint, error)
            is_silent = True
        time.sleep(_RETRY_S)


def address_for(client: TorchStoreClient, addresses: Sequence[tuple[str, int]]) -> Address:
    """Return the server's address, on the network of the store if it listens there."""
    local = client.local_host
    port = next((port for host, port in addresses if host in (local, *_ANYWHERE)), None)
    return Address(*addresses[0]) if port is None else Address(local, port)
