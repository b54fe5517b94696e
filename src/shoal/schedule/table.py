"""The table of all algorithms, and how to find one by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from shoal.errors import UsageError
from shoal.schedule.algorithm import Algorithm, one, one_per_rank
from shoal.schedule.chain import chain_broadcast
from shoal.schedule.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_broadcast,
    direct_gather,
    direct_reduce,
    direct_reduce_scatter,
    direct_scatter,
    direct_scratch,
)
from shoal.schedule.dissemination import dissemination_barrier, dissemination_scratch
from shoal.schedule.pairwise import pairwise_all_to_all
from shoal.schedule.point import recv, send
from shoal.schedule.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_scratch,
)
from shoal.schedule.sharded import sharded_all_reduce

ALGORITHMS: Final[Mapping[str, Mapping[str, Algorithm]]] = MappingProxyType(
    {
        "all_reduce": {
            "direct": Algorithm(direct_all_reduce, one, direct_scratch),
            "sharded": Algorithm(sharded_all_reduce, one_per_rank),
            "ring": Algorithm(ring_all_reduce, one_per_rank),
        },
        "broadcast": {
            "direct": Algorithm(direct_broadcast, rooted=True),
            "chain": Algorithm(chain_broadcast, rooted=True),
        },
        "reduce": {
            "direct": Algorithm(direct_reduce, rooted=True),
        },
        "all_gather": {
            "direct": Algorithm(direct_all_gather, one_per_rank),
            "ring": Algorithm(ring_all_gather, one_per_rank),
        },
        "reduce_scatter": {
            "direct": Algorithm(direct_reduce_scatter, one_per_rank),
            "ring": Algorithm(ring_reduce_scatter, one_per_rank, ring_scratch),
        },
        "gather": {
            "direct": Algorithm(direct_gather, one_per_rank, rooted=True),
        },
        "scatter": {
            "direct": Algorithm(direct_scatter, one_per_rank, rooted=True),
        },
        "all_to_all": {
            "pairwise": Algorithm(pairwise_all_to_all, one_per_rank),
        },
        "barrier": {
            "dissemination": Algorithm(dissemination_barrier, one, dissemination_scratch),
        },
        "send_recv": {
            "send": Algorithm(send, rooted=True),
            "recv": Algorithm(recv, rooted=True),
        },
    }
)
"""By collective and name. Read by engine, plan, lens, docs and tests; a line here is the whole
registration."""


def find(collective: str, name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        UsageError: there is no such collective or algorithm; the message lists those there are.
    """
    if collective not in ALGORITHMS:
        raise UsageError(f"no collective {collective!r}: there are {', '.join(ALGORITHMS)}")
    known = ALGORITHMS[collective]
    if name not in known:
        raise UsageError(f"no algorithm {name!r} for {collective}: there are {', '.join(known)}")
    return known[name]
