"""Hosts as network namespaces, each with one or several NICs on a switch.

    with Lab(4, rate_mbit=1000) as cluster:
        cluster.run(0, ["ping", "-c1", cluster.hosts[3].address])

The switch is a bridge in its own namespace, so a cluster does not touch the machine's network and
no packet leaves it. Clusters of several processes do not clash. The next cluster recognises and
removes the remains of a killed process (names.py).
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shoal.errors import Unsupported, UsageError
from shoal.lab.names import (
    check_name,
    check_powers,
    ip,
    namespaces,
    prefix_of,
    remove,
    remove_stale,
    tc,
    write_hosts,
)

INTERFACE: Final = "eth0"  # the first NIC of every host, under this name in its namespace
_FIRST_NET: Final = 77  # 10.77.0.0/24 in every cluster: they cannot see each other
_MOST_HOSTS: Final = 200
_MOST_NICS: Final = 8  # as many connections as two ranks may have
# Below, a burst would last a second or more; above, no core of today keeps up.
_LEAST_MBIT: Final = 1
_MOST_MBIT: Final = 100_000

# The token bucket that keeps a NIC to its rate, each way: the burst passes at once after a pause.
# The kernel queues up to 64 KiB of one connection as one packet, and tbf cuts packets larger than
# the burst, at a cost. On 2 cores at 1 Gbit/s one stream reached 956 Mbit/s (all that TCP can) and
# four at once 940 with 96 KiB or more; with 64 KiB 745 and 340. A larger burst only exceeds the
# rate for longer: 128 KiB for 1 ms.
BURST_BYTES: Final = 128 << 10
# The bytes that wait at a NIC, each way, before packets are lost: 8 ms at 1 Gbit/s, about the
# buffer of one port of a shallow switch. From 256 KiB to 4 MiB one stream and a ring of four ran
# equally fast.
_QUEUE_BYTES: Final = 1 << 20

# The latency of a message between two hosts, and the time of a core at each end.
_MESSAGE: Final = "10us,16us"

CONGESTION: Final = "cubic"
"""The congestion control of the hosts' TCP: Linux's default, NOT this machine's setting."""
_CONGESTIONS: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

_NOBODY: Final = "02:00:00:00:00:01"  # a locally administered address

_serials = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host of a cluster: its network namespace, and the address of each NIC."""

    index: int
    namespace: str
    addresses: tuple[str, ...]

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def name(self) -> str:
        """The name of its first address in every host of the cluster."""
        return f"host{self.index}"

    def cut(self, to: Host, nic: int = 0) -> None:
        """Silently drop all packets that this host sends to another by a NIC, until `heal`.

        Raises Unsupported if `ip` fails, and TimedOut if it does not end.
        """
        # They go to a MAC that does not exist: the bridge floods them, and no host accepts them.
        self._neighbour("replace", to, nic, "lladdr", _NOBODY, "nud", "permanent")

    def heal(self, to: Host, nic: int = 0) -> None:
        """Undo `cut` for all following packets; UsageError if this direction is not cut."""
        if _NOBODY not in self._neighbour("show", to, nic):
            raise UsageError(
                f"host {self.index} reaches host {to.index} by {interface_of(nic)}: "
                "nothing is cut there"
            )
        self._neighbour("del", to, nic)

    def _neighbour(self, what: str, to: Host, nic: int, *how: str) -> str:
        where = ("dev", interface_of(nic))
        return ip("-n", self.namespace, "neigh", what, to.addresses[nic], *where, *how)


def interface_of(nic: int) -> str:
    """Return the name of a NIC's interface."""
    return f"eth{nic}"


def address_of(host: int, nic: int = 0) -> str:
    """Return the address of a NIC: 10.77.0.1 and so on for the first, 10.78.0.1 for the second."""
    return f"10.{_FIRST_NET + nic}.0.{host + 1}"


