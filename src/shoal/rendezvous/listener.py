"""Opens listening sockets, waits for sockets, and logs callers that were turned away."""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from shoal.errors import UsageError
from shoal.rendezvous.interface import Advertised, choose_addresses
from shoal.rendezvous.record import Endpoint
from shoal.settings import n_paths

if TYPE_CHECKING:
    from shoal import engine

_LOG: Final = logging.getLogger("shoal")
_LONGEST_WAIT_S: Final = 3600.0  # poll(2) counts milliseconds in 31 bits
# Every other rank may connect at once; the kernel caps this at net.core.somaxconn (4096 today).
_BACKLOG: Final = 1024


def listen_unix() -> tuple[socket.socket, str]:
    """Listen at a random name in the abstract namespace, which needs no file; return both."""
    name = f"shoal-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(unix_address(name))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener, name


def unix_address(name: str) -> bytes:
    """Return the abstract address of this name, which begins with a zero byte (unix(7))."""
    return b"\0" + os.fsencode(name)


def listen_for_hosts(
    who: str, master: str | None, ports: Iterable[int], environ: Mapping[str, str]
) -> tuple[list[socket.socket], list[Endpoint]]:
    """Listen on the interfaces that lead to other hosts; return an endpoint for each path too.

    `who` is for messages. `master` decides the interface, unless the environment does. UsageError
    names what to set.
    """
    found: dict[str, tuple[socket.socket, Endpoint]] = {}
    paths = choose_addresses(n_paths(environ), master, environ)
    try:
        for chosen in paths:
            if chosen.address not in found:
                found[chosen.address] = listen_at(who, chosen, ports, environ)
    except BaseException:
        for listener, _ in found.values():
            listener.close()
        raise
    return [listener for listener, _ in found.values()], [found[one.address][1] for one in paths]


def listen_at(
    who: str, chosen: Advertised, ports: Iterable[int], environ: Mapping[str, str]
) -> tuple[socket.socket, Endpoint]:
    """Listen at this address on one of these ports; return the endpoint too.

    `who` is for messages. UsageError names what to set; OSError if no descriptor is left.
    """
    try:
        listener = listen_tcp(chosen.address, ports)
    except OSError as error:
        if is_out_of_descriptors(error):
            raise
        named = environ.get("SHOAL_PORT_RANGE", "any port")
        raise UsageError(
            f"{who} cannot listen on {chosen.address} ({chosen.interface}, from "
            f"{chosen.why}), {named}: {error.strerror}. Widen SHOAL_PORT_RANGE, or set "
            "SHOAL_SOCKET_IFNAME to another interface"
        ) from error
    return listener, Endpoint(chosen.address, listener.getsockname()[1], chosen.interface)


def listen_tcp(address: str, ports: Iterable[int]) -> socket.socket:
    """Listen at this address on the first free port (0: any); OSError EADDRINUSE if none is."""
    failure = OSError(errno.EADDRINUSE, "no port is free")
    for port in ports:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Connections of an earlier group in TIME_WAIT must not block a port of a short range.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            failure = error
    raise failure


def hold_port() -> socket.socket:
    """Bind a free port of this host for a process that will listen on it.

    Until the caller closes the socket, only a listener with SO_REUSEADDR, such as `listen_tcp` and
    torch's store, can get the port; the kernel gives it to no other socket or connection.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def port_range(environ: Mapping[str, str]) -> Iterable[int]:
    """Return the ports of `SHOAL_PORT_RANGE=a-b`; (0,), any port, if unset; UsageError if wrong."""
    text = environ.get("SHOAL_PORT_RANGE", "")
    if not text:
        return (0,)
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high <= 65535:
        raise UsageError(
            f"SHOAL_PORT_RANGE={text!r} is not a range of ports; expected two numbers from 1 to "
            "65535, such as 29600-29699"
        )
    return range(low, high + 1)


def is_out_of_descriptors(error: OSError) -> bool:
    """Return True if the process (EMFILE) or the machine (ENFILE) has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def note_turned_away(n_so_far: int, caller: str) -> None:
    """Log a caller turned away for lack of a descriptor: the first, second, fourth and so on."""
    if n_so_far.bit_count() == 1:
        _LOG.warning(
            "process %d has no file descriptor left to take a connection, and turned away %d so "
            "far, the last from %s: if they are ranks of this job, they cannot join; raise "
            "`ulimit -n`",
            *(os.getpid(), n_so_far, caller),
        )


def run_ready(selector: selectors.BaseSelector, timeout_s: float) -> None:
    """Wait at most `timeout_s` for registered sockets, and call the callbacks of ready ones."""
    for key, _ in selector.select(None if timeout_s == float("inf") else max(0.0, timeout_s)):
        key.data()


def wait_for(endpoint: engine.Endpoint, until: float, waker: socket.socket | None = None) -> bool:
    """Wait until the endpoint's `step` is due, or `until`; return True if `waker` is readable."""
    wait_s = min(until, endpoint.deadline) - time.monotonic()
    ready = select.poll()
    ready.register(endpoint, select.POLLIN)
    if waker is not None:
        ready.register(waker, select.POLLIN)
    found = ready.poll(1000 * min(max(0.0, wait_s), _LONGEST_WAIT_S))
    return waker is not None and any(fd == waker.fileno() for fd, _ in found)
