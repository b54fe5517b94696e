"""The processes of a case, and their hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.bench.job import JobSpec
from shoal.lab import Lab

if TYPE_CHECKING:
    from bench.scoreboard.case import Case


@dataclass(frozen=True)
class SuiteJob(JobSpec):
    """The processes of a library, and the lab that they run in.

    Args:
        rate_mbit: the rate of a host's NIC; None: not shaped.
        more_mbit: the rates of further NICs of each host.
        n_servers: further hosts, with NICs of `server_mbit` in turn, or like the other hosts' NICs.
    """

    rate_mbit: float | None = 1000
    more_mbit: tuple[float, ...] = ()
    n_servers: int = 0
    server_mbit: tuple[float, ...] = ()

    def lab(self) -> Lab:
        """Return the lab of these hosts."""
        nics = {
            self.n_hosts + index: (self.server_mbit[index % len(self.server_mbit)],)
            for index in range(self.n_servers if self.server_mbit else 0)
        }
        return Lab(self.n_hosts + self.n_servers, self.rate_mbit, self.more_mbit, apart=nics)

    @property
    def place(self) -> SuiteJob:
        """The part that all jobs on the same hosts share."""
        return replace(self, library="", n_ranks=0)


def spec_of(library: str, case: Case) -> SuiteJob:
    """Return the processes of a case."""
    nics = (case.n_hosts, case.rate_mbit, case.more_mbit, case.n_servers, case.server_mbit)
    return SuiteJob(library, case.n_ranks, *nics)


def is_same_place(one: Case, other: Case) -> bool:
    """Return True if two cases have the same processes on the same hosts."""
    return spec_of("", one) == spec_of("", other)
