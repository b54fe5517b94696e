"""The record that a rank publishes in the store, and the identity of its host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final, NamedTuple

from shoal.engine import HANDSHAKE_VERSION, N_NONCE_BYTES
from shoal.rendezvous.interface import is_numeric
from shoal.rendezvous.packing import (
    MAX_FIELD_BYTES,
    Unpacker,
    number,
    seal,
    text_field,
    unseal,
)

_KIND: Final = b"shoal/rc"
_HAS_OWN_KEY, _HAS_ENDPOINT = 1, 2
MAX_SIZE: Final = 1 << 20  # of a group; larger numbers in messages are refused


class Endpoint(NamedTuple):
    """An address at which a rank listens for other hosts; `interface` is for messages only."""

    address: str
    port: int
    interface: str

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    def pack(self) -> bytes:
        """Return the endpoint as bytes for `unpack_endpoint`."""
        return text_field(self.address) + number(self.port, 2) + text_field(self.interface)


def unpack_endpoint(data: Unpacker) -> Endpoint:
    """Take the next fields as an endpoint; ValueError if they are not one."""
    address = data.text()
    if not is_numeric(address):  # a name would be resolved, which can block for seconds
        raise ValueError(address)
    return Endpoint(address, data.number(2, 1, 65535), data.text())


class Record(NamedTuple):
    """One rank's record, from which rank 0 makes the roll (roll.py).

    `has_own_key` is True if the rank was given a job key. `endpoint` is for the lowest ranks of
    other hosts that connect to this rank; None before it listens for them.
    """

    size: int
    nonce: bytes
    host_id: str
    host_label: str
    unix_name: str
    has_own_key: bool
    endpoint: Endpoint | None = None
    version: int = HANDSHAKE_VERSION

    def encode(self) -> bytes:
        """Return the record as a value for the store."""
        flags = _HAS_OWN_KEY * self.has_own_key + _HAS_ENDPOINT * (self.endpoint is not None)
        body = number(self.size, 4) + number(flags, 1) + self.nonce
        body += b"".join(map(text_field, (self.host_id, self.host_label, self.unix_name)))
        if self.endpoint is not None:
            body += self.endpoint.pack()
        return seal(_KIND, self.version, body)


def decode(value: bytes) -> Record | None:
    """Return the record, or None for other bytes. Of another version, only `version` is valid.

    Nothing in a record is trusted: the peer must still prove the key.
    """
    try:
        version, body = unseal(_KIND, value)
        if version != HANDSHAKE_VERSION:
            return Record(0, b"", "", "", "", False, version=version)
        data = Unpacker(body)
        size, flags = data.number(4, 1, MAX_SIZE), data.number(1, 0, 3)
        nonce = data.take(N_NONCE_BYTES)
        names = data.text(), data.text(), data.text()
        endpoint = unpack_endpoint(data) if flags & _HAS_ENDPOINT else None
        data.end()
    except ValueError:
        return None
    return Record(size, nonce, *names, bool(flags & _HAS_OWN_KEY), endpoint)


def find_host_id(environ: Mapping[str, str]) -> str:
    """Return an id that is equal on two ranks exactly if they can share Unix sockets and memory.

    Abstract Unix sockets belong to a network namespace, so two containers with separate networks
    are two hosts. `SHOAL_HOST_ID` overrides it: tests use it to simulate several hosts, and virtual
    machines cloned with their boot id need it.
    """
    if environ.get("SHOAL_HOST_ID"):
        named = environ["SHOAL_HOST_ID"].encode(errors="replace")[: MAX_FIELD_BYTES - 4]
        return "set:" + named.decode(errors="ignore")
    try:
        # As bytes: a text file costs a tenth of a whole join the first time.
        with open("/proc/sys/kernel/random/boot_id", "rb", buffering=0) as file:
            boot = file.read(64).decode("ascii", "replace").strip()
    except (FileNotFoundError, PermissionError):  # NOT EMFILE: that passes
        boot = socket.gethostname()
    try:
        # The thread's namespace, NOT the process's: setns(2) changes one thread.
        namespace = os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{boot}:{namespace}"
