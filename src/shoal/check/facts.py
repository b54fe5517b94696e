"""The facts of a rank's machine, for comparison with the other ranks'."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import platform
import resource
import socket
import struct
from importlib import metadata
from typing import TYPE_CHECKING, Final, NamedTuple

import shoal
from shoal.rendezvous.interface import list_interfaces
from shoal.rendezvous.key import job_key
from shoal.rendezvous.record import find_host_id

if TYPE_CHECKING:
    from shoal.rendezvous.interface import Advertised

_SIOCGIFMTU: Final = 0x8921  # linux/sockios.h

# The settings that may differ between the ranks of a job; all others must be the same.
_OF_ONE_RANK: Final = (
    *("SHOAL_SOCKET_IFNAME", "SHOAL_HOST_ID", "SHOAL_PATHS", "SHOAL_PORT_RANGE", "SHOAL_ISA"),
    *("SHOAL_DUMP", "SHOAL_DEBUG", "SHOAL_MONITOR"),
)


class Path(NamedTuple):
    """An address at which this rank can be reached, and the reason for its choice."""

    address: str
    port: int
    interface: str
    why: str
    mtu: int
    """The interface's MTU; 0 if unknown."""


class Facts(NamedTuple):
    """One rank's machine and settings."""

    rank: int
    host: str
    host_id: str
    paths: list[Path]
    token: str
    """The token that a prober must send first; hexadecimal."""
    shoal: str
    python: str
    torch: str
    key: str
    """"none", or 16 digits that only holders of the same key share."""
    n_files: int
    locked_bytes: int
    """The limit of locked memory; -1 if unlimited."""
    free_bytes: int
    settings: dict[str, str]
    unused: list[str]
    """The interfaces that are not offered to other ranks, each with its addresses."""

    def encode(self) -> bytes:
        """Return the facts as a value for the store."""
        return json.dumps(self).encode()


def decode(value: bytes) -> Facts:
    """Return the facts that `Facts.encode` wrote."""
    fields = json.loads(value)
    fields[3] = [Path(*path) for path in fields[3]]
    return Facts(*fields)


def gather(rank: int, listening: list[tuple[Advertised, int]], token: str) -> Facts:
    """Return this rank's facts; `listening` has the addresses, and the port at each."""
    locked, files = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("SHOAL_") and name not in _OF_ONE_RANK and "KEY" not in name
    }
    return Facts(
        rank=rank,
        host=socket.gethostname(),
        host_id=find_host_id(os.environ),
        paths=[
            Path(one.address, port, one.interface, one.why, _mtu_of(one.interface))
            for one, port in listening
        ],
        token=token,
        shoal=shoal.__version__,
        python=platform.python_version(),
        torch=_version_of_torch(),
        key=_key_digest(),
        n_files=files,
        locked_bytes=-1 if locked == resource.RLIM_INFINITY else locked,
        free_bytes=_free_bytes(),
        settings=settings,
        unused=_unused({chosen.interface for chosen, _ in listening}),
    )


def _unused(used: set[str]) -> list[str]:
    """Return the other interfaces, except those with only link-local addresses."""
    return [
        f"{one.name} ({', '.join(addresses)})"
        for one in list_interfaces()
        if one.is_up and not one.is_loopback and one.name not in used
        if (addresses := [each for each in one.addresses if not each.startswith("fe80")])
    ]


def _mtu_of(interface: str) -> int:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker, _SIOCGIFMTU, struct.pack("40s", os.fsencode(interface)[:15]))
        return int(struct.unpack_from("i", answer, 16)[0])
    return 0


def _version_of_torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def _key_digest() -> str:
    key = job_key(os.environ)
    return hmac.new(key, b"shoal check", hashlib.sha256).hexdigest()[:16] if key else "none"


def _free_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":") for line in lines)
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        return 0
