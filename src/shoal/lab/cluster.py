"""Hosts as network namespaces, each with one cable to a switch.

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

__all__ = ["BURST_BYTES", "INTERFACE", "Cluster", "Host", "remove_stale"]

INTERFACE: Final = "eth0"  # the one cable of every host, under this name in its namespace
_SUBNET: Final = "10.77.0"  # every cluster's: they cannot see each other
_PREFIX: Final = "shoal-lab"
_NAMESPACES: Final = Path("/run/netns")  # where `ip netns` keeps the names
_MAX_HOSTS: Final = 200

# The kernel hands a queue up to 64 KiB of one connection as one packet, and tbf cuts in pieces what
# is larger than the burst, at a cost. On 2 cores at 1 Gbit/s one stream reached 956 Mbit/s (all
# that TCP can) and four at once 940 with 96 KiB or more; with 64 KiB 745 and 340. A larger burst is
# only a longer moment above the rate: 128 KiB is 1 ms of it.
BURST_BYTES: Final = 128 * 1024

# What waits in front of a cable before packets are lost: 8 ms at 1 Gbit/s, about what a shallow
# switch gives one port. From 256 KiB to 4 MiB one stream and a ring of four ran equally fast.
_LIMIT_BYTES: Final = 1024 * 1024

# What a message between two hosts takes besides its bytes: on the way, and a core of each end.
_MESSAGE: Final = "10us,16us"

_serials = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host of a cluster: its network namespace and its address inside the cluster."""

    index: int
    namespace: str
    address: str


class Cluster:
    """Hosts on one machine, cabled to one switch; each cable carries `rate_mbit` each way.

    Without a rate nothing is shaped: the cores of this machine are what limits the cables.

    Leaving the context kills every process that still runs in a host and removes the hosts.

    Args:
        n_hosts: from 1 to 200, at addresses 10.77.0.1, 10.77.0.2 and so on.
        rate_mbit: megabits per second of the wire; headers count, so TCP carries 95.6 % of it.
            None: as much as the cores can move.

    Raises (on entering, with nothing left behind):
        UsageError: not root, or no iproute2.
        Unsupported: the kernel lacks namespaces, bridges or tbf, or the container forbids them.
    """

    def __init__(self, n_hosts: int, rate_mbit: float | None = 1000) -> None:
        if not 1 <= n_hosts <= _MAX_HOSTS or (rate_mbit is not None and rate_mbit <= 0):
            raise UsageError(
                f"a cluster of {n_hosts} hosts at {rate_mbit} Mbit/s: "
                f"expected 1 to {_MAX_HOSTS} hosts and a rate above 0"
            )
        name = f"{_PREFIX}-{os.getpid()}-{next(_serials)}"
        self.rate_mbit = rate_mbit
        self.hosts = tuple(
            Host(index, f"{name}-{index}", f"{_SUBNET}.{index + 1}") for index in range(n_hosts)
        )
        self._switch = f"{name}-switch"

    @property
    def environment(self) -> dict[str, str]:
        """What ranks in its hosts must be told: the interface, and what nobody can see of it.

        An interface of a namespace reports 10 Gbit/s however it is shaped, and all hosts share the
        cores of one machine.
        """
        told = {"SHOAL_SOCKET_IFNAME": INTERFACE}
        if self.rate_mbit is not None:
            told["SHOAL_LINK"] = f"{self.rate_mbit:.10g}Mb,{_MESSAGE}"
        return told

    def __enter__(self) -> Cluster:
        _check_powers()
        remove_stale()
        try:
            self._build_switch()
            for host in self.hosts:
                self._build_host(host)
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

    def close(self) -> None:
        """Kill what runs in the hosts and remove them. Idempotent."""
        for namespace in (*(host.namespace for host in self.hosts), self._switch):
            _remove(namespace)

    def _build_switch(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")

    def _build_host(self, host: Host) -> None:
        inside, port = host.namespace, f"port{host.index}"
        veth = ("link", "add", INTERFACE, "type", "veth", "peer", "name", port)
        _ip("netns", "add", inside)
        _ip("-n", inside, *veth, "netns", self._switch)
        _ip("-n", inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        _ip("-n", inside, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "set", port, "master", "bridge")
        # tbf shapes what leaves an interface: one end limits what the host sends, the other what it
        # is sent.
        for namespace, interface in ((inside, INTERFACE), (self._switch, port)):
            if self.rate_mbit is not None:
                _shape(namespace, interface, self.rate_mbit)
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
