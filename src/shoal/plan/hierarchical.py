"""What an all-reduce by hosts costs: inside each host, and across them on its rails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from shoal.plan import all_reduce
from shoal.plan.site import Load, Site
from shoal.schedule import ALGORITHMS

Formula = Callable[[float, Site], Load]

LOCAL: Final[Mapping[str, Formula]] = MappingProxyType(
    {"ring": all_reduce.ring, "sharded": all_reduce.sharded_by_all}
)
ACROSS: Final[Mapping[str, Formula]] = MappingProxyType(
    {
        "direct": all_reduce.direct,
        "sharded": all_reduce.sharded_by_all,
        "ring": all_reduce.ring,
        "tree": all_reduce.tree,
        "doubling": all_reduce.doubling,
        "halving": all_reduce.halving,
    }
)


def hierarchical(local: str, across: str) -> Formula:
    """Reduce-scatter in every host, all-reduce of M/r on each of r rails, all-gather in every host.

    The first and the last phase together are the local all-reduce; the rails share the cables.
    """
    inside, outside = LOCAL[local], ACROSS[across]
    n_chunks = ALGORITHMS["all_reduce"][across].n_chunks

    def formula(n_bytes: float, site: Site) -> Load:
        """The sum of the phases, each on its own part of the cluster.

        What travels inside a host is cut as the rails need it.
        """
        here = site.inside(n_chunks(site.n_hosts))
        return inside(n_bytes, here).then(outside(n_bytes / site.here, site.across))

    return formula