class Lab:
    """Hosts on one machine, on a switch; each NIC carries `rate_mbit` each way.

    Without a rate nothing is shaped: only the cores of this machine limit the NICs.

    Leaving the context kills every process that still runs in a host and removes the hosts.

    Args:
        n_hosts: from 1 to 200, at addresses 10.77.0.1, 10.77.0.2 and so on.
        rate_mbit: megabits per second of the wire, from 1 to 100,000; headers count, so TCP carries
            95.6 % of it. None: unshaped.
        more_mbit: the rates of further NICs of each host, each on its own switch.
        apart: the rates of all NICs, by host, for hosts that differ from the others.
        name: its name for `shoal lab`; if empty, a name with the process id.
        congestion: the kernel's name of TCP's congestion control.

    Raises:
        UsageError: the number of hosts or NICs, a rate or the name is out of range.

    Raises (on entering, with nothing left behind):
        UsageError: not root, or no iproute2, or a lab of this name runs already, or the kernel
            does not have this congestion control.
        Unsupported: the kernel has no namespaces, bridges or tbf, or the container forbids them.
        TimedOut: `ip` or `tc` did not end. Hosts may be left behind, until the next lab.
    """

    def __init__(
        self,
        n_hosts: int,
        rate_mbit: float | None = 1000,
        more_mbit: Sequence[float | None] = (),
        *,
        apart: Mapping[int, Sequence[float | None]] | None = None,
        name: str = "",
        congestion: str = CONGESTION,
    ) -> None:
        self.name = name or f"{os.getpid()}.{next(_serials)}"
        check_name(self.name)
        self._congestion = congestion
        self.rates = _rates_of(n_hosts, (rate_mbit, *more_mbit), apart or {})
        prefix = prefix_of(self.name)
        self.hosts = tuple(
            Host(
                index,
                f"{prefix}-{index}",
                tuple(address_of(index, nic) for nic in range(len(rates))),
            )
            for index, rates in enumerate(self.rates)
        )
        self._switch = f"{prefix}-switch"

    def environment_of(self, host: int, job: Sequence[int] = ()) -> dict[str, str]:
        """Return variables for a process in a host: its interfaces and the rate of its link.

        An interface of a namespace always reports 10 Gbit/s, and all hosts share the cores of one
        machine. The ranks of a job, on the hosts `job` or on all, must agree about links, so all
        get the rate of the slowest host.
        """
        n_nics = len(self.rates[host])
        names = ",".join(map(interface_of, range(n_nics)))
        environ = {"SHOAL_SOCKET_IFNAME": names, "GLOO_SOCKET_IFNAME": INTERFACE}
        if n_nics > 1:
            environ["SHOAL_PATHS"] = str(n_nics)
        rates = [self.rates[other] for other in job or range(len(self.hosts))]
        shaped = [sum(filter(None, each)) for each in rates if None not in each]
        if shaped:
            environ["SHOAL_LINK"] = f"{min(shaped):.10g}Mb,{_MESSAGE}"
        return environ

    def __enter__(self) -> Lab:
        check_powers()
        remove_stale()
        for other in namespaces():
            if other.lab == self.name:
                raise UsageError(
                    f"a lab called {self.name} runs already (process {other.pid}): "
                    "choose another name, or end that one"
                )
        try:
            self._build_switch()
            names = _names_of(self.hosts)
            for host in self.hosts:
                ip("netns", "add", host.namespace)
                write_hosts(host.namespace, names)
                ip("-n", host.namespace, "link", "set", "lo", "up")
                for nic in range(len(host.addresses)):
                    self._add_nic(host, nic)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return a command that runs `argv` in a host, under the process id that Popen returns."""
        return ["ip", "netns", "exec", self.hosts[host].namespace, *argv]

    def run(
        self, host: int, argv: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Call `subprocess.run` in a host, for text; raises CalledProcessError if it fails."""
        return subprocess.run(self.command(host, argv), check=True, text=True, **options)

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Call `subprocess.Popen` in a host, for text; the cluster kills it at its end."""
        return subprocess.Popen(self.command(host, argv), text=True, **options)

    def pids(self, host: int) -> list[int]:
        """Return the ids of the processes that run in a host now."""
        return [int(pid) for pid in ip("netns", "pids", self.hosts[host].namespace).split()]

    def cut(self, source: int, to: int, nic: int = 0) -> None:
        """Silently drop all packets that one host sends to another by a NIC."""
        self.hosts[source].cut(self.hosts[to], nic)

    def heal(self, source: int, to: int, nic: int = 0) -> None:
        """Undo `cut` for all following packets; UsageError if this direction is not cut."""
        self.hosts[source].heal(self.hosts[to], nic)

    def close(self) -> None:
        """Kill all processes in the hosts and remove the hosts. Idempotent."""
        for namespace in (*(host.namespace for host in self.hosts), self._switch):
            remove(namespace)

    def _build_switch(self) -> None:
        ip("netns", "add", self._switch)
        for nic in range(max(map(len, self.rates))):
            ip("-n", self._switch, "link", "add", f"bridge{nic}", "type", "bridge")
            ip("-n", self._switch, "link", "set", f"bridge{nic}", "up")

    def _add_nic(self, host: Host, nic: int) -> None:
        inside, outlet, port = host.namespace, interface_of(nic), f"port{host.index}-{nic}"
        rate_mbit = self.rates[host.index][nic]
        veth = ("link", "add", outlet, "type", "veth", "peer", "name", port)
        ip("-n", inside, *veth, "netns", self._switch)
        ip("-n", inside, "addr", "add", f"{host.addresses[nic]}/24", "dev", outlet)
        ip("-n", self._switch, "link", "set", port, "master", f"bridge{nic}")
        # tbf shapes packets that leave an interface: one end limits sending, the other receiving.
        for namespace, interface in ((inside, outlet), (self._switch, port)):
            if rate_mbit is not None:
                _shape(namespace, interface, rate_mbit)
            ip("-n", namespace, "link", "set", interface, "up")
        # NOT by sysctl: /proc/sys may be read-only in a container.
        net, address = f"10.{_FIRST_NET + nic}.0.0/24", host.addresses[nic]
        route = ("route", "replace", net, "dev", outlet, "src", address)
        try:
            ip("-n", inside, *route, "congctl", self._congestion)
        except Unsupported:  # NOT checked first: the kernel may load a module for it
            known, name = _CONGESTIONS.read_text().split(), self._congestion
            if name in known:
                raise
            raise UsageError(
                f"this kernel has no congestion control {name!r}; use one of {', '.join(known)}, "
                f"or load its module (`modprobe tcp_{name}`)"
            ) from None


def _names_of(hosts: Sequence[Host]) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in hosts:
        # torch looks up names of IPv4 peers by mapped IPv6 addresses, and warns if there is none.
        lines += [f"{host.address} {host.name}", f"::ffff:{host.address} {host.name}.mapped"]
    return "".join(f"{line}\n" for line in lines)


def _rates_of(
    n_hosts: int, alike: Sequence[float | None], apart: Mapping[int, Sequence[float | None]]
) -> tuple[tuple[float | None, ...], ...]:
    if not 1 <= n_hosts <= _MOST_HOSTS:
        raise UsageError(f"a lab of {n_hosts} hosts: expected 1 to {_MOST_HOSTS} hosts")
    for index in apart:
        if not 0 <= index < n_hosts:
            raise UsageError(f"host {index} of a lab of {n_hosts}: they are 0 to {n_hosts - 1}")
    hosts = tuple(tuple(apart.get(index, alike)) for index in range(n_hosts))
    for index, rates in enumerate(hosts):
        if not 1 <= len(rates) <= _MOST_NICS:
            raise UsageError(f"host {index} has {len(rates)} NICs: expected 1 to {_MOST_NICS}")
        for rate_mbit in rates:
            if rate_mbit is not None and not _LEAST_MBIT <= rate_mbit <= _MOST_MBIT:
                raise UsageError(
                    f"a NIC of host {index} at {rate_mbit:g} Mbit/s: "
                    f"expected {_LEAST_MBIT} to {_MOST_MBIT} Mbit/s"
                )
    return hosts


def _shape(namespace: str, interface: str, rate_mbit: float) -> None:
    rate = ("rate", f"{rate_mbit * 1000:.0f}kbit")
    sizes = ("burst", f"{BURST_BYTES}b", "limit", f"{_QUEUE_BYTES}b")
    tc("-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *rate, *sizes)
