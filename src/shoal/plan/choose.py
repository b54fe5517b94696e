"""The cheapest algorithm for a call, by a cost model with few numbers.

Pure: every rank that knows the same topology chooses the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shoal.errors import UsageError
from shoal.schedule import find


@dataclass(frozen=True)
class Topology:
    """What the planner knows of a group: which host each rank is on.

    Args:
        hosts: the host of every rank, numbered from 0 in the order in which they first come up.
    """

    hosts: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    @property
    def n_hosts(self) -> int:
        """How many hosts they are on."""
        return max(self.hosts) + 1


@dataclass(frozen=True)
class Choice:
    """An algorithm's name, what the model says it costs, and the sentence that justifies it."""

    name: str
    cost_us: float
    why: str


@dataclass(frozen=True)
class LinkCost:
    """One message between two ranks costs `latency_us` plus `us_per_byte` times its bytes."""

    latency_us: float
    us_per_byte: float


# Inside a host a message is a write to shared memory and perhaps a wake-up; a byte is copied or
# folded once. Between hosts: a system call, a wire and a wake-up; a byte at 10 Gbit/s. Only the
# ratios decide, and they hold from 1 to 100 Gbit/s.
_LOCAL: Final = LinkCost(latency_us=3.0, us_per_byte=1 / 15e3)
_REMOTE: Final = LinkCost(latency_us=40.0, us_per_byte=1 / 1.2e3)

# Many senders to one cable fill its queue and lose packets; a ring has one sender per cable.
# Measured for sharded over four hosts at 1 Gbit/s (bench/LOG.md).
_INCAST: Final = 1.2

Cost = Callable[[int, int, LinkCost, bool], float]


def _direct_all_reduce(n_bytes: int, size: int, link: LinkCost, remote: bool) -> float:
    # Folding in rank order happens in scratch memory: two more passes, over memory of the host.
    copies = 2 * n_bytes * _LOCAL.us_per_byte
    moved = (size - 1) * n_bytes * link.us_per_byte
    return link.latency_us + copies + moved * (_INCAST if remote else 1)


def _sharded_all_reduce(n_bytes: int, size: int, link: LinkCost, remote: bool) -> float:
    moved = 2 * (size - 1) / size * n_bytes * link.us_per_byte
    return 2 * link.latency_us + moved * (_INCAST if remote else 1)


def _ring_all_reduce(n_bytes: int, size: int, link: LinkCost, remote: bool) -> float:
    return 2 * (size - 1) * (link.latency_us + n_bytes / size * link.us_per_byte)


def _direct_blocks(n_bytes: int, size: int, link: LinkCost, remote: bool) -> float:
    moved = (size - 1) * n_bytes * link.us_per_byte
    return link.latency_us + moved * (_INCAST if remote else 1)


def _ring_blocks(n_bytes: int, size: int, link: LinkCost, remote: bool) -> float:
    return (size - 1) * (link.latency_us + n_bytes * link.us_per_byte)


def _direct_broadcast(n_bytes: int, size: int, link: LinkCost, remote: bool) -> float:
    return link.latency_us + (size - 1) * n_bytes * link.us_per_byte


def _chain_broadcast(n_bytes: int, size: int, link: LinkCost, remote: bool) -> float:
    # Every hop forwards segment by segment; the last one is size - 2 hops behind.
    segment = min(n_bytes, 128 << 10)
    hops = (size - 1) * (link.latency_us + segment * link.us_per_byte)
    return hops + n_bytes * link.us_per_byte


def _dissemination(n_bytes: int, size: int, link: LinkCost, remote: bool) -> float:
    return (size - 1).bit_length() * (link.latency_us + n_bytes * link.us_per_byte)


COSTS: Final[Mapping[str, Mapping[str, Cost]]] = MappingProxyType(
    {
        "all_reduce": {
            "direct": _direct_all_reduce,
            "sharded": _sharded_all_reduce,
            "ring": _ring_all_reduce,
        },
        "all_gather": {"direct": _direct_blocks, "ring": _ring_blocks},
        "reduce_scatter": {"direct": _direct_blocks, "ring": _ring_blocks},
        "broadcast": {"direct": _direct_broadcast, "chain": _chain_broadcast},
        "reduce": {"direct": _direct_broadcast},
        "gather": {"direct": _direct_blocks},
        "scatter": {"direct": _direct_blocks},
        "all_to_all": {"pairwise": _direct_blocks},
        "barrier": {"dissemination": _dissemination},
    }
)


@functools.lru_cache(maxsize=4096)
def choose(
    collective: str, n_bytes: int, topology: Topology, forced: str = "", uneven: bool = False
) -> Choice:
    """The cheapest algorithm for one call.

    Args:
        n_bytes: of the in-place buffer (all_reduce, broadcast, reduce, barrier), or of one rank's
            block (all_gather, reduce_scatter, gather, scatter, all_to_all).
        forced: an algorithm's name, or empty; where this collective lacks it, the model chooses.
        uneven: the blocks differ in length by rank: only algorithms that can do with that. What
            `n_bytes` says must then be the same on every rank: of the longest block, or 0.
    """
    link = _LOCAL if topology.n_hosts == 1 else _REMOTE
    costs = {
        name: cost(n_bytes, topology.size, link, topology.n_hosts > 1)
        for name, cost in COSTS[collective].items()
        if not uneven or find(collective, name).takes_uneven
    }
    if forced in costs:
        return Choice(forced, costs[forced], why=f"SHOAL_ALGO={forced}")
    best = min(costs, key=costs.__getitem__)
    each = ", ".join(f"{name} {us:.0f} us" for name, us in sorted(costs.items()))
    where = "in one host" if topology.n_hosts == 1 else f"on {topology.n_hosts} hosts"
    return Choice(best, costs[best], f"{n_bytes} B over {topology.size} ranks {where}: {each}")


def forced_algorithm(environ: Mapping[str, str] = os.environ) -> str:
    """`SHOAL_ALGO`: an algorithm's name to use wherever a collective has it; empty if unset.

    Raises:
        UsageError: no collective has it; the message lists those that exist.
    """
    name = environ.get("SHOAL_ALGO", "")
    known = sorted({name for costs in COSTS.values() for name in costs})
    if name and name not in known:
        raise UsageError(f"SHOAL_ALGO={name!r} is no algorithm; known are {', '.join(known)}")
    return name
