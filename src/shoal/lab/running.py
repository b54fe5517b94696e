"""Finds the labs that run on this machine by the names of their namespaces."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError
from shoal.lab.cluster import Host, address_of
from shoal.lab.names import Namespace, check_powers, ip, namespaces


@dataclass(frozen=True)
class RunningLab:
    """A lab of another process.

    Args:
        pid: the process that made the lab, which removes it when it ends.
        since_s: the age of that process.
        command: its command line.
    """

    name: str
    pid: int
    since_s: float
    command: str
    namespaces: tuple[str, ...]

    def host(self, index: int) -> Host:
        """Return one of its hosts; UsageError if no host has this number."""
        if not 0 <= index < len(self.namespaces):
            raise UsageError(
                f"lab {self.name} has no host {index}: they are 0 to {len(self.namespaces) - 1}"
            )
        inside = self.namespaces[index]
        n_nics = len(re.findall(r"^\d+: eth\d+@", ip("-n", inside, "-o", "link"), re.MULTILINE))
        return Host(index, inside, tuple(address_of(index, nic) for nic in range(n_nics)))


def running_labs() -> list[RunningLab]:
    """Return all running labs, the newest last."""
    hosts: dict[tuple[str, int, int], list[Namespace]] = {}
    for each in namespaces():
        if each.part != "switch" and not each.is_stale:
            hosts.setdefault((each.lab, each.pid, each.started), []).append(each)
    found = [
        RunningLab(
            name,
            pid,
            _seconds_since(started),
            _command_of(pid),
            tuple(one.full for one in sorted(each, key=lambda one: int(one.part))),
        )
        for (name, pid, started), each in hosts.items()
    ]
    return sorted(found, key=lambda lab: -lab.since_s)


def find_lab(name: str) -> RunningLab:
    """Return the lab of this name; UsageError lists the running labs if there is none."""
    check_powers()
    labs = running_labs()
    found = [lab for lab in labs if lab.name == name]
    if not found:
        others = ", ".join(lab.name for lab in labs) or "none"
        raise UsageError(f"no lab called {name!r} runs here; running: {others}")
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} labs called {name!r} were started at the same time: give them names"
        )
    return found[0]


def _seconds_since(started: int) -> float:
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, up_s - started / os.sysconf("SC_CLK_TCK"))


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it ended meanwhile
    return words.replace("\0", " ").strip()
