"""Finds the labs that run on this machine by the names of their namespaces."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.lab.cluster import Host, address_of
from shoal.lab.names import check_powers, ip, namespaces


@dataclass(frozen=True)
class RunningLab:
    """A lab of another process, and the namespaces of its hosts."""

    name: str
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


def find_lab(name: str) -> RunningLab:
    """Return the lab of this name; UsageError lists the running labs if there is none."""
    check_powers()
    hosts = [one for one in namespaces() if one.part != "switch" and not one.is_stale]
    found = sorted((one for one in hosts if one.lab == name), key=lambda one: int(one.part))
    if not found:
        others = ", ".join(sorted({one.lab for one in hosts})) or "none"
        raise UsageError(f"no lab called {name!r} runs here; running: {others}")
    if (n := len({(one.pid, one.started) for one in found})) > 1:
        raise UsageError(f"{n} labs called {name!r} were started at the same time: give them names")
    return RunningLab(name, tuple(one.full for one in found))
