"""The table of all formulas: `formula_of("all_reduce", "ring")(n_bytes, site)` is its `Load`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from shoal.plan import all_reduce, blocks, rooted
from shoal.plan.hierarchical import ACROSS, LOCAL, hierarchical
from shoal.plan.site import Load, Site

Formula = Callable[[float, Site], Load]

FORMULAS: Final[Mapping[str, Mapping[str, Formula]]] = MappingProxyType(
    {
        "all_reduce": {**ACROSS, "sharded": all_reduce.sharded},
        "broadcast": {
            "direct": rooted.direct_broadcast,
            "binomial": rooted.binomial_broadcast,
            "chain": rooted.chain_broadcast,
            "scatter_gather": rooted.scatter_gather_broadcast,
        },
        "reduce": {
            "direct": rooted.direct_reduce,
            "binomial": rooted.binomial_reduce,
            "chain": rooted.chain_reduce,
            "scatter_gather": rooted.scatter_gather_reduce,
        },
        "all_gather": {
            "direct": blocks.direct_all_gather,
            "ring": blocks.ring_all_gather,
            "bruck": blocks.bruck_all_gather,
        },
        "reduce_scatter": {
            "direct": blocks.direct_reduce_scatter,
            "ring": blocks.ring_reduce_scatter,
        },
        "gather": {"direct": rooted.direct_gather, "binomial": rooted.binomial_gather},
        "scatter": {"direct": rooted.direct_scatter, "binomial": rooted.binomial_scatter},
        "all_to_all": {"pairwise": blocks.pairwise_all_to_all, "bruck": blocks.bruck_all_to_all},
        "barrier": {"dissemination": blocks.dissemination},
    }
)

_AMONG: Final = re.compile(r"sharded\((\d+)\)")
_ALIASES: Final = {"ring_2d": "ring/ring", "fairring": "sharded/sharded"}


@functools.lru_cache(maxsize=1024)
def formula_of(collective: str, name: str) -> Formula | None:
    """The formula of an algorithm; None if there is none, as for `send`."""
    known = FORMULAS.get(collective, {}).get(name)
    if known is not None or collective != "all_reduce":
        return known
    if among := _AMONG.fullmatch(name):
        return all_reduce.sharded_among(int(among[1]))
    local, slash, across = _ALIASES.get(name, name).partition("/")
    if slash and local in LOCAL and across in ACROSS:
        return hierarchical(local, across)
    return None
