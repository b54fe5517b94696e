"""Hosts as network namespaces, each with one or several NICs on a switch.

    with Cluster(4, rate_mbit=1000) as cluster:
        cluster.run(0, ["ping", "-c1", cluster.hosts[3].address])

The switch is a bridge in a namespace of its own, so nothing of a cluster is seen by the machine's
own network and no packet leaves it. The names carry the process id: clusters of several processes
do not clash, and what a killed process left behind is recognised and removed by the next one.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from shoal.errors import Unsupported, UsageError

__all__ = ["BURST_BYTES", "INTERFACE", "Lab", "Host", "interface_of", "remove_stale"]

INTERFACE: Final = "eth0"  # the first NIC of every host, under this name in its namespace
_FIRST_NET: Final = 77  # 10.77.0.0/24 in every cluster: they cannot see each other
_PREFIX: Final = "shoal-lab"
_NAMESPACES: Final = Path("/run/netns")  # where `ip netns` keeps the names
_MAX_HOSTS: Final = 200

# The kernel hands a queue up to 64 KiB of one connection as one packet, and tbf cuts in pieces what
# is larger than the burst, at a cost. On 2 cores at 1 Gbit/s one stream reached 956 Mbit/s (all
# that TCP can) and four at once 940 with 96 KiB or more; with 64 KiB 745 and 340. A larger burst is
# only a longer moment above the rate: 128 KiB is 1 ms of it.
BURST_BYTES: Final = 128 * 1024

# What waits in front of a NIC before packets are lost: 8 ms at 1 Gbit/s, about what a shallow
# switch gives one port. From 256 KiB to 4 MiB one stream and a ring of four ran equally fast.
_LIMIT_BYTES: Final = 1024 * 1024

# What a message between two hosts takes besides its bytes: on the way, and a core of each end.
_MESSAGE: Final = "10us,16us"

_NOBODY: Final = "02:00:00:00:00:01"  # a locally administered address

_serials = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host of a cluster: its network namespace, and its address at each of its NICs."""

    index: int
    namespace: str
    addresses: tuple[str, ...]

    @property
    def address(self) -> str:
        """That at the first NIC."""
        return self.addresses[0]


def interface_of(nic: int) -> str:
    """The name of a host's interface, by the number of its NIC."""
    return f"eth{nic}"


