"""The processes of one library in a run, and the reason for a missing number."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ShoalError


class Failure(ShoalError):  # noqa: N818 - the word in the table
    """The reason why a library has no number: not installed, crashed, too slow, or wrong."""


@dataclass(frozen=True)
class JobSpec:
    """A library, its number of ranks, and its number of hosts in a lab; 0: on this machine."""

    library: str
    n_ranks: int
    n_hosts: int = 0


def host_of(spec: JobSpec, rank: int) -> int:
    """Return the host of a rank: neighbouring ranks share one, as torchrun places them."""
    return rank * spec.n_hosts // spec.n_ranks


def rank_environment(rank: int, local: int, n_local: int) -> dict[str, str]:
    """Return torchrun's variables for one rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(n_local)}
