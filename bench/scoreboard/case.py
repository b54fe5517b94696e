"""What is measured: one row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.scoreboard.goals import Goal


@dataclass(frozen=True)
class Case:
    """One row: how many ranks move how much, how often it is timed, and what is hoped for.

    Args:
        n_calls: calls in a row that make one sample; 0: as many as fill a few milliseconds.
        n_samples: samples of one round.
        n_hosts: hosts of a lab cluster; 0 is this machine without one.
        rate_mbit: of their NICs; None: as much as the cores can move.
        collective: one of `CALLS`.
        more_mbit: of further NICs of each host.
        n_servers: more hosts, which reduce for the ranks, of whom each is on a host of its own.
        server_mbit: of their NICs, which they take in turn; empty: as the others.
        model: that is trained, one of `MODELS`; then `n_bytes` is 0.
    """

    n_ranks: int
    n_bytes: int
    goals: tuple[Goal, ...] = ()
    n_calls: int = 1
    n_samples: int = 5
    n_hosts: int = 0
    rate_mbit: float | None = 1000
    collective: str = "all_reduce"
    more_mbit: tuple[float, ...] = ()
    n_servers: int = 0
    server_mbit: tuple[float, ...] = ()
    model: str = ""
