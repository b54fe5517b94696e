"""A case: one row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bench.scoreboard.goals import Goal

MIB: Final = 1 << 20


@dataclass(frozen=True)
class Case:
    """One row: its ranks and bytes, the number of samples, and its goals.

    Args:
        n_calls: calls in a row for one sample; 0: as many as take a few milliseconds.
        n_samples: samples in a round.
        n_hosts: hosts of a lab; 0: this machine.
        rate_mbit: the rate of their NICs; None: not shaped.
        collective: one of `CALLS`.
        more_mbit: the rates of further NICs of each host.
        n_servers: further hosts, which are servers for ranks on a host each.
        server_mbit: the rates of the servers' NICs, in turn; empty: as the other hosts' NICs.
        model: the trained model, one of `MODELS`; `n_bytes` is 0 then.
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
