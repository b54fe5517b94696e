"""Choose the cheapest algorithm for a call, and give the reason.

Pure: the same cluster gives the same choice on every rank.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.codec import Codec
from shoal.errors import UsageError
from shoal.plan.cost import Cost, cost_of
from shoal.plan.defaults import encoding_us_per_byte
from shoal.plan.text import listed, show_bytes, show_us
from shoal.schedule import ALGORITHMS, COLLECTIVES, find

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster
    from shoal.schedule import Algorithm

# Below this a message costs more than its bytes, so half a shard arrives no sooner
# (docs/decisions/0007). A lower floor means more messages in large groups, a higher one fewer
# reducers.
SHARD_FLOOR_BYTES: Final = 16 << 10
# The same inside a host, where a message is a line in a ring of shared memory.
LOCAL_SHARD_FLOOR_BYTES: Final = 4 << 10

# Candidates that look at hosts, as local/across. SHOAL_ALGO may name others.
_BY_HOSTS: Final = ("sharded/ring", "sharded/tree", "sharded/halving", "sharded/doubling")

# Up to this many stripes of a short buffer cost a host less than a tree, although most ranks reduce
# no stripe: 0.76 to 1.05 of its time (8 and 16 ranks on 2 cores, 32 and 64 KiB). Eight stripes over
# 16 ranks take 1.3 times as long, for messages to cold cores (128 KiB; bench/LOG.md, 2026-11-25).
_FEW_STRIPES: Final = 4

_EQUAL: Final = 1.02  # costs within this ratio count as equal
_N_NAMED: Final = 3  # other algorithms that a reason names


class Choice(NamedTuple):
    """An algorithm's name, its cost by the model or as measured, and the reason for it."""

    name: str
    cost_us: float
    why: str


def can_serve(collective: str, name: str, cluster: Cluster, *, uneven: bool = False) -> bool:
    """Return True if the algorithm can do the collective on this cluster.

    Args:
        uneven: the blocks of the ranks differ in length; scratch needs equal blocks.
    """
    try:
        algorithm = find(collective, name)
        algorithm.n_chunks(cluster.size, cluster.hosts)  # some need more ranks than there are
    except UsageError:
        return False
    if algorithm.n_servers or algorithm.is_part:  # neither is a complete call of this group
        return False
    return algorithm.takes_uneven or not uneven


def may_encode(collective: str, name: str, cluster: Cluster, codec: Codec) -> bool:
    """Return True if the codec rounds each contribution and each result only once.

    Encoding rounded values again changes nothing, so data that is only moved may take any route.
    """
    if not codec.is_narrow or cluster.n_hosts == 1 or not COLLECTIVES[collective].folds:
        return True
    return find(collective, name).encodes_once


def candidates(
    collective: str, n_bytes: int, cluster: Cluster, codec: Codec = Codec.IDENTITY
) -> list[str]:
    """Return the algorithms to compare for a call with blocks of equal length.

    These are all algorithms in the table that give enough ranks work and, if ranks share hosts, the
    hierarchies that were fastest in some case. A narrow codec leaves the algorithms that
    `may_encode`, always including `sharded`.
    """
    narrow = codec.is_narrow
    by_host = 1 < cluster.n_hosts < cluster.size
    names = [
        name
        for name, algorithm in ALGORITHMS[collective].items()
        if (by_host or not algorithm.by_host)
        and (narrow or not algorithm.fit_rule or not _leaves_many_idle(algorithm, n_bytes, cluster))
    ]
    if collective == "all_reduce":
        names += _BY_HOSTS if by_host else ()
    return [name for name in names if may_encode(collective, name, cluster, codec)]


def _leaves_many_idle(algorithm: Algorithm, n_bytes: int, cluster: Cluster) -> bool:
    """Return True if, on a single host, some ranks would have nothing to reduce."""
    n_stripes = algorithm.fitted(n_bytes, cluster.size).n_chunks(cluster.size)
    return cluster.n_hosts == 1 and _FEW_STRIPES < n_stripes < cluster.size


def floor_of(cluster: Cluster) -> int:
    """Return the least length of a shard on this cluster, in bytes."""
    return LOCAL_SHARD_FLOOR_BYTES if cluster.n_hosts == 1 else SHARD_FLOOR_BYTES


