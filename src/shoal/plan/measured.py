"""What NICs carry, by what calls took: shares are corrected where it is not what hosts report.

Whoever is late tells: a server whose NIC is busy all the time is one in front of which bytes wait,
and of two calls that share a buffer the one that ends last is that of the busy NICs. What went over
these meanwhile is what they carry. Of others only that they carry no less. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.plan.cluster import Nic, Pool
from shoal.plan.shares import best_shares, loads, servers_alone

if TYPE_CHECKING:
    from shoal.schedule.weights import Weights

TOLERATED: Final = 1.05
"""How much longer than the best the busiest NIC may take before shares are corrected."""

# Where all servers are as busy as each other, bytes wait 0.8 to 1.3 times as long in front of each
# as in front of the next; in front of one with half the rate 5 to 8 times as long as of the others.
_APART: Final = 2.5
_LEAST_US: Final = 200.0  # of waiting: less is distance, not a queue
# So much later a part is late: with the right shares the servers' takes 1.3 to 1.6 times as long as
# the workers', since connections to workers and to servers compete for NICs (decision 33).
_LATER_WORKERS: Final = 1.1
_LATER_SERVERS: Final = 2.0
# Of what a NIC carries, what goes over the one that all wait for while a call lasts: 0.72 to 0.88
# where servers reduce it all, 0.63 to 0.68 where the workers' part competes with theirs.
_OF_LINE: Final = 0.85
_OF_SHARED_LINE: Final = 0.65
# One that is as busy as it is thought able to be, and that nobody waits for, carries more: twice as
# much where bytes wait so many times as long for others, else somewhat more. Less if it was
# measured before: that is a tenth wrong, and twice a right rate is as bad as what was reported.
_FAR_APART: Final = 5.0
_GROWTH: Final = 2.0
_LITTLE_GROWTH: Final = 1.25
_GROWTH_OF_KNOWN: Final = 1.1
_FULL: Final = 0.9
_SLACK: Final = 0.6


class Seen(NamedTuple):
    """What some calls took.

    Args:
        weights: by which they were shared.
        n_bytes: of all of them, as they travel.
        workers_us, servers_us: while the workers' parts and the servers' lasted, one call after the
            other; 0: there were none.
        delays_us: by server, how long bytes wait until it has acknowledged them.
    """

    weights: Weights
    n_bytes: float
    workers_us: float
    servers_us: float
    delays_us: tuple[float, ...]


def correct(pool: Pool, seen: Seen, known: Collection[int] = ()) -> Pool | None:
    """What NICs carry by what was seen, if shares by that are better by more than `TOLERATED`.

    Args:
        pool: what they were taken to carry, workers too.
        known: the servers that were late before, so that this was measured.
    """
    believed = _believed(pool, seen, known)
    return believed if imbalance(seen.weights, believed) > TOLERATED else None


def imbalance(weights: Weights, pool: Pool) -> float:
    """How many times as long as by the best shares of their kind the busiest NIC takes by these."""
    rates = [nic.slower for nic in (*pool.workers, *pool.servers)]
    now = max(load / rate for load, rate in zip(loads(weights), rates, strict=True))
    way = best_shares if any(weights.workers) else servers_alone
    return now / way(pool.workers, pool.servers).us_per_byte


def _believed(pool: Pool, seen: Seen, known: Collection[int]) -> Pool:
    n, weights = len(pool.workers), seen.weights
    carried = [load * seen.n_bytes for load in loads(weights)]
    of_line = _OF_SHARED_LINE if seen.workers_us else _OF_LINE
    late = late_servers(pool, seen)
    servers = []
    for server, nic in enumerate(pool.servers):
        rate = nic.slower
        got = carried[n + server] / seen.servers_us / of_line if seen.servers_us else 0.0
        if not got:
            servers.append(nic)
        elif server in late:
            servers.append(Nic(got, got))
        else:
            # NOT if it was given less than it can take: then it is no wonder that nobody waits.
            is_full = bool(late) and got >= _FULL * rate
            growth = _growth(seen, server, late, known) if is_full else 1.0
            most = max(rate * growth, got)
            servers.append(nic if most == rate else Nic(most, most))
    workers = pool.workers
    if seen.servers_us and seen.workers_us > _LATER_WORKERS * seen.servers_us:
        times_us = [load / nic.slower for load, nic in zip(carried[:n], workers, strict=True)]
        used = max(times_us) / seen.workers_us / of_line
        workers = tuple(Nic(nic.out * used, nic.into * used) for nic in workers)
    return replace(pool, servers=tuple(servers), workers=workers)


def _growth(seen: Seen, server: int, late: Collection[int], known: Collection[int]) -> float:
    """How much more than it is thought to a server may carry that nobody waits for."""
    if server in known:
        return _GROWTH_OF_KNOWN
    least = min(seen.delays_us[at] for at in late)
    is_far = least > _FAR_APART * max(_LEAST_US, seen.delays_us[server])
    return _GROWTH if is_far else _LITTLE_GROWTH


def late_servers(pool: Pool, seen: Seen) -> frozenset[int]:
    """Those that all others wait for."""
    shared = [at for at, weight in enumerate(seen.weights.servers) if weight]
    if not shared or not seen.servers_us:
        return frozenset()
    # Of many the least is the least by chance: of each four or so one is left out.
    in_order = sorted(seen.delays_us[at] for at in shared)
    least = max(_LEAST_US, in_order[(len(in_order) - 1) // 4])
    late = frozenset(at for at in shared if seen.delays_us[at] > _APART * least)
    if late:
        return late
    are_late = seen.servers_us > _LATER_SERVERS * seen.workers_us
    if not seen.workers_us:  # nobody to compare with but what is reported
        are_late = _use(pool, seen) < _SLACK
    return frozenset(shared) if are_late else frozenset()


def _use(pool: Pool, seen: Seen) -> float:
    """Of what servers' NICs are taken to carry, what went over the busiest; 1: the workers' is."""
    rates = [nic.slower for nic in (*pool.workers, *pool.servers)]
    times = [load / rate for load, rate in zip(loads(seen.weights), rates, strict=True)]
    n = len(pool.workers)
    if max(times[:n]) >= max(times[n:]):
        return 1.0
    return max(times[n:]) * seen.n_bytes / seen.servers_us


def show_rates(names: Sequence[object], before: Pool, after: Pool) -> str:
    """In words: whose rate is taken for another, and for which; by worker and server."""
    nics = (*before.workers, *before.servers), (*after.workers, *after.servers)
    pairs = zip(names, *nics, strict=True)
    return ", ".join(
        f"{name} carries {_mbit(new):g} Mbit/s, not {_mbit(old):g}"
        for name, old, new in pairs
        if abs(new.slower / old.slower - 1) > TOLERATED - 1
    )


def _mbit(nic: Nic) -> float:
    return float(f"{8 * nic.slower:.3g}")
