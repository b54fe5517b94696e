"""What a rank publishes about itself in the store, and how ranks recognise their own host."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from shoal.limits import MOST_CONNECTIONS
from shoal.rendezvous.handshake import N_NONCE_BYTES, VERSION
from shoal.rendezvous.key import N_KEY_BYTES

MAX_CARD_BYTES: Final = 255
_MAX_TEXT: Final = 255  # characters of a name: HOST_NAME_MAX is 64, a DNS name at most 253
_SEAL: Final = b', "crc": '


class Endpoint(NamedTuple):
    """Where a rank listens for other hosts; `interface` only serves messages."""

    address: str
    port: int
    interface: str

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


class Record(NamedTuple):
    """One rank's record.

    `has_own_key` says whether the rank was given a job key. `key` is set by rank 0 if it was not:
    a random one for the whole job. The two travel in one record so that nobody can pair the key
    of an earlier group with the nonce of this one. `card` is the caller's, for all ranks to read.
    A rank of another host opens a path to `endpoint` and to each of `more`.
    """

    size: int
    nonce: bytes
    host_id: str
    host_label: str
    unix_name: str
    has_own_key: bool
    key: bytes | None = None
    endpoint: Endpoint | None = None
    more: tuple[Endpoint, ...] = ()
    card: bytes = b""
    version: int = VERSION

    @property
    def n_paths(self) -> int:
        """How many connections each higher rank of another host opens to this one."""
        return 1 + len(self.more)

    def encode(self) -> bytes:
        """As JSON, so that a person can read it in the store, with a checksum."""
        fields = self._asdict()
        fields["nonce"] = self.nonce.hex()
        fields["key"] = None if self.key is None else self.key.hex()
        fields["endpoint"] = None if self.endpoint is None else self.endpoint._asdict()
        fields["more"] = [endpoint._asdict() for endpoint in self.more]
        fields["card"] = self.card.hex()
        return seal(fields)


def decode(value: bytes) -> Record | None:
    """The record, or None if these bytes are not one. A wrong version has only its version right.

    Nothing in a record is trusted: the peer still has to prove the key.
    """
    try:
        fields = unseal(value)
        version = integer_in(fields["version"], 0, 65535)
        if version != VERSION:
            return Record(0, b"", "", "", "", False, version=version)
        return _checked(fields) if "crc" in fields else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def seal(fields: Mapping[str, Any]) -> bytes:
    """These fields as JSON, and a checksum as the last one.

    Without it one flipped bit could make a version, a nonce or a key another one, and end a job
    for that.
    """
    text = json.dumps(fields).encode("ascii")
    return text[:-1] + _SEAL + b"%d}" % zlib.crc32(text)


def unseal(value: bytes) -> dict[str, Any]:
    """The fields. Other versions may have no checksum; ours has `crc` among its fields.

    Raises:
        ValueError, TypeError: these bytes were not made by `seal`, or are damaged.
    """
    text, seal_mark, crc = value.rpartition(_SEAL)
    if seal_mark and zlib.crc32(text + b"}") != int(crc[:-1]):
        raise ValueError("damaged")
    fields = json.loads(value)
    if not isinstance(fields, dict):
        raise TypeError(type(fields))
    return fields


def record_key(rank: int) -> str:
    """The store key under which a rank publishes."""
    return f"shoal/rank/{rank}"


def epoch_of(nonces: Sequence[bytes]) -> int:
    """The epoch of the group whose ranks drew these nonces: random, and nobody chose it."""
    return int.from_bytes(hashlib.sha256(b"".join(nonces)).digest()[:8], "big")


def find_host_id(environ: Mapping[str, str]) -> str:
    """The same on two ranks exactly if they can share Unix sockets, and with them memory.

    Abstract Unix sockets belong to a network namespace, so two containers with networks of their
    own are two hosts. `SHOAL_HOST_ID` overrides it: tests use it to pretend several hosts, and
    virtual machines cloned with their boot id need it.
    """
    if environ.get("SHOAL_HOST_ID"):
        return "set:" + environ["SHOAL_HOST_ID"][:_MAX_TEXT]
    try:
        # As bytes: a text file costs a tenth of a whole join the first time.
        with open("/proc/sys/kernel/random/boot_id", "rb", buffering=0) as file:
            boot = file.read(64).decode("ascii", "replace").strip()
    except (FileNotFoundError, PermissionError):  # NOT for want of descriptors: that passes
        boot = socket.gethostname()
    try:
        # The thread's own namespace, which setns(2) may have changed for it alone.
        namespace = os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{boot}:{namespace}"


def _checked(fields: dict[str, Any]) -> Record:
    return Record(
        size=integer_in(fields["size"], 1, 2**31),
        nonce=_secret(fields["nonce"], N_NONCE_BYTES),
        host_id=short_text(fields["host_id"]),
        host_label=short_text(fields["host_label"]),
        unix_name=short_text(fields["unix_name"]),
        has_own_key=fields["has_own_key"] is True,
        key=None if fields["key"] is None else _secret(fields["key"], N_KEY_BYTES),
        endpoint=None if fields["endpoint"] is None else _endpoint(fields["endpoint"]),
        more=tuple(map(_endpoint, fields["more"][: MOST_CONNECTIONS - 1])),
        card=bytes.fromhex(short_text(fields["card"])),
    )


def _endpoint(fields: dict[str, Any]) -> Endpoint:
    address = short_text(fields["address"])
    try:
        # Numeric only: a name would be resolved, which can block for seconds.
        socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    except OSError as error:
        raise ValueError(address) from error
    return Endpoint(address, integer_in(fields["port"], 1, 65535), short_text(fields["interface"]))


def integer_in(value: object, low: int, high: int) -> int:
    """This value, if it is an integer from `low` to `high`; else ValueError."""
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(value)
    return value


def short_text(value: object) -> str:
    """This value, if it is a line of at most 510 characters; else ValueError."""
    # Printable, because it ends up in logs and error messages.
    if not isinstance(value, str) or len(value) > 2 * _MAX_TEXT or not value.isprintable():
        raise ValueError(value)
    return value


def _secret(value: object, n_bytes: int) -> bytes:
    found = bytes.fromhex(short_text(value))
    if len(found) != n_bytes:
        raise ValueError(f"{len(found)} bytes")
    return found