class Lab:
    """Hosts on one machine, on a switch; each NIC carries `rate_mbit` each way.

    Without a rate nothing is shaped: the cores of this machine are what limits the NICs.

    Leaving the context kills every process that still runs in a host and removes the hosts.

    Args:
        n_hosts: from 1 to 200, at addresses 10.77.0.1, 10.77.0.2 and so on.
        rate_mbit: megabits per second of the wire; headers count, so TCP carries 95.6 % of it.
            None: as much as the cores can move.
        more_mbit: the rates of further NICs of each host, each to a switch of its own: 10.78.0.1
            and so on at the second one.

    Raises (on entering, with nothing left behind):
        UsageError: not root, or no iproute2.
        Unsupported: the kernel lacks namespaces, bridges or tbf, or the container forbids them.
    """

    def __init__(
        self, n_hosts: int, rate_mbit: float | None = 1000, more_mbit: Sequence[float] = ()
    ) -> None:
        self._rates = (rate_mbit, *more_mbit)
        if not 1 <= n_hosts <= _MAX_HOSTS or any(r is not None and r <= 0 for r in self._rates):
            raise UsageError(
                f"a cluster of {n_hosts} hosts at {rate_mbit} Mbit/s: "
                f"expected 1 to {_MAX_HOSTS} hosts and a rate above 0"
            )
        name = f"{_PREFIX}-{os.getpid()}-{next(_serials)}"
        self.rate_mbit = rate_mbit
        self.hosts = tuple(
            Host(
                index,
                f"{name}-{index}",
                tuple(f"10.{_FIRST_NET + nic}.0.{index + 1}" for nic in range(self.n_nics)),
            )
            for index in range(n_hosts)
        )
        self._switch = f"{name}-switch"

    @property
    def environment(self) -> dict[str, str]:
        """What ranks in its hosts must be told: the interface, and what nobody can see of it.

        An interface of a namespace reports 10 Gbit/s however it is shaped, and all hosts share the
        cores of one machine.
        """
        names = ",".join(map(interface_of, range(self.n_nics)))
        told = {"SHOAL_SOCKET_IFNAME": names}
        if self.n_nics > 1:
            told["SHOAL_PATHS"] = str(self.n_nics)
        if self.rate_mbit is not None:
            rate_mbit = sum(rate for rate in self._rates if rate is not None)
            told["SHOAL_LINK"] = f"{rate_mbit:.10g}Mb,{_MESSAGE}"
        return told

    @property
    def n_nics(self) -> int:
        """How many each host has."""
        return len(self._rates)

    def __enter__(self) -> Lab:
        _check_powers()
        remove_stale()
        try:
            self._build_switch()
            for host in self.hosts:
                _ip("netns", "add", host.namespace)
                _ip("-n", host.namespace, "link", "set", "lo", "up")
                for nic in range(self.n_nics):
                    self._add_nic(host, nic)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs in a host, under the process id that Popen returns."""
        return ["ip", "netns", "exec", self.hosts[host].namespace, *argv]

    def run(
        self, host: int, argv: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` in a host, for text; raises CalledProcessError if it fails."""
        return subprocess.run(self.command(host, argv), check=True, text=True, **options)

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """`subprocess.Popen` in a host, for text. Killed with the cluster if it still runs."""
        return subprocess.Popen(self.command(host, argv), text=True, **options)

    def cut(self, source: int, to: int, nic: int = 0) -> None:
        """From now on, all that one host sends to another by a NIC is lost in silence."""
        # To a station that does not exist: the bridge floods it, and nobody takes it.
        self._neighbour("replace", source, to, nic, "lladdr", _NOBODY, "nud", "permanent")

    def mend(self, source: int, to: int, nic: int = 0) -> None:
        """Undo `cut`: the next packet finds its way."""
        self._neighbour("del", source, to, nic)

    def _neighbour(self, what: str, source: int, to: int, nic: int, *how: str) -> None:
        address, outlet = self.hosts[to].addresses[nic], interface_of(nic)
        where = ("-n", self.hosts[source].namespace)
        _ip(*where, "neigh", what, address, "dev", outlet, *how)

    def close(self) -> None:
        """Kill what runs in the hosts and remove them. Idempotent."""
        for namespace in (*(host.namespace for host in self.hosts), self._switch):
            _remove(namespace)

    def _build_switch(self) -> None:
        _ip("netns", "add", self._switch)
        for nic in range(self.n_nics):
            _ip("-n", self._switch, "link", "add", f"bridge{nic}", "type", "bridge")
            _ip("-n", self._switch, "link", "set", f"bridge{nic}", "up")

    def _add_nic(self, host: Host, nic: int) -> None:
        inside, outlet, port = host.namespace, interface_of(nic), f"port{host.index}-{nic}"
        rate_mbit = self._rates[nic]
        veth = ("link", "add", outlet, "type", "veth", "peer", "name", port)
        _ip("-n", inside, *veth, "netns", self._switch)
        _ip("-n", inside, "addr", "add", f"{host.addresses[nic]}/24", "dev", outlet)
        _ip("-n", self._switch, "link", "set", port, "master", f"bridge{nic}")
        # tbf shapes what leaves an interface: one end limits what the host sends, the other what it
        # is sent.
        for namespace, interface in ((inside, outlet), (self._switch, port)):
            if rate_mbit is not None:
                _shape(namespace, interface, rate_mbit)
            _ip("-n", namespace, "link", "set", interface, "up")


def remove_stale() -> None:
    """Remove the clusters of processes that are gone, and kill what still runs in them."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*"):
        found = re.match(rf"{_PREFIX}-(\d+)-", path.name)
        if found and not Path("/proc", found[1]).exists():
            _remove(path.name)


def _check_powers() -> None:
    if os.geteuid() != 0:
        raise UsageError("a cluster of network namespaces needs root: run it with sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not found: install iproute2")


def _remove(namespace: str) -> None:
    if not (_NAMESPACES / namespace).exists():
        return
    # The namespace itself would live on with its last process. Only the cluster's own run there.
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    # Another process may be removing the same stale one; then it is gone, which is all we want.
    with suppress(Unsupported):
        _ip("netns", "delete", namespace)


def _shape(namespace: str, interface: str, rate_mbit: float) -> None:
    rate = ("rate", f"{rate_mbit * 1000:.0f}kbit")
    sizes = ("burst", f"{BURST_BYTES}b", "limit", f"{_LIMIT_BYTES}b")
    _call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *rate, *sizes)


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unsupported(
            f"`{' '.join(argv)}` failed: {done.stderr.strip()}. A cluster needs a kernel with "
            "network namespaces, veth, bridge and tbf, and a container that may use them"
        )
    return done.stdout
