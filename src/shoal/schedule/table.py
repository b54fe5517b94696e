"""The table of all algorithms, and the look-up by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from shoal.errors import UsageError, did_you_mean
from shoal.schedule import binomial, bruck, chain, chains, direct, hypercube, ring, tree
from shoal.schedule import scatter_gather as sg
from shoal.schedule.algorithm import Algorithm, one, one_per_rank, one_unless_alone
from shoal.schedule.collectives import MESSAGE, row_of
from shoal.schedule.dissemination import dissemination_barrier
from shoal.schedule.hierarchical import hierarchical
from shoal.schedule.sharded import sharded
from shoal.schedule.symmetry import (
    all_but_root,
    at_corner,
    at_corner_of_parity,
    in_trees,
    of_subtree,
    turned,
)
from shoal.schedule.weighted import weighted
from shoal.schedule.weights import is_weighted

_RING: Final = Algorithm(
    ring.ring_all_reduce,
    chains.ring_twice,
    one_per_rank,
    owner_rule=ring.ring_owner,
    alike_rule=turned,
)
_SHARDED: Final = sharded(0)

ALGORITHMS: Final[Mapping[str, Mapping[str, Algorithm]]] = MappingProxyType(
    {
        "all_reduce": {
            "direct": Algorithm(
                direct.direct_all_reduce,
                chains.gather,
                one,
                one_unless_alone,
                alike_rule=turned,
            ),
            "sharded": _SHARDED,
            "ring": _RING,
            "tree": Algorithm(
                tree.tree_all_reduce,
                chains.tree,
                tree.tree_chunks,
                owner_rule=tree.tree_owner,
                alike_rule=in_trees,
            ),
            "doubling": Algorithm(
                hypercube.doubling_all_reduce,
                chains.hypercube,
                one,
                hypercube.doubling_scratch,
                alike_rule=at_corner_of_parity,
            ),
            "halving": Algorithm(
                hypercube.halving_all_reduce,
                chains.hypercube_and_back,
                hypercube.halving_chunks,
                owner_rule=hypercube.halving_owner,
                alike_rule=at_corner,
            ),
            "ring_2d": hierarchical(_RING, _RING),
            "fairring": hierarchical(_SHARDED, _SHARDED),
        },
        "broadcast": {
            "direct": Algorithm(direct.direct_broadcast, chains.scatter, rooted=True),
            "binomial": Algorithm(binomial.binomial_broadcast, chains.binomial, rooted=True),
            "chain": Algorithm(chain.chain_broadcast, chains.ring, rooted=True),
            "scatter_gather": Algorithm(
                sg.scatter_gather_broadcast,
                chains.ring,
                one_per_rank,
                rooted=True,
                alike_rule=of_subtree,
            ),
        },
        "reduce": {
            "direct": Algorithm(direct.direct_reduce, chains.gather, rooted=True),
            "binomial": Algorithm(
                binomial.binomial_reduce,
                chains.binomial_reversed,
                one,
                binomial.binomial_reduce_scratch,
                rooted=True,
            ),
            "chain": Algorithm(
                chain.chain_reduce, chains.ring_reversed, one, chain.chain_scratch, rooted=True
            ),
            "scatter_gather": Algorithm(
                sg.scatter_gather_reduce,
                chains.there_and_back,
                one_per_rank,
                sg.scatter_gather_scratch,
                rooted=True,
                alike_rule=all_but_root,
            ),
        },
        "all_gather": {
            "direct": Algorithm(
                direct.direct_all_gather, chains.gather, one_per_rank, alike_rule=turned
            ),
            "ring": Algorithm(ring.ring_all_gather, chains.ring, one_per_rank, alike_rule=turned),
            "bruck": Algorithm(
                bruck.bruck_all_gather, chains.bruck_reversed, one_per_rank, alike_rule=turned
            ),
        },
        "reduce_scatter": {
            "direct": Algorithm(
                direct.direct_reduce_scatter,
                chains.gather,
                one_per_rank,
                encodes_once=True,
                alike_rule=turned,
            ),
            "ring": Algorithm(
                ring.ring_reduce_scatter,
                chains.ring,
                one_per_rank,
                ring.ring_scratch,
                alike_rule=turned,
            ),
        },
        "gather": {
            "direct": Algorithm(direct.direct_gather, chains.gather, one_per_rank, rooted=True),
            "binomial": Algorithm(
                binomial.binomial_gather,
                chains.binomial_reversed,
                one_per_rank,
                binomial.binomial_blocks_scratch,
                rooted=True,
            ),
        },
        "scatter": {
            "direct": Algorithm(direct.direct_scatter, chains.scatter, one_per_rank, rooted=True),
            "binomial": Algorithm(
                binomial.binomial_scatter,
                chains.binomial,
                one_per_rank,
                binomial.binomial_blocks_scratch,
                rooted=True,
            ),
        },
        "all_to_all": {
            "pairwise": Algorithm(
                direct.pairwise_all_to_all, chains.gather, one_per_rank, alike_rule=turned
            ),
            "bruck": Algorithm(
                bruck.bruck_all_to_all,
                chains.bruck,
                one_per_rank,
                bruck.bruck_all_to_all_scratch,
                alike_rule=turned,
            ),
        },
        "barrier": {
            "dissemination": Algorithm(
                dissemination_barrier,
                chains.dissemination,
                one,
                one_unless_alone,
                alike_rule=turned,
            )
        },
    }
)
"""The algorithms by collective and name. Engine, plan, analysis, docs and tests read this table; a
line here is the whole registration. `find` also knows `sharded[W|S]` and `local/across`, which
cannot be listed."""

_TABLE: Final[Mapping[str, Mapping[str, Algorithm]]] = {
    **ALGORITHMS,
    MESSAGE: {
        "send": Algorithm(direct.direct_send, chains.gather, rooted=True),
        "recv": Algorithm(direct.direct_recv, chains.scatter, rooted=True),
    },
}

MORE_ALL_REDUCES: Final = (
    "sharded[8*1|4*3] with weights of workers and servers, and local/across such as sharded/ring"
)
"""Text about the names that `find` accepts besides the table."""


@functools.lru_cache(maxsize=1024)
def find(collective: str, name: str) -> Algorithm:
    """Return the algorithm of that name.

    For all_reduce, besides those in `ALGORITHMS`: "sharded[8*1|4*3]" with weights of workers and
    servers (`weights.parse`), and "local/across" of two others, such as "sharded/ring" or
    "ring/tree", which is `hierarchical`. The halves of a `MESSAGE` are "send" and "recv".

    Raises:
        UsageError: there is no such collective or algorithm; the message lists those there are.
    """
    if collective not in _TABLE:
        row_of(collective)  # raises
    if name in _TABLE[collective]:
        return _TABLE[collective][name]
    if collective == "all_reduce" and is_weighted(name):
        return weighted(name)
    local, slash, across = name.partition("/")
    if collective == "all_reduce" and slash:
        return hierarchical(_part(name, local, local=True), _part(name, across, local=False))
    there_are = ", ".join(_TABLE[collective])
    if collective == "all_reduce":
        there_are += f", {MORE_ALL_REDUCES}"
    near = did_you_mean(name, _TABLE[collective])
    raise UsageError(f"no algorithm {name!r} for {collective}: there are {there_are}{near}")


def _part(whole: str, name: str, *, local: bool) -> Algorithm:
    good = [
        known
        for known, algorithm in ALGORITHMS["all_reduce"].items()
        if not algorithm.by_host and (algorithm.owner_rule or not local)
    ]
    if name in good:
        return ALGORITHMS["all_reduce"][name]
    where = "inside a host" if local else "between hosts"
    raise UsageError(
        f"no algorithm {whole!r} for all_reduce: {name!r} cannot run {where}; {', '.join(good)} can"
    )
