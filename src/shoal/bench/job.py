"""Which processes a library is measured with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.lab import Lab

if TYPE_CHECKING:
    from shoal.bench.case import Case


@dataclass(frozen=True)
class JobSpec:
    """Which processes: a library, how many ranks, and on how many hosts of a cluster.

    With `n_hosts` 0 all ranks are on this machine, outside any cluster. `rate_mbit` is that of a
    host's NIC; None: not shaped. `more_mbit` are those of further NICs of each host. `n_servers`
    further hosts have NICs of `server_mbit` in turn, or as the others.
    """

    library: str
    n_ranks: int
    n_hosts: int = 0
    rate_mbit: float | None = 1000
    more_mbit: tuple[float, ...] = ()
    n_servers: int = 0
    server_mbit: tuple[float, ...] = ()

    def lab(self) -> Lab:
        """The cluster of these hosts."""
        nics = {
            self.n_hosts + index: (self.server_mbit[index % len(self.server_mbit)],)
            for index in range(self.n_servers if self.server_mbit else 0)
        }
        return Lab(self.n_hosts + self.n_servers, self.rate_mbit, self.more_mbit, apart=nics)

    @property
    def place(self) -> JobSpec:
        """What jobs have in common that run on the same hosts."""
        return replace(self, library="", n_ranks=0)


def spec_of(library: str, case: Case) -> JobSpec:
    """The processes that a case is measured with."""
    nics = (case.n_hosts, case.rate_mbit, case.more_mbit, case.n_servers, case.server_mbit)
    return JobSpec(library, case.n_ranks, *nics)


def is_same_place(one: Case, other: Case) -> bool:
    """Whether two cases are measured with the same processes on the same hosts."""
    return spec_of("", one) == spec_of("", other)


def host_of(spec: JobSpec, rank: int) -> int:
    """Neighbouring ranks share a host, as torchrun places them."""
    return rank * spec.n_hosts // spec.n_ranks
