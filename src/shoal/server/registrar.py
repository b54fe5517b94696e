"""Leaves a server's address in a job's rendezvous store, from a process of its own.

It waits for the store, writes again if the store was started again, and removes what it has written
when the server ends, however that does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from shoal.group.pool.addresses import Address
from shoal.group.pool.registry import leave, take_place
from shoal.rendezvous.key import job_key
from shoal.rendezvous.store.torch_client import TorchStoreClient

if TYPE_CHECKING:
    from shoal.group.pool.addresses import JobEndpoint
    from shoal.server.options import JobKey

_LOG: Final = logging.getLogger("shoal")
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_LOOK_S: Final = 2.0
_RETRY_S: Final = 1.0
LAST_S: Final = 2.0
"""The time to remove its records after SIGTERM."""

_TIMEOUT_S: Final = 5.0
_ANYWHERE: Final = ("0.0.0.0", "::")


def start_registrar(
    endpoint: JobEndpoint, keys: Sequence[JobKey], addresses: Sequence[tuple[str, int]]
) -> int:
    """Fork the registrar; return its process id. SIGTERM or the end of this process ends it."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, _end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server drains, and ends this one
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if os.getppid() == parent:
            register_on(endpoint, [_key_in(key) for key in keys], addresses)
    except SystemExit:
        pass
    except Exception:  # noqa: BLE001 - the frames above belong to the parent
        _LOG.exception("registering at %s failed", endpoint)
    finally:
        os._exit(0)


def _end(*_: object) -> None:
    """Exit; a second signal does not interrupt what is done on the way out."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def _key_in(key: JobKey) -> bytes:
    found = job_key({"SHOAL_KEY_FILE": key.path})
    assert found is not None  # the server has read it
    return found


def register_on(
    endpoint: JobEndpoint, keys: Sequence[bytes], addresses: Sequence[tuple[str, int]]
) -> None:
    """Register for ever: there may be no store yet, or a new one without the records."""
    is_silent = False
    while True:
        try:
            with contextlib.closing(
                TorchStoreClient(endpoint.host, endpoint.port, _TIMEOUT_S)
            ) as client:
                address = address_for(client, addresses)
                with _taken_back(endpoint) as places:
                    for key in keys:
                        places.append(take_place(client, endpoint, key))
                        leave(client, places[-1], endpoint, key, address)
                    _LOG.info("registered at %s as %s", endpoint, address)
                    is_silent = False
                    while all(client.try_get(place) is not None for place in places):
                        time.sleep(_LOOK_S)
        except OSError as error:
            if not is_silent:
                _LOG.warning("cannot register at %s: %s; tried again and again", endpoint, error)
            is_silent = True
        time.sleep(_RETRY_S)


@contextlib.contextmanager
def _taken_back(endpoint: JobEndpoint) -> Iterator[list[str]]:
    """Remove what is written at these places when SIGTERM ends this process."""
    places: list[str] = []
    try:
        yield places
    except SystemExit:  # NOT by the connection in use: an answer may be half read
        with (
            contextlib.suppress(OSError),
            contextlib.closing(TorchStoreClient(endpoint.host, endpoint.port, LAST_S)) as last,
        ):
            for place in places:
                last.delete(place)
        raise


def address_for(client: TorchStoreClient, addresses: Sequence[tuple[str, int]]) -> Address:
    """Return where the server listens, on the network of the store if it can."""
    local = client.local_host
    port = next((port for host, port in addresses if host in (local, *_ANYWHERE)), None)
    return Address(*addresses[0]) if port is None else Address(local, port)
