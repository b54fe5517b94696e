"""Which processes a library is measured with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobSpec:
    """Which processes: a library, how many ranks, and on how many hosts of a cluster.

    With `n_hosts` 0 all ranks are on this machine, outside any cluster. `rate_mbit` is that of a
    host's NIC; None: not shaped. `more_mbit` are those of further NICs of each host.
    """

    library: str
    n_ranks: int
    n_hosts: int = 0
    rate_mbit: float | None = 1000
    more_mbit: tuple[float, ...] = ()


def host_of(spec: JobSpec, rank: int) -> int:
    """Neighbouring ranks share a host, as torchrun places them."""
    return rank * spec.n_hosts // spec.n_ranks