@functools.lru_cache(maxsize=4096)
def choose(
    collective: str,
    n_bytes: int,
    cluster: Cluster,
    forced: str = "",
    uneven: bool = False,
    codec: Codec = Codec.IDENTITY,
) -> Choice:
    """Return the cheapest algorithm for one call.

    Args:
        n_bytes: the length of the in-place buffer (all_reduce, broadcast, reduce, barrier), or of
            one rank's block (all_gather, reduce_scatter, gather, scatter, all_to_all), in memory.
        forced: the algorithm to take if it can serve the call; empty: none.
        uneven: the blocks differ in length by rank. `n_bytes`, the same on every rank, is then the
            length of the longest block, or 0.
        codec: the encoding of elements between hosts.
    """
    if cluster.n_hosts == 1:
        codec = Codec.IDENTITY
    cluster = narrowed(cluster, codec)
    if forced and can_serve(collective, forced, cluster, uneven=uneven):
        cost_us = cost_of(collective, forced, n_bytes, cluster).cost_us
        return Choice(forced, cost_us, "set by SHOAL_ALGO")
    if cluster.size == 1:
        return Choice(
            next(iter(ALGORITHMS[collective])), 0.0, "a single rank has no peer to send to"
        )
    costs, too_fine = costs_of(collective, n_bytes, cluster, uneven, codec)
    return _cheapest(costs, too_fine, n_bytes, cluster, codec)


def costs_of(
    collective: str, n_bytes: int, cluster: Cluster, uneven: bool, codec: Codec
) -> tuple[dict[str, Cost], list[str]]:
    """Return the costs of the algorithms to compare, and the names that would cut too finely.

    Args: as in `choose`, but with a `narrowed` cluster.
    """
    costs: dict[str, Cost] = {}
    too_fine: list[str] = []
    # If only two ranks know a block's length, other ranks may have uneven blocks.
    any_length = uneven or COLLECTIVES[collective].by_pair
    for name in candidates(collective, n_bytes, cluster, codec):
        if any_length and not can_serve(collective, name, cluster, uneven=True):
            continue
        if _is_too_fine(collective, name, n_bytes, cluster):
            too_fine.append(name)
        else:
            costs[name] = cost_of(collective, name, n_bytes, cluster)
    return costs, too_fine


def narrowed(cluster: Cluster, codec: Codec) -> Cluster:
    """Return the cluster as a codec changes it: a NIC passes more bytes, counted in memory.

    Each byte takes a core at each end less time in the network's stack, and some to encode.
    """
    network = cluster.network_us_per_byte * codec.share + encoding_us_per_byte(codec)
    return replace(
        cluster,
        wire=replace(cluster.wire, us_per_byte=cluster.wire.us_per_byte * codec.share),
        network_us_per_byte=network,
    )


def _is_too_fine(collective: str, name: str, n_bytes: int, cluster: Cluster) -> bool:
    """Return True if it would cut a buffer into shards below the floor; blocks are not cut."""
    if not COLLECTIVES[collective].in_place:
        return False
    algorithm = find(collective, name).fitted(n_bytes, cluster.size)
    n_chunks = algorithm.n_chunks(cluster.size, cluster.hosts)
    return n_chunks > 1 and n_bytes < n_chunks * floor_of(cluster)


def _cheapest(
    costs: dict[str, Cost], too_fine: list[str], n_bytes: int, cluster: Cluster, codec: Codec
) -> Choice:
    ranked = sorted(costs, key=lambda name: costs[name].cost_us)
    best_us = costs[ranked[0]].cost_us
    # Among equal costs take the least work of cores, since a call that waits for a NIC in the model
    # may wait for a core in fact. Among these take the first in the table, which is simpler: the
    # model is not more exact, and a choice that flips from size to size is hard to follow.
    equal = {n: cost for n, cost in costs.items() if cost.cost_us <= _EQUAL * best_us}
    least_us = min(cost.work_us for cost in equal.values())
    first = next(name for name, cost in equal.items() if cost.work_us <= _EQUAL * least_us)
    ranked.remove(first)
    best = costs[first]
    narrow = "" if not codec.is_narrow else f" in {codec}"
    why = f"{show_bytes(n_bytes)}{narrow} {_where(cluster)}: "
    why += f"{first} takes {show_us(best.cost_us)}, bottleneck: {best.bottleneck}"
    others = [_compared(name, costs[name].cost_us / best.cost_us) for name in ranked]
    if others:
        why += f"; {listed(others, _N_NAMED)}"
    if too_fine:
        why += f"; shards below {show_bytes(floor_of(cluster))} in {', '.join(too_fine)}"
    return Choice(first, best.cost_us, why)


def _compared(name: str, ratio: float) -> str:
    return f"{name} {ratio:.2f} times that" if ratio < 10 else f"{name} {ratio:.0f} times that"


def _where(cluster: Cluster) -> str:
    where = "in one host" if cluster.n_hosts == 1 else f"on {cluster.n_hosts} hosts"
    return f"over {cluster.size} ranks {where}"
