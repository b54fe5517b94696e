"""The times measured by `shoal tune`, and their file.

A file has lines of JSON. The first describes the cluster, with the links between hosts, if any, as
in `SHOAL_LINK`. Each other line has the times of a collective at one size, in microseconds by
algorithm:

    {"shoal_tuning": 1, "hosts": [0, 0, 1, 1], "n_cores": 2, "link": "941Mb,57us,16us"}
    {"collective": "all_reduce", "n_bytes": 1024, "us": {"direct": 12.5, "ring": 31.0}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from shoal.errors import UsageError
from shoal.plan.choose import Choice
from shoal.plan.text import show_bytes, show_us
from shoal.plan.wire import link_of, link_text
from shoal.schedule import find

if TYPE_CHECKING:
    from shoal.plan.cluster import LinkCost

_T = TypeVar("_T")
_VERSION: Final = 1
# The nearest measured size counts; beyond this factor the model chooses.
_REACH: Final = 4

Times = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Microseconds by collective, size in bytes and algorithm."""


class Tuning(NamedTuple):
    """Measured times of a cluster.

    Args:
        hosts: the host of every rank, numbered from 0 in order of first appearance.
        n_cores: the cores of each host.
        path: the file, for messages.
        digest: a digest of the file, for ranks to compare.
        link: the measured cost of a link between hosts; None: not measured.
    """

    hosts: tuple[int, ...]
    n_cores: int
    times: Times
    path: str = ""
    digest: int = 0
    link: LinkCost | None = None

    def choose(self, collective: str, n_bytes: int) -> Choice | None:
        """Return the fastest measured algorithm; None if no size nearby was measured."""
        sizes = self.times.get(collective, {})
        near = [n for n in sizes if n <= max(1, n_bytes) * _REACH and n_bytes <= n * _REACH]
        if not near:
            return None
        nearest = min(near, key=lambda n: (max(n, n_bytes) / max(1, min(n, n_bytes)), n))
        times = sizes[nearest]
        ranked = sorted(times, key=lambda name: (times[name], name))
        each = ", ".join(f"{name} {show_us(times[name])}" for name in ranked)
        why = f"measured at {show_bytes(nearest)} over {len(self.hosts)} ranks: {each}"
        return Choice(ranked[0], times[ranked[0]], why)

    def differs_from(self, hosts: Sequence[int], n_cores: int) -> str:
        """Return the difference between the measured cluster and these hosts; empty if equal."""
        if self.hosts != tuple(hosts):
            return f"it is for {_hosts_text(self.hosts)}, this group is {_hosts_text(hosts)}"
        if self.n_cores != n_cores:
            return f"it is for hosts with {self.n_cores} cores, these have {n_cores}"
        return ""

    def write(self, path: Path) -> None:
        """Write the file; UsageError if that fails."""
        head = {"shoal_tuning": _VERSION, "hosts": self.hosts, "n_cores": self.n_cores}
        if self.link is not None:
            head["link"] = link_text(self.link)
        lines = [json.dumps(head)]
        for collective, sizes in self.times.items():
            for n_bytes, times in sizes.items():
                us = {name: round(time, 2) for name, time in times.items()}
                line = {"collective": collective, "n_bytes": n_bytes, "us": us}
                lines.append(json.dumps(line))
        try:
            path.write_text("\n".join(lines) + "\n", encoding="ascii")
        except OSError as error:
            raise UsageError(f"cannot write the tuning file {path}: {error.strerror}") from None


def read_tuning(path: Path) -> Tuning:
    """Read a file that `Tuning.write` wrote; UsageError names a wrong line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the tuning file {path}: {error.strerror}") from None
    lines = content.splitlines() or [b""]
    hosts, n_cores, link = _parsed(path, 1, lines[0], _head)
    times: dict[str, dict[int, dict[str, float]]] = {}
    for number, line in enumerate(lines[1:], 2):
        collective, n_bytes, us = _parsed(path, number, line, _measured)
        times.setdefault(collective, {})[n_bytes] = us
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
    return Tuning(hosts, n_cores, times, str(path), digest, link)


def _parsed(path: Path, number: int, line: bytes, parse: Callable[[Any], _T]) -> _T:
    try:
        return parse(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"the tuning file {path} is wrong in line {number}: {what}; "
            "write it again with `shoal tune`"
        ) from None


def _head(fields: Any) -> tuple[tuple[int, ...], int, LinkCost | None]:
    if fields["shoal_tuning"] != _VERSION:
        raise ValueError(f"version {fields['shoal_tuning']!r}, this shoal reads {_VERSION}")
    hosts, n_cores = fields["hosts"], fields["n_cores"]
    if not hosts or not all(isinstance(host, int) and host >= 0 for host in hosts):
        raise ValueError(f"hosts {hosts!r} are not numbers of hosts")
    if not isinstance(n_cores, int) or n_cores < 1:
        raise ValueError(f"n_cores {n_cores!r} is not a number of cores")
    link = fields.get("link")
    return tuple(hosts), n_cores, None if link is None else link_of(link)


def _measured(fields: Any) -> tuple[str, int, dict[str, float]]:
    collective, n_bytes, us = fields["collective"], fields["n_bytes"], fields["us"]
    if not isinstance(n_bytes, int) or n_bytes < 0:
        raise ValueError(f"n_bytes {n_bytes!r} is not a number of bytes")
    if not us:
        raise ValueError("no algorithm was measured")
    for name, time in us.items():
        find(collective, name)
        if not isinstance(time, (int, float)) or not 0 < time < float("inf"):
            raise ValueError(f"{time!r} is not a number of microseconds")
    return collective, n_bytes, {name: float(time) for name, time in us.items()}


def _hosts_text(hosts: Sequence[int]) -> str:
    n_hosts = len(set(hosts))
    ranks = f"{len(hosts)} rank{'s' * (len(hosts) > 1)}"
    if n_hosts == 1:
        return f"{ranks} in one host"
    counts = [list(hosts).count(host) for host in range(min(n_hosts, 8))]
    each = ", ".join(map(str, counts)) + ", ..." * (n_hosts > 8)
    return f"{ranks} on {n_hosts} hosts ({each})"
