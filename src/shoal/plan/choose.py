"""The cheapest algorithm for a call, and the sentence that says why.

Pure: every rank that knows the same cluster chooses the same.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.codec import Codec
from shoal.errors import UsageError
from shoal.plan.cost import Cost, cost_of
from shoal.plan.text import show_bytes, show_us
from shoal.schedule import ALGORITHMS, COLLECTIVES, find

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster
    from shoal.schedule import Algorithm

# Below this, what a message costs outweighs its bytes, and a shard that is halved is not sent any
# sooner (docs/decisions/0007). Smaller lets large groups drown in messages; larger gives up
# reducers.
SHARD_FLOOR_BYTES: Final = 16 << 10
# Inside a host a message is a line in a ring of shared memory.
LOCAL_SHARD_FLOOR_BYTES: Final = 4 << 10

# Candidates by hosts: local/across. Others can be forced.
_BY_HOSTS: Final = ("sharded/ring", "sharded/tree", "sharded/halving", "sharded/doubling")

# So few stripes of a short buffer cost a host less than a tree does, whoever is left without one:
# 0.76 to 1.05 of its time (8 and 16 ranks on 2 cores, 32 and 64 KiB). Of 16 ranks that share eight,
# each message to a cold core tells: 1.3 (128 KiB; bench/LOG.md, 2026-11-25).
_FEW_STRIPES: Final = 4

# Costs that differ by less are taken as equal.
_EQUAL: Final = 1.02
# How many of those that lost a reason names.
_N_NAMED: Final = 3


class Choice(NamedTuple):
    """An algorithm's name, what it takes, and the sentence that justifies it.

    Args:
        cost_us: by the model, or as measured.
    """

    name: str
    cost_us: float
    why: str


def can_serve(collective: str, name: str, cluster: Cluster, *, uneven: bool = False) -> bool:
    """Whether that algorithm can do that collective there.

    Args:
        uneven: the blocks of the ranks differ in length; scratch chunks are cut for equal ones.
    """
    try:
        algorithm = find(collective, name)
        algorithm.n_chunks(cluster.size, cluster.hosts)  # some need more ranks than there are
    except UsageError:
        return False
    if algorithm.n_servers or algorithm.is_part:  # a call of this group's own needs its all
        return False
    return algorithm.takes_uneven or not uneven


def may_encode(collective: str, name: str, cluster: Cluster, codec: Codec) -> bool:
    """Whether a codec does no more there than round each contribution and each result once."""
    if codec is Codec.IDENTITY or cluster.n_hosts == 1:
        return True
    return find(collective, name).encodes_once


def candidates(
    collective: str, n_bytes: int, cluster: Cluster, codec: Codec = Codec.IDENTITY
) -> list[str]:
    """The algorithms to compare for a call whose blocks are equally long.

    Every one of the table that has work for enough ranks; and where ranks share hosts, those by
    hosts that have won somewhere. With a narrow codec, those that may be used with it: `sharded`
    is always one of them.
    """
    narrow = codec is not Codec.IDENTITY
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
    """Whether inside a host a few would do all the work, and many would only wait."""
    n_stripes = algorithm.fitted(n_bytes, cluster.size).n_chunks(cluster.size)
    return cluster.n_hosts == 1 and _FEW_STRIPES < n_stripes < cluster.size


def floor_of(cluster: Cluster) -> int:
    """How short a shard may be there, in bytes."""
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
    """The cheapest algorithm for one call.

    Args:
        n_bytes: of the in-place buffer (all_reduce, broadcast, reduce, barrier), or of one rank's
            block (all_gather, reduce_scatter, gather, scatter, all_to_all).
        forced: an algorithm's name, or empty; where it cannot serve the call, the model chooses.
        uneven: the blocks differ in length by rank: only algorithms that can do with that. What
            `n_bytes` says must then be the same on every rank: of the longest block, or 0.
        codec: how elements travel between hosts; `n_bytes` are those in memory.
    """
    if cluster.n_hosts == 1:
        codec = Codec.IDENTITY
    cluster = narrowed(cluster, codec)
    if forced and can_serve(collective, forced, cluster, uneven=uneven):
        cost_us = cost_of(collective, forced, n_bytes, cluster).cost_us
        return Choice(forced, cost_us, "SHOAL_ALGO says so")
    if cluster.size == 1:
        return Choice(next(iter(ALGORITHMS[collective])), 0.0, "a rank alone has nobody to send to")
    costs: dict[str, Cost] = {}
    too_fine: list[str] = []
    # Where only two ranks know how long a block is, whose own are alike knows nothing of others'.
    any_length = uneven or COLLECTIVES[collective].by_pair
    for name in candidates(collective, n_bytes, cluster, codec):
        if any_length and not can_serve(collective, name, cluster, uneven=True):
            continue
        if _is_too_fine(collective, name, n_bytes, cluster):
            too_fine.append(name)
        else:
            costs[name] = cost_of(collective, name, n_bytes, cluster)
    return _cheapest(costs, too_fine, n_bytes, cluster, codec)


def narrowed(cluster: Cluster, codec: Codec) -> Cluster:
    """The cluster as a codec sees it: counted in memory, a NIC passes more bytes in a time."""
    return replace(
        cluster,
        wire=replace(cluster.wire, us_per_byte=cluster.wire.us_per_byte * codec.share),
        network_us_per_byte=cluster.network_us_per_byte * codec.share,
    )


def _is_too_fine(collective: str, name: str, n_bytes: int, cluster: Cluster) -> bool:
    """Whether it would cut a buffer into shards below the floor. Blocks are not its to cut."""
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
    # Of those that are as good as equal, those that leave most of the cores to others: what waits
    # for a NIC in the model may wait for a core in fact. Of these the first of the table, which is
    # simpler: the model is not that exact, and a choice that flips from size to size is hard to
    # follow.
    equal = {n: cost for n, cost in costs.items() if cost.cost_us <= _EQUAL * best_us}
    least_us = min(cost.work_us for cost in equal.values())
    first = next(name for name, cost in equal.items() if cost.work_us <= _EQUAL * least_us)
    ranked.remove(first)
    best = costs[first]
    narrow = "" if codec is Codec.IDENTITY else f" in {codec}"
    why = f"{show_bytes(n_bytes)}{narrow} {_where(cluster)}: "
    why += f"{first} takes {show_us(best.cost_us)}, bottleneck: {best.bottleneck}"
    others = [_compared(name, costs[name].cost_us / best.cost_us) for name in ranked]
    if others:
        why += "; " + ", ".join(others[:_N_NAMED])
        why += f" and {len(others) - _N_NAMED} more" * (len(others) > _N_NAMED)
    if too_fine:
        why += f"; shards below {show_bytes(floor_of(cluster))} in {', '.join(too_fine)}"
    return Choice(first, best.cost_us, why)


def _compared(name: str, ratio: float) -> str:
    return f"{name} {ratio:.2f} times that" if ratio < 10 else f"{name} {ratio:.0f} times that"


def _where(cluster: Cluster) -> str:
    where = "in one host" if cluster.n_hosts == 1 else f"on {cluster.n_hosts} hosts"
    return f"over {cluster.size} ranks {where}"
