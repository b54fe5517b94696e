"""Decide whether servers share in an all-reduce, and by which weights, and give the reason.

Pure: the same cluster and the same servers give the same decision.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.codec import Codec
from shoal.errors import UsageError
from shoal.limits import SEGMENT_BYTES
from shoal.plan.choose import choose, narrowed
from shoal.plan.cluster import Cluster, Nic, Nics
from shoal.plan.cost import Cost, price
from shoal.plan.shares import kept_beside, loads, servers_alone, shares_beside
from shoal.plan.text import counted, show_bytes, show_us
from shoal.schedule import Copy, Finish, Send, find
from shoal.schedule.counts import Counts, StepCounts

if TYPE_CHECKING:
    from shoal.plan.shares import Shares
    from shoal.schedule import Algorithm
    from shoal.schedule.weights import Weights

# NICs that are busy for this part of the longest time are bottlenecks too: rounding weights to
# whole numbers makes that much difference between equally busy NICs.
_BUSY: Final = 0.99
# Servers are used if calls take less than this part of the workers' time: costs are not more exact.
_WORTH: Final = 0.98
# Measured time over cost: if workers reduce too, connections to workers and to servers compete for
# NICs; if fewer servers than workers reduce everything, many send to few (docs/decisions/0033).
_COMPETING: Final = 1.04
_INCAST: Final = 1.2
# In groups up to this size every rank is counted; in larger ones the ranks with the most work.
_FEW_RANKS: Final = 48


class Served(NamedTuple):
    """The decision on one all-reduce.

    Args:
        weights: the weights of workers and servers; None: the workers reduce alone.
        cost_us: the cost of the better way, as `Choice.cost_us`; with servers it includes the
            competition of connections.
        alone_us: the cost for the workers alone with the algorithm that they then use: `sharded` if
            there are servers, for the same bits.
        bottleneck: the role whose NICs are busy all the time, or "latency", "CPU" or "memory".
        why: the reason, with numbers.
    """

    weights: Weights | None
    cost_us: float
    alone_us: float
    bottleneck: str
    why: str

    @property
    def names(self) -> tuple[str, ...]:
        """The algorithms of the calls that together make the all-reduce; none without servers."""
        return tuple(self.weights.name(part) for part in self.weights.parts) if self.weights else ()


@functools.lru_cache(maxsize=1024)
def choose_with_servers(
    n_bytes: int, cluster: Cluster, pool: Nics, codec: Codec = Codec.IDENTITY
) -> Served:
    """Compare an all-reduce with servers to one by the workers alone.

    The bits must not depend on the reducers, so in a job with servers the workers alone use
    `sharded`, even if another algorithm is cheaper.

    Args:
        n_bytes: the length of the tensor in memory.
        cluster: the workers; messages to servers cost as much as between workers.
        pool: the servers, and the rates of the NICs.
        codec: the encoding of elements between hosts.

    Raises:
        UsageError: the pool names another number of workers than the cluster has hosts.
    """
    if pool.workers and len(pool.workers) != cluster.n_hosts:
        raise UsageError(
            f"the pool names the NICs of {len(pool.workers)} workers, the cluster has "
            f"{cluster.n_hosts} hosts"
        )
    what = f"{show_bytes(n_bytes)} over {counted(cluster.size, 'worker')} and "
    what += counted(len(pool.servers), "server")
    is_sharded = bool(pool.servers) and cluster.n_hosts == cluster.size
    alone = choose("all_reduce", n_bytes, cluster, "sharded" if is_sharded else "", codec=codec)

    def by_workers(why: str, bottleneck: str = "") -> Served:
        why = f"not by servers, since {why}"
        return Served(None, alone.cost_us, alone.cost_us, bottleneck, why)

    if reason := _why_not(cluster, pool):
        return by_workers(f"{reason} ({what})")
    shared = _best(n_bytes, cluster, pool, codec)
    if shared is None:
        return by_workers(f"with or without them a worker sends the tensor once ({what})")
    bottleneck = _bottleneck(shared.cost, shared.weights, cluster, pool)
    named = f"{alone.name} of the workers alone takes {show_us(alone.cost_us)}"
    # Such a call takes only a few messages' time: another group's messages would not pay off.
    if shared.cost.bottleneck == "latency":
        why = f"{what} wait for latency, which they do not shorten ({named})"
        return by_workers(why, bottleneck)
    is_used = shared.time_us <= _WORTH * alone.cost_us
    why = f"{what} {'take' if is_used else 'would take'} {show_us(shared.time_us)} where {named}, "
    why += f"bottleneck: {bottleneck}"
    if not is_used:
        return by_workers(why, bottleneck)
    return Served(shared.weights, shared.time_us, alone.cost_us, bottleneck, why)


class _Shared(NamedTuple):
    """An all-reduce by these weights: its cost, and its time with competing connections."""

    weights: Weights
    cost: Cost
    time_us: float


def _best(n_bytes: int, cluster: Cluster, pool: Nics, codec: Codec) -> _Shared | None:
    """Return the faster of two ways, by workers and servers or by servers; None: no gain."""
    workers = _nics(cluster, pool)
    both = shares_beside(workers, pool.servers)
    if not any(both.servers):
        return None
    ways = {
        _named(shares, cluster, pool) for shares in (both, servers_alone(workers, pool.servers))
    }
    priced = []
    for weights in sorted(ways):
        cost = cost_with_servers(weights, n_bytes, cluster, pool, codec)
        priced.append(_Shared(weights, cost, cost.cost_us * competing(weights)))
    return min(priced, key=lambda way: way.time_us)


def cost_with_servers(
    weights: Weights,
    n_bytes: int,
    cluster: Cluster,
    pool: Nics,
    codec: Codec = Codec.IDENTITY,
) -> Cost:
    """Return the cost of an all-reduce by these weights; arguments as above."""
    wire = Nic.of(cluster.wire)
    both = replace(cluster, hosts=tuple(range(cluster.size + len(pool.servers))))
    slower = [
        (wire.out / nic.out, wire.into / nic.into) for nic in (*_nics(cluster, pool), *pool.servers)
    ]
    counts = _count(weights, n_bytes, slower)
    chunk = n_bytes / counts.n_chunks
    stream = chunk * max(nic.sent for nic in counts.ranks) / max(1, counts.n_peers)
    return price(counts, chunk, "all_reduce", narrowed(both, codec), stream)


def _why_not(cluster: Cluster, pool: Nics) -> str:
    if not pool.servers:
        return "there are no servers"
    if cluster.n_hosts < cluster.size:
        return (
            f"servers serve only workers on separate hosts, and these {cluster.size} "
            f"are on {cluster.n_hosts}"
        )
    if cluster.size < 3:
        return "fewer than 3 workers send no less to servers than to each other"
    return ""


def _nics(cluster: Cluster, pool: Nics) -> Sequence[Nic]:
    return pool.workers or [Nic.of(cluster.wire)] * cluster.n_hosts


def _named(shares: Shares, cluster: Cluster, pool: Nics) -> Weights:
    """Return weights that have a name; if NICs differ too much, for the slowest of each kind."""
    try:
        return shares.weights()
    except UsageError:
        slowest = [
            min(nics, key=lambda nic: nic.slower) for nics in (_nics(cluster, pool), pool.servers)
        ]
        alike = [slowest[0]] * cluster.size, [slowest[1]] * len(pool.servers)
        return (shares_beside if any(shares.workers) else servers_alone)(*alike).weights()


def _bottleneck(cost: Cost, weights: Weights, cluster: Cluster, pool: Nics) -> str:
    """Return the role with NICs busy all the time, or another bottleneck, as text."""
    if cost.bottleneck != "network":
        return cost.bottleneck
    n = cluster.size
    rates = [nic.slower for nic in (*_nics(cluster, pool), *pool.servers)]
    if any(weights.workers):
        kept = kept_beside(sum(weights.servers) / weights.total)
        rates[n:] = [kept * rate for rate in rates[n:]]
    times = [load / rate for load, rate in zip(loads(weights), rates, strict=True)]
    longest = {"workers": max(times[:n]), "servers": max(times[n:])}
    busy = [role for role, time in longest.items() if time >= _BUSY * max(times)]
    return f"the NICs of {' and '.join(busy)}"


def competing(weights: Weights) -> float:
    """Return the measured time of a call by these weights over its cost."""
    if any(weights.workers):
        return _COMPETING
    return _INCAST if len(weights.servers) < len(weights.workers) else 1.0


def _count(weights: Weights, n_bytes: int, slower: Sequence[tuple[float, float]]) -> Counts:
    """Count the work of ranks and NICs, in chunks of the mean length of a buffer cut by weights.

    `slower` has, for each NIC, out and in, its time for a byte divided by the wire's. Counts the
    steps of at most 48 ranks, and of 7 in larger groups.
    """
    n, size = len(weights.workers), len(weights.workers) + len(weights.servers)
    algorithm = find("all_reduce", weights.name()).fitted(n_bytes, size)
    assert algorithm.cut_rule is not None  # it is by weights
    lengths = algorithm.cut_rule(n_bytes, size)[1]
    mean = n_bytes / len(lengths) or 1.0
    ranks, nics, n_peers = [], [], 0
    for rank in _counted_ranks(weights, slower):
        work, peers = _work(algorithm, rank, size, [length / mean for length in lengths], mean)
        ranks.append(work)
        out, into = slower[rank]
        nics.append(work._replace(sent=work.sent * out, received=work.received * into))
        n_peers = max(n_peers, peers)
    return Counts(
        n_chunks=len(lengths),
        n_scratch=max(len(algorithm.scratch(rank, size)) for rank in {0, n // 2, n - 1}),
        ranks=tuple(dict.fromkeys(ranks)),
        hosts=tuple(dict.fromkeys(nics)),
        n_intra=0,
        n_inter=len(algorithm.chain(size)),
        n_peers=n_peers,
    )


def _counted_ranks(weights: Weights, slower: Sequence[tuple[float, float]]) -> Sequence[int]:
    """Return all ranks of a small group, else the ranks of each role with the busiest NICs."""
    n, size = len(weights.workers), len(slower)
    if size <= _FEW_RANKS:
        return range(size)
    shares = (*weights.workers, *weights.servers)
    by_load = sorted(range(size), key=lambda rank: -shares[rank] * max(slower[rank]))
    slowest = max(range(n), key=lambda rank: max(slower[rank]))
    workers = [rank for rank in by_load if rank < n]
    servers = [rank for rank in by_load if rank >= n]
    return sorted({0, n - 1, slowest, *workers[:2], *servers[:2]})


def _work(
    algorithm: Algorithm, rank: int, size: int, lengths: Sequence[float], mean: float
) -> tuple[StepCounts, int]:
    """Return the work of a rank, and the number of ranks that it exchanges with."""
    n_copied = n_messages = 0.0
    sent, received = [0.0, 0.0], [0.0, 0.0]  # chunks that others fold, and chunks folded here
    to, source = set[int](), set[int]()
    like = algorithm.scratch(rank, size)
    steps = list(algorithm.steps(rank, size))
    own = {step.chunk for step in steps if isinstance(step, Finish)}
    each = max(1, -(-mean // SEGMENT_BYTES))
    for step in steps:
        if isinstance(step, Finish):
            continue
        n = lengths[like[step.chunk] if step.buffer and like else step.chunk]
        if isinstance(step, Copy):
            n_copied += n
            continue
        n_messages += -(-n * mean // SEGMENT_BYTES) / each
        chunks, peers = (sent, to) if isinstance(step, Send) else (received, source)
        chunks[step.chunk in own] += n
        peers.add(step.peer)
    work = StepCounts(
        inter=n_messages,
        moved=n_copied + sent[False] + received[True] + received[False] + sent[True],
        sent=sum(sent),
        received=sum(reversed(received)),
        before=received[True],
        passed_on=sent[True],
    )
    return work, min(len(to), len(source))
