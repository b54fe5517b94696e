"""The processes of one library in a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobSpec:
    """A library, how many ranks it has, and on how many hosts of a lab; 0: on this machine."""

    library: str
    n_ranks: int
    n_hosts: int = 0


def host_of(spec: JobSpec, rank: int) -> int:
    """Return the host of a rank: neighbouring ranks share one, as torchrun places them."""
    return rank * spec.n_hosts // spec.n_ranks
