"""Chooses the address of this host to which other hosts should connect.

In this order: the interface named by `SHOAL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME` or
`NCCL_SOCKET_IFNAME`; else the address from which this host reaches the master; else, if no master
is known, the address on its default route, or of its only interface. Loopback is advertised only if
it was named or if the master has a literal loopback address: advertising 127.0.0.1 by accident is
the usual reason why such a mesh fails to connect.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from shoal.errors import UsageError

_VARIABLES: Final = ("SHOAL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # linux/sockios.h
_N_IFREQ_BYTES: Final = 40
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8  # linux/if.h
_LOOPBACK_NAMES: Final = ("localhost", "ip6-localhost")
# Documentation addresses (RFC 5737, RFC 3849): only their routes are looked up; nothing is sent.
_SOMEWHERE: Final = ("192.0.2.1", "2001:db8::1")
# By master, this host's address on the route there. A later look needs no lookup of the name, which
# may vanish with rank 0's host while the other ranks go on.
_routes: dict[str, str] = {}


class Interface(NamedTuple):
    """A network interface of this host, with its IPv4 addresses, then its IPv6 addresses."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool = True
    is_loopback: bool = False


class Advertised(NamedTuple):
    """The address to bind and to publish, and the reason for the choice."""

    address: str
    interface: str
    why: str


def choose_address(
    master_addr: str | None = None, environ: Mapping[str, str] = os.environ
) -> Advertised:
    """Return the address at which other hosts should connect to this process.

    Raises UsageError, which lists the interfaces, for an interface that does not exist or has no
    address, a master's name that does not resolve, or a missing route.
    """
    return choose_addresses(1, master_addr, environ)[0]


def choose_addresses(
    n_paths: int, master_addr: str | None = None, environ: Mapping[str, str] = os.environ
) -> list[Advertised]:
    """Return the address for each of several paths, taking the named interfaces in turn."""
    found = list_interfaces()
    for variable in _VARIABLES:
        if environ.get(variable):
            named = _named(variable, environ[variable], found, master_addr)
            return [named[path % len(named)] for path in range(n_paths)]
    return [_routed(found, master_addr)] * n_paths


def _routed(found: list[Interface], master_addr: str | None) -> Advertised:
    address = _address_towards(master_addr, found) if master_addr else None
    if address and master_addr and (not is_loopback(address) or names_loopback(master_addr)):
        return Advertised(address, _name_of(address, found), f"the route to {master_addr}")
    # No master is known, or it is this host and /etc/hosts maps its name to 127.0.1.1 (Debian), so
    # it does not show which address other hosts can reach.
    address, why = routed_address(), "the default route"
    if address is None:
        address, why = only_address(found), "the only interface"
    if address is None:
        raise UsageError(
            "this host has no default route, so the address to give to other hosts is unclear: "
            f"set SHOAL_SOCKET_IFNAME to one of {describe(found)}"
        )
    return Advertised(address, _name_of(address, found), why)


def list_interfaces() -> list[Interface]:
    """Return every interface with an address in this process's network namespace."""
    v6 = _ipv6_addresses()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        v4 = _ipv4_addresses(asker)
        for _, name in socket.if_nameindex():
            flags = struct.unpack_from("<H", _ask(asker, _SIOCGIFFLAGS, name), 16)[0]
            addresses = v4.get(name, []) + v6.get(name, [])
            if addresses:
                is_up, is_lo = bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK)
                found.append(Interface(name, tuple(addresses), is_up, is_lo))
    return found


def resolve(host: str) -> list[str]:
    """Return the numeric addresses of a host, each once; OSError or UnicodeError if it has none."""
    return list(dict.fromkeys(str(target[0]) for *_, target in _targets(host)))


def _targets(host: str) -> list[tuple[Any, ...]]:
    """Look a host up, but do not load the IDNA codec for names that do not need it."""
    name = host.encode() if host.isascii() else host
    return list(socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM))


def routed_address() -> str | None:
    """Return the source address of the default route; None without one, and never loopback."""
    for somewhere in _SOMEWHERE:
        try:
            address = _source_towards(somewhere)
        except UsageError:
            continue
        if not is_loopback(address):
            return address
    return None


def only_address(found: list[Interface]) -> str | None:
    """Return the address of the only interface that leads to other hosts; None for 0 or several."""
    outward = [one for one in found if one.is_up and not one.is_loopback]
    addresses = [next(filter(_is_reachable, one.addresses), None) for one in outward]
    return addresses[0] if len(addresses) == 1 else None


