"""What servers' NICs carry, by what calls took: shares are corrected where that is not as reported.

Two things tell. The parts of a call, the workers' and the servers', should end together. And a
server whose NIC is busy all the time is one in front of which bytes wait: what went over it
meanwhile is what it carries, and others carry no less. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.plan.cluster import Nic, Pool
from shoal.plan.shares import kept_beside, loads, rates_for_part, servers_alone, shares_beside

if TYPE_CHECKING:
    from shoal.schedule.weights import Weights

TOLERATED: Final = 1.05
"""How much longer than the best the busiest NIC may take before shares are corrected."""

# Where all servers are as busy as each other, bytes wait 0.8 to 1.3 times as long in front of each
# as in front of the next; in front of one with half the rate 5 to 8 times as long as of the others.
_APART: Final = 2.5
_LEAST_US: Final = 200.0  # of waiting: less is distance, not a queue
# Parts end together where neither takes so many times as long as the other: 0.93 to 1.1 with the
# right shares (docs/decisions/0033), and a busy machine adds a tenth.
_TOGETHER: Final = 1.25
# Of what a NIC carries, what goes over the one that all wait for while a call lasts.
_OF_LINE: Final = 0.85
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
    """What servers carry by what was seen, if shares by that are better by more than `TOLERATED`.

    Args:
        pool: what they were taken to carry.
        known: the servers that were late before, so that this was measured.
    """
    if not seen.servers_us:
        return None
    late = late_servers(pool, seen)
    if late or not seen.workers_us:
        servers = _by_waits(pool, seen, late, known)
    else:
        servers = _by_parts(pool, seen)
    believed = replace(pool, servers=servers)
    return believed if imbalance(seen.weights, believed) > TOLERATED else None


def imbalance(weights: Weights, pool: Pool) -> float:
    """How many times as long as by the best shares of their kind the busiest NIC takes by these."""
    kept = kept_beside(_part(weights)) if any(weights.workers) else 1.0
    rates = [nic.slower for nic in pool.workers]
    rates += [kept * nic.slower for nic in pool.servers]
    now = max(load / rate for load, rate in zip(loads(weights), rates, strict=True))
    way = shares_beside if any(weights.workers) else servers_alone
    return now / way(pool.workers, pool.servers).us_per_byte


def _part(weights: Weights) -> float:
    """Of the buffer, what servers reduce."""
    return sum(weights.servers) / weights.total


def _by_parts(pool: Pool, seen: Seen) -> tuple[Nic, ...]:
    """What servers carry if it is not as it is taken to be that the two parts do not end together.

    Each part is taken to last as long as it is large.
    """
    if 1 / _TOGETHER <= seen.servers_us / seen.workers_us <= _TOGETHER:
        return pool.servers
    part = _part(seen.weights)
    of_servers, of_workers = seen.servers_us / part, seen.workers_us / (1 - part)
    together = of_workers / (of_servers + of_workers)
    times = rates_for_part(pool.workers, pool.servers, together)
    return tuple(Nic(times * nic.out, times * nic.into) for nic in pool.servers)


def _by_waits(
    pool: Pool, seen: Seen, late: Collection[int], known: Collection[int]
) -> tuple[Nic, ...]:
    """What servers carry, by whom the others wait for."""
    went = [load * seen.n_bytes / seen.servers_us for load in loads(seen.weights)]
    servers = []
    for server, (nic, rate) in enumerate(zip(pool.servers, went[len(pool.workers) :], strict=True)):
        if server in late:
            servers.append(Nic(rate / _OF_LINE, rate / _OF_LINE))
            continue
        # NOT if it was given less than it can take: then it is no wonder that nobody waits.
        is_full = bool(late) and rate >= _FULL * _OF_LINE * nic.slower
        growth = _growth(seen, server, late, known) if is_full else 1.0
        most = max(nic.slower * growth, rate)
        servers.append(nic if most == nic.slower else Nic(most, most))
    return tuple(servers)


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
    # Where workers have no part there is nothing to compare all servers with but what they report.
    if late or seen.workers_us or _use(pool, seen) >= _SLACK:
        return late
    return frozenset(shared)


def _use(pool: Pool, seen: Seen) -> float:
    """Of what servers' NICs are taken to carry, what went over the busiest; 1: the workers' is."""
    rates = [nic.slower for nic in (*pool.workers, *pool.servers)]
    times = [load / rate for load, rate in zip(loads(seen.weights), rates, strict=True)]
    n = len(pool.workers)
    if max(times[:n]) >= max(times[n:]):
        return 1.0
    return max(times[n:]) * seen.n_bytes / seen.servers_us


def show_rates(names: Sequence[object], before: Pool, after: Pool) -> str:
    """In words: which servers are taken to carry what."""
    nics = zip(names, before.servers, after.servers, strict=True)
    return ", ".join(
        f"server {name} is taken to carry {_mbit(new):g} Mbit/s, not {_mbit(old):g}"
        for name, old, new in nics
        if abs(new.slower / old.slower - 1) > TOLERATED - 1
    )


def _mbit(nic: Nic) -> float:
    return float(f"{8 * nic.slower:.3g}")
