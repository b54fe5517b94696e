"""`SHOAL_SERVERS` and `SHOAL_SERVERS_REQUIRED`: the addresses of a job's servers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from shoal.errors import UsageError
from shoal.group.pool.protocol import DEFAULT_PORT
from shoal.rendezvous.interface import is_numeric

MOST_SERVERS: Final = 1024
DEFAULT_JOB: Final = "none"
"""The id that torchrun gives a job without `--rdzv-id`."""
_SCHEME: Final = "rdzv://"


class Address(NamedTuple):
    """A server's host and port, as the user named them."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class JobEndpoint(NamedTuple):
    """A rendezvous store, and the job whose servers register there, by torchrun's `--rdzv-id`."""

    host: str
    port: int
    job: str

    def __str__(self) -> str:
        return f"{_SCHEME}{Address(self.host, self.port)}/{self.job}"


def parse_endpoint(text: str, job: str, what: str) -> JobEndpoint:
    """Parse the HOST:PORT of a store; UsageError if it or the job's id is malformed."""
    address = parse_address(text, what, 0)
    if not re.fullmatch(r"[!-~]{1,64}", job):
        raise UsageError(f"{what}: {job!r} is not an id: 1 to 64 printable characters, no spaces")
    return JobEndpoint(*address, job)


def endpoint_from(environ: Mapping[str, str]) -> JobEndpoint | None:
    """Return the store in `SHOAL_SERVERS`, `rdzv://HOST:PORT/ID`, or None; UsageError if wrong."""
    found = [name for name in _names(environ) if name.startswith(_SCHEME)]
    if len(found) > 1:
        raise UsageError(f"SHOAL_SERVERS names {len(found)} stores ({_SCHEME}...); name one")
    for name in found:
        where, _, job = name.removeprefix(_SCHEME).partition("/")
        if not where:
            raise UsageError(f"SHOAL_SERVERS={name} names no store: write {_SCHEME}HOST:PORT/ID")
        return parse_endpoint(where, job or DEFAULT_JOB, "SHOAL_SERVERS")
    return None


def _names(environ: Mapping[str, str]) -> list[str]:
    names = [part.strip() for part in environ.get("SHOAL_SERVERS", "").split(",")]
    return [name for name in names if name]


def parse_address(text: str, what: str, port: int = DEFAULT_PORT, least: int = 1) -> Address:
    """Parse HOST, HOST:PORT, an IPv6 ADDRESS or [ADDRESS]:PORT; UsageError names the setting.

    Args:
        port: if the text has none.
        least: the lowest port that is accepted.
    """
    match = re.fullmatch(r"\[([^\[\]]+)\](?::([0-9]{1,5}))?|([^:\[\]]+)(?::([0-9]{1,5}))?", text)
    if match is not None:
        found = Address(match[1] or match[3], int(match[2] or match[4] or port))
    elif is_numeric(text):  # IPv6, since others match
        found = Address(text, port)
    else:
        raise UsageError(f"{what}: {text!r} is not HOST, HOST:PORT or [ADDRESS]:PORT")
    if not least <= found.port <= 65535:
        raise UsageError(f"{what}: {text!r} has no port from {least} to 65535")
    return found


def servers_from(environ: Mapping[str, str]) -> tuple[Address, ...]:
    """Return the servers in `SHOAL_SERVERS`, such as `cpu1,cpu2:7077`; UsageError if wrong."""
    names = [name for name in _names(environ) if not name.startswith(_SCHEME)]
    found = [parse_address(name, "SHOAL_SERVERS") for name in names]
    for at, address in enumerate(found):
        if address in found[:at]:
            raise UsageError(f"SHOAL_SERVERS names {address} twice: name each server once")
    if len(found) > MOST_SERVERS:
        raise UsageError(f"SHOAL_SERVERS names {len(found)} servers; the limit is {MOST_SERVERS}")
    return tuple(found)


def n_required_from(environ: Mapping[str, str]) -> int:
    """Return `SHOAL_SERVERS_REQUIRED`, or 0; UsageError if `SHOAL_SERVERS` names fewer."""
    text = environ.get("SHOAL_SERVERS_REQUIRED", "") or "0"
    n_named = len(servers_from(environ)) if endpoint_from(environ) is None else MOST_SERVERS
    if not (text.isascii() and text.isdigit()) or int(text[:6]) > n_named:
        raise UsageError(
            f"SHOAL_SERVERS_REQUIRED={text!r} is not a number from 0 to {n_named}, the number of "
            "servers in SHOAL_SERVERS"
        )
    return int(text)
