"""The options of `shoal server`: its addresses, and the keys of the jobs that it serves."""

from __future__ import annotations

import os
import socket
from typing import Final, NamedTuple

from shoal.errors import UsageError
from shoal.group.pool.addresses import parse_address
from shoal.group.pool.protocol import DEFAULT_PORT, key_id, server_key
from shoal.rendezvous.interface import describe, list_interfaces, resolve
from shoal.rendezvous.key import job_key
from shoal.rendezvous.listener import listen_tcp

LEAST_MEMORY_BYTES: Final = 64 << 20


class JobKey(NamedTuple):
    """A key whose holders may use the server: its file, which children read again, and its proof.

    `number` is its `protocol.key_id`, by which callers name it.
    """

    path: str
    number: int
    proof: bytes


def key_of(path: str) -> bytes:
    """Return the key in the file of `--key-file`; UsageError if it is unusable."""
    try:
        key = job_key({"SHOAL_KEY_FILE": path})
    except UsageError as error:
        raise UsageError(str(error).replace("SHOAL_KEY_FILE=", "--key-file ")) from None
    if key is None:
        raise UsageError("--key-file is empty: name the file of a job's key")
    return key


def keys_of(paths: list[str]) -> list[JobKey]:
    """Return the keys in these files; UsageError if one is unusable, or two are the same."""
    found: dict[int, JobKey] = {}
    for path in paths:
        key = key_of(path)
        number = key_id(key)
        if number in found:
            raise UsageError(f"--key-file {found[number].path} and {path} hold the same key")
        found[number] = JobKey(os.path.abspath(path), number, server_key(key))
    return list(found.values())


def listen(where: str, port: int = DEFAULT_PORT) -> list[socket.socket]:
    """Listen at `--listen`, an interface or an address, optionally with a port.

    Raises:
        UsageError: this host has no such interface or address, or the port is taken; the message
            lists the interfaces.
    """
    where, port = parse_address(where, "--listen", port, least=0)
    interfaces = list_interfaces()
    named = next((one for one in interfaces if one.name == where), None)
    known = describe(interfaces)
    if named is not None:
        addresses = [one for one in named.addresses if not one.startswith("fe80")]
        if not addresses:
            raise UsageError(
                f"--listen {where}: this interface has only link-local addresses; give it another "
                f"address, or name another interface ({known})"
            )
    else:
        try:
            addresses = resolve(where)
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"--listen {where} is not an interface of this host, and does not resolve "
                f"({error}); the interfaces are {known}"
            ) from error
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            listeners.append(listen_tcp(address, (port,)))
            port = listeners[0].getsockname()[1]  # for port 0: the same port for all
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise UsageError(
            f"--listen {where}, port {port}: {error.strerror}. Give an address of this host "
            f"({known}), and a free port (`ss -ltnp sport = :{port}` shows who uses this one)"
        ) from error
    return listeners
