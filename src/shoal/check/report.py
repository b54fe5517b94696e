"""Reports the findings of a check: a table, a matrix and a list of changes to make."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.plan.text import counted, ranks_of, show_bytes, show_us
from shoal.rendezvous.interface import is_loopback

if TYPE_CHECKING:
    from shoal.check.facts import Facts
    from shoal.check.probe import Probe

_SLOW: Final = 0.5  # of the best rate; lower rates are reported
_SKEW_S: Final = 2.0  # of clocks; above it the logs of hosts cannot be compared
_FREE_BYTES: Final = 1 << 30


class Findings(NamedTuple):
    """All data that ranks published and measured."""

    ranks: list[Facts]
    missing: list[int]
    """Ranks that did not arrive."""
    probes: dict[tuple[int, int], list[Probe]]
    """One probe for each path of the answerer, by the ranks of prober and answerer."""

    @property
    def hosts(self) -> list[Facts]:
        """The lowest rank of each host."""
        first: dict[str, Facts] = {}
        for one in self.ranks:
            first.setdefault(one.host_id, one)
        return list(first.values())

    def text(self) -> str:
        """Return the whole report."""
        lines = [f"{counted(len(self.ranks), 'rank')} on {counted(len(self.hosts), 'host')}", ""]
        lines += _columns(list(self._table()))
        if len(self.hosts) > 1:
            for index in range(max(len(host.paths) for host in self.hosts)):
                lines += ["", *_columns(list(self._matrix(index)))]
        problems = list(self.problems())
        lines += ["", *(f"- {problem}" for problem in problems)]
        return "\n".join([*lines, "" if problems else "Nothing to change.", ""])

    def problems(self) -> Iterator[str]:
        """Yield each failure or difference, and the remedy."""
        if self.missing:
            yield (
                f"{ranks_of(self.missing)} did not arrive: check that each is started, and can "
                "reach rank 0's store"
            )
        yield from self._differences()
        for (prober, answerer), probes in sorted(self.probes.items()):
            for probe in probes:
                if probe.error:
                    yield f"{self._name(prober)} to {self._name(answerer)}: {probe.error}"
        yield from self._unreached()
        yield from self._narrow()
        yield from self._unmeasured()
        yield from self._slow()
        yield from self._of_hosts()

    def _differences(self) -> Iterator[str]:
        """Yield differences in values that must be equal on all ranks."""
        for what, advice in (
            ("shoal", "install one version everywhere"),
            ("torch", "install one version everywhere"),
            ("key", "SHOAL_KEY_FILE (or SHOAL_KEY) must hold one key on every rank"),
        ):
            values = {str(getattr(one, what)): one for one in reversed(self.ranks)}
            if len(values) > 1:
                yield f"{what} differs ({self._by_value(values)}): {advice}"
        for name in sorted({name for one in self.ranks for name in one.settings}):
            values = {one.settings.get(name, "unset"): one for one in reversed(self.ranks)}
            if len(values) > 1:
                yield f"{name} differs ({self._by_value(values)}): set the same value on every rank"
        mtus = {str(path.mtu): host for host in reversed(self.hosts) for path in host.paths}
        if len(mtus) > 1:
            yield (
                f"the MTU differs ({self._by_value(mtus)}): large packets of one host may not "
                "reach another"
            )

    def _by_value(self, values: dict[str, Facts]) -> str:
        return ", ".join(
            f"{value} on {self._name(one.rank)}" for value, one in sorted(values.items())
        )

    def _unmeasured(self) -> Iterator[str]:
        ranks = [host.rank for host in self.hosts]
        for prober in ranks:
            for answerer in ranks:
                if prober != answerer and (prober, answerer) not in self.probes:
                    names = self._name(prober), self._name(answerer)
                    yield f"{names[0]} to {names[1]}: not measured, the rank has ended"

    def _unreached(self) -> Iterator[str]:
        """Yield the hosts that no other host reaches, if they have other interfaces."""
        for host in self.hosts:
            ways = [probes for (_, to), probes in self.probes.items() if to == host.rank]
            if ways and host.unused and all(probe.error for probes in ways for probe in probes):
                yield (
                    f"{self._name(host.rank)}: no host reaches it at {host.paths[0].interface}; it "
                    f"also has {', '.join(host.unused)}: name another in SHOAL_SOCKET_IFNAME"
                )

    def _narrow(self) -> Iterator[str]:
        """Yield the routes on which packets must be smaller than both interfaces allow."""
        for (prober, answerer), probes in sorted(self.probes.items()):
            ends = self._facts(prober).paths, self._facts(answerer).paths
            interfaces = min(max(path.mtu for path in paths) for paths in ends)
            if 0 < (mtu := max(probe.mtu for probe in probes)) < interfaces:
                yield (
                    f"{self._name(prober)} to {self._name(answerer)}: packets have at most {mtu} "
                    f"bytes, but the interfaces allow {interfaces}: a router or a tunnel between "
                    "them does not; give the interfaces its MTU"
                )

    def _slow(self) -> Iterator[str]:
        """Yield the hosts, then the single routes, that are much slower than the fastest route."""
        ways = {
            way: max(probe.rate for probe in probes)
            for way, probes in self.probes.items()
            if any(probe.rate for probe in probes)
        }
        best = max(ways.values(), default=0.0)
        ends = [host.rank for host in self.hosts if any(host.rank in way for way in ways)]
        by_host = {end: max(rate for way, rate in ways.items() if end in way) for end in ends}
        for rank, rate in by_host.items():
            if rate < _SLOW * best:
                yield (
                    f"{self._name(rank)}: {show_rate(rate)} at most, but others reach "
                    f"{show_rate(best)}: look at its cable, its port and their duplex"
                )
        for (prober, answerer), rate in sorted(ways.items()):
            if rate < _SLOW * min(by_host[prober], by_host[answerer]):
                yield (
                    f"{self._name(prober)} to {self._name(answerer)}: {show_rate(rate)}, less than "
                    "half of their rates with others: other traffic, or a slow switch between them"
                )

    def _of_hosts(self) -> Iterator[str]:
        """Yield the problems of single hosts."""
        needed = 64 + 8 * (len(self.ranks) + len(self.missing))
        for host in self.hosts:
            name = self._name(host.rank)
            for path in host.paths:
                if is_loopback(path.address) and len(self.hosts) > 1:
                    yield (
                        f"{name} can be reached at {path.address} only ({path.why}): set "
                        "SHOAL_SOCKET_IFNAME to an interface that the others reach"
                    )
            if host.n_files < needed:
                yield f"{name} may open {host.n_files} files; raise `ulimit -n` to {needed}"
            if 0 < host.free_bytes < _FREE_BYTES:
                yield f"{name} has {show_bytes(host.free_bytes)} of memory left"
            skews = [
                probe.ahead_s
                for (_, answerer), probes in self.probes.items()
                for probe in probes
                if answerer == host.rank and not probe.error
            ]
            if skews and abs(skew := statistics.median(skews)) > _SKEW_S:
                yield f"{name}: its clock is {skew:+.1f} s from the others': start chrony or ntpd"
        if len(self.hosts) > 1 and any(one.key == "none" for one in self.ranks):
            yield (
                "there is no key: anyone who can reach rank 0's store can join. Make one "
                "(openssl rand -hex 32 > key; chmod 600 key) and set SHOAL_KEY_FILE on every rank"
            )

    def _table(self) -> Iterator[Sequence[str]]:
        yield "host", "ranks", "interface", "MTU", "shoal", "Python", "torch", "files", "locked"
        for host in self.hosts:
            ranks = [one.rank for one in self.ranks if one.host_id == host.host_id]
            locked = "any" if host.locked_bytes < 0 else show_bytes(host.locked_bytes)
            for path in host.paths:
                yield (
                    *(host.host, _ranges(ranks)),
                    f"{path.interface} {path.address} ({path.why})",
                    *(str(path.mtu or "?"), host.shoal, host.python, host.torch),
                    *(str(host.n_files), locked),
                )

    def _matrix(self, index: int) -> Iterator[Sequence[str]]:
        hosts = [host for host in self.hosts if index < len(host.paths)]
        yield "from \\ to", *(f"{self._name(to.rank)} {to.paths[index].interface}" for to in hosts)
        for prober in self.hosts:
            cells = [self._name(prober.rank)]
            for to in hosts:
                probes = self.probes.get((prober.rank, to.rank), [])
                cells.append(
                    "-" if prober is to else _cell(probes[index]) if probes else "not measured"
                )
            yield cells

    def _facts(self, rank: int) -> Facts:
        return next(one for one in self.ranks if one.rank == rank)

    def _name(self, rank: int) -> str:
        """Return a host's name, with its rank if hosts share a name."""
        host = self._facts(rank).host
        twins = [one for one in self.hosts if one.host == host]
        return host if len(twins) == 1 else f"{host} (rank {rank})"


def show_rate(bytes_per_s: float) -> str:
    """Return a rate in bits per second, as interfaces are sold."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _cell(probe: Probe) -> str:
    if probe.error:
        return "FAILS"
    return f"{show_us(1e6 * probe.latency_s)}, {show_rate(probe.rate)}"


def _ranges(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks))


def _columns(rows: list[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return [f"  {'  '.join(cells)}".rstrip() for cells in padded]