def is_numeric(address: str) -> bool:
    """Return True for an IPv4 or IPv6 address, False for a name."""
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return True for a numeric loopback address."""
    return address.startswith("127.") or address == "::1"


def names_loopback(host: str) -> bool:
    """Return True for a loopback address or localhost, but not for names that resolve to one."""
    return is_loopback(host) or host in _LOOPBACK_NAMES or host.startswith("localhost.")


def within_host(address: str) -> str:
    """Return a sentence that only its own host can reach a store at this loopback address."""
    return f"a store at the loopback address {address} can be reached from its own host only"


def _named(
    variable: str, wanted: str, found: list[Interface], master_addr: str | None
) -> list[Advertised]:
    """Return an address of each interface that the variable selects, best first."""
    usable = [one for one in found if any(map(_is_reachable, one.addresses))]
    matches = _matching(wanted, usable)
    # NCCL and Gloo may share their variables with hosts that have only some of the interfaces.
    unknown = _unmatched(wanted, usable) if variable == _VARIABLES[0] else []
    if unknown or not matches:
        raise UsageError(
            f"{variable}={wanted}: no network interface of this host with an address matches "
            f"{' or '.join(unknown) or 'it'}; this host has {describe(found)}"
        )
    # All ranks should use the master's address family; IPv4 if that is unknown.
    wants_v6 = master_addr is not None and ":" in master_addr
    chosen = []
    for match in matches:
        addresses = [address for address in match.addresses if _is_reachable(address)]
        best = next((one for one in addresses if (":" in one) == wants_v6), addresses[0])
        chosen.append(Advertised(best, match.name, f"{variable}={wanted}"))
    return chosen


def _matching(wanted: str, found: list[Interface]) -> list[Interface]:
    """Return the interfaces selected by NCCL's syntax, best first: `eth,ib`, `=eth0`, `^docker`."""
    excludes = wanted.startswith("^")
    rest = wanted.removeprefix("^")
    is_exact = rest.startswith("=")
    patterns = [pattern.strip() for pattern in rest.removeprefix("=").split(",") if pattern.strip()]

    def matches(one: Interface, pattern: str) -> bool:
        return one.name == pattern or (not is_exact and one.name.startswith(pattern))

    if excludes:
        eligible = [one for one in found if one.is_up and not one.is_loopback]
        return [one for one in eligible if not any(matches(one, pattern) for pattern in patterns)]
    chosen = []
    for pattern in patterns:  # `eth1` means eth1, and eth10 only if there is no eth1
        named = [one for one in found if one.name == pattern]
        chosen += named or [one for one in found if matches(one, pattern)]
    return chosen


def _unmatched(wanted: str, found: list[Interface]) -> list[str]:
    """Return the listed names that match no interface; an empty list for an exclusion (^)."""
    if wanted.startswith("^"):
        return []
    exact = "=" if wanted.startswith("=") else ""
    names = map(str.strip, wanted.removeprefix("=").split(","))
    return [name for name in names if name and not _matching(exact + name, found)]


def _address_towards(master_addr: str, found: list[Interface]) -> str:
    known = _routes.get(master_addr)
    if known is None or all(known not in one.addresses for one in found):
        known = _routes[master_addr] = _source_towards(master_addr)
    return known


def _source_towards(host: str) -> str:
    """Return the local address of the route to a host. Sends nothing: connect looks it up."""
    try:
        targets = _targets(host)
    except OSError as error:
        raise UsageError(
            f"MASTER_ADDR={host} does not resolve on this host ({error}): set it to a name or "
            "address that every rank can reach"
        ) from error
    found = [_source(family, target) for family, _, _, _, target in targets]
    sources = [address for address in found if address is not None]
    if sources:
        # /etc/hosts may map this host's own name to 127.0.1.1 and to a real address.
        return next((one for one in sources if not is_loopback(one)), sources[0])
    raise UsageError(
        f"this host has no route to MASTER_ADDR={host}: set SHOAL_SOCKET_IFNAME to the interface "
        "that the ranks share"
    )


def _source(family: socket.AddressFamily, target: tuple[Any, ...]) -> str | None:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
    return None


def _ask(asker: socket.socket, request: int, name: str) -> bytes:
    """Return the kernel's answer to one `struct ifreq`; zeros if the request fails."""
    blank = struct.pack(f"{_N_IFREQ_BYTES}s", os.fsencode(name)[:15])
    try:
        return fcntl.ioctl(asker, request, blank)
    except OSError:
        return bytes(len(blank))


def _ipv4_addresses(asker: socket.socket) -> dict[str, list[str]]:
    """Return the IPv4 addresses by interface, also secondary ones."""
    found: dict[str, list[str]] = {}
    answers = array.array("B", bytes(1024 * _N_IFREQ_BYTES))
    question = struct.pack("iP", len(answers), answers.buffer_info()[0])  # struct ifconf
    with contextlib.suppress(OSError):
        n_bytes, _ = struct.unpack("iP", fcntl.ioctl(asker, _SIOCGIFCONF, question))
        for at in range(0, n_bytes, _N_IFREQ_BYTES):
            name, address = struct.unpack_from("16s4x4s", answers, at)
            label = os.fsdecode(name.partition(b"\0")[0])  # eth0, or eth0:1
            found.setdefault(label.partition(":")[0], []).append(
                socket.inet_ntop(socket.AF_INET, address)
            )
    return found


def _ipv6_addresses() -> dict[str, list[str]]:
    """Return IPv6 addresses by interface; lines begin with an address and end with the name."""
    found: dict[str, list[str]] = {}
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as lines:
            for line in lines:
                digits, *_, name = line.split()
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
                found.setdefault(name, []).append(address)
    except OSError:
        pass  # a kernel without IPv6
    return found


def _is_reachable(address: str) -> bool:
    """Return False for link-local IPv6, which needs a scope that is valid only on its own host."""
    return not address.startswith("fe80")


def _name_of(address: str, found: list[Interface]) -> str:
    return next((one.name for one in found if address in one.addresses), "an unnamed interface")


def describe(found: list[Interface]) -> str:
    """Return the names and addresses of these interfaces; "none" if there are none."""
    return ", ".join(f"{one.name} ({', '.join(one.addresses)})" for one in found) or "none"
